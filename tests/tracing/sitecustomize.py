"""Notes who called the functions that a path goes through: see ``tests/support/paths.py``.

Python imports this file by its name when its folder is on the PYTHONPATH. Each process appends lines to a
file of its own: a station, and the functions of the package on the stack, the outermost first.
"""

import json
import os
import sys
import threading
from pathlib import Path

PACKAGE = f"{os.sep}horovod_train{os.sep}"


def trace(folder: Path) -> None:
    """Write the stack of each call of a station into a folder, which has the list of them."""
    stations = json.loads((folder / "stations.json").read_text(encoding="utf-8"))
    known: dict[object, str | None] = {}
    seen: set[tuple[str, ...]] = set()

    def note(frame, event: str, _argument: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code not in known:
            called = f"{code.co_filename}:{code.co_qualname}"
            known[code] = next((name for name in stations if called.endswith(name)), None)
        if known[code] is None:
            return
        stack = []
        while frame is not None:
            if PACKAGE in frame.f_code.co_filename:
                file = frame.f_code.co_filename.rpartition(PACKAGE)[2]
                stack.append(f"{file}:{frame.f_code.co_qualname}")
            frame = frame.f_back
        line = (known[code], *reversed(stack))
        if line not in seen:
            seen.add(line)
            with (folder / f"{os.uname().nodename}-{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    threading.setprofile(note)
    sys.setprofile(note)


if "TRACED_INTO" in os.environ:
    trace(Path(os.environ["TRACED_INTO"]))
