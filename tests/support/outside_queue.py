"""The programs of the queue of ``tests/plugin``: oq-submit, oq-find, oq-state and oq-end.

A job starts at once, or after the job that it waits for, on this machine, alone in its session.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from psutil import STATUS_ZOMBIE, NoSuchProcess, Process

STATE = "STUB_OF_QUEUE"


def install(bin_folder: Path) -> None:
    """Write the programs."""
    bin_folder.mkdir()
    for name in ("oq-submit", "oq-find", "oq-state", "oq-end"):
        program = bin_folder / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {name} "$@"\n')
        program.chmod(0o755)


def jobs() -> dict[str, Path]:
    return {path.stem: path for path in Path(os.environ[STATE]).glob("*.json")}


def oq_submit(argv: list[str]) -> None:
    options, rest = {}, list(argv)
    while rest[0].startswith("--"):
        name = rest.pop(0)
        options[name] = rest.pop(0) if name in ("--ranks", "--per-node", "--after") else ""
    number = str(len(jobs()) + 1)
    path = Path(os.environ[STATE], f"{number}.json")
    hosts = path.with_suffix(".hosts")
    hosts.write_text(f"{os.uname().nodename}\n" * int(options["--ranks"]))
    wait = (
        f'while [ "$(oq-state {options["--after"]})" = running ]; do sleep 0.2; done; '
        if "--after" in options
        else ""
    )
    with path.with_suffix(".out").open("ab") as output:
        process = subprocess.Popen(
            ["/bin/bash", "-c", wait + 'exec /bin/bash "$@"', "oq", *rest],
            env={**os.environ, "OQ_JOB": number, "OQ_HOSTFILE": str(hosts)},
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    path.write_text(json.dumps({"pid": process.pid, "script": rest[0]}))
    print(number)


def oq_find(argv: list[str]) -> None:
    (script,) = argv
    print(*[name for name, path in jobs().items() if json.loads(path.read_text())["script"] == script][-1:])


def oq_state(argv: list[str]) -> None:
    (number,) = argv
    if number not in jobs():
        print("unknown")
        return
    try:
        is_running = Process(json.loads(jobs()[number].read_text())["pid"]).status() != STATUS_ZOMBIE
    except NoSuchProcess:
        is_running = False
    print("running" if is_running else "ended")


def oq_end(argv: list[str]) -> None:
    number, name = argv
    os.kill(json.loads(jobs()[number].read_text())["pid"], signal.Signals[f"SIG{name}"])


if __name__ == "__main__":
    {"oq-submit": oq_submit, "oq-find": oq_find, "oq-state": oq_state, "oq-end": oq_end}[sys.argv[1]](
        sys.argv[2:]
    )
