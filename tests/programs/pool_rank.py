"""A rank that runs one program after the other, as tests ask for them: starting it takes longer than most do.

usage: PORT, with a token in POOL_TOKEN. The test process listens there; requests and answers are lines of
JSON. Programs are those of this folder, and are run as if each had a process of its own: with arguments,
a folder, and variables. Horovod stays up between them.
"""

from __future__ import annotations

import io
import json
import logging
import os
import runpy
import signal
import socket
import sys
import traceback
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from horovod_train.collectives.horovod import HorovodCommunicator
from horovod_train.horovod.mpi import number_of

OF_LAUNCHERS = ("HOROVOD", "OMPI", "PMI", "PMIX")
RANK = number_of(os.environ, "rank", alone=0)


@contextmanager
def as_a_process_of_its_own(request: dict[str, Any]) -> Any:
    before = dict(os.environ), sys.argv, list(sys.path), Path.cwd()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    logger = logging.getLogger("horovod_train")
    loggers = list(logger.handlers), logger.propagate
    if request["alone"]:
        for name in [name for name in os.environ if name.startswith(OF_LAUNCHERS)]:
            del os.environ[name]
    os.environ.update(request["env"])
    sys.argv = [request["program"], *request["arguments"]]
    sys.path.insert(0, str(Path(request["program"]).parent))
    os.chdir(request["folder"])
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before[0])
        sys.argv, sys.path[:] = before[1], before[2]
        os.chdir(before[3])
        for number, handler in handlers.items():
            signal.signal(number, handler)
        logger.handlers[:], logger.propagate = loggers


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Run a program; return its exit code and what it has printed."""
    if request["alone"] and RANK != 0:
        return {"code": 0, "output": ""}
    code, output = 0, io.StringIO()
    with as_a_process_of_its_own(request), redirect_stdout(output), redirect_stderr(output):
        try:
            runpy.run_path(request["program"], run_name="__main__")
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else int(left.code is not None)
        except BaseException:  # noqa: BLE001  (the test says what it means)
            code = 1
            traceback.print_exc()
    if "keras" in sys.modules:
        # Layers are named by counting, and the next program counts from 1 on all ranks.
        sys.modules["keras"].utils.clear_session()
    return {"code": code, "output": output.getvalue()}


def main(port: int) -> None:
    """Do what the test process asks for, until it hangs up."""
    HorovodCommunicator.close = lambda self: self.at_close.close()  # type: ignore[method-assign]
    with socket.create_connection(("127.0.0.1", port)) as connection, connection.makefile("rw") as stream:
        hello = {"token": os.environ.pop("POOL_TOKEN"), "rank": RANK}
        stream.write(json.dumps(hello) + "\n")
        stream.flush()
        for line in stream:
            stream.write(json.dumps(run(json.loads(line))) + "\n")
            stream.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
