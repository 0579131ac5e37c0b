"""A launch's hand on another host: started there by ssh, does what the launcher says, leaves no rank behind.

    launcher  -- {"id": 1, "do": "put", "args": {...}} -->  agent
              <-- {"id": 1, "result": ...}             --

One JSON line each, through the encrypted connection: no port is opened and nothing is pickled. When
the connection ends, or nothing is heard for too long, the launcher is taken for dead and every process
of the run on this host is killed.
"""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from horovod_train import __version__
from horovod_train.launch.hosts.host_actions import HostActions

GREETING = "horovod_train agent"
"""Followed by the version: the first line that an agent says."""


def serve(stage: str, silence_s: float) -> None:
    """Do what standard input says until it ends.

    Args:
        stage: Folder of the run on this host.
        silence_s: Hearing nothing for so long means that the launcher is gone, in seconds.
    """
    host = HostActions(stage)
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever prints must not get between the answers
    os.write(answers, f"{GREETING} {__version__}\n".encode())
    try:
        buffer = b""
        while select.select([0], [], [], silence_s)[0]:
            piece = os.read(0, 1 << 20)
            if not piece:
                break
            *lines, buffer = (buffer + piece).split(b"\n")
            for line in lines:
                _write_all(
                    answers, json.dumps(answer(host, json.loads(line)), default=asdict).encode() + b"\n"
                )
    except BrokenPipeError:
        pass
    finally:
        host.kill()
        host.remove()


def answer(host: HostActions, request: Mapping[str, Any]) -> dict[str, object]:
    """Do one thing; an error is an answer, too."""
    try:
        return {"id": request["id"], "result": getattr(host, request["do"])(**request["args"])}
    except Exception as error:  # noqa: BLE001  (the launcher decides what an error means)
        return {"id": request["id"], "error": f"{type(error).__name__}: {error}"}


def _write_all(handle: int, data: bytes) -> None:
    while data:
        data = data[os.write(handle, data) :]


if __name__ == "__main__":
    serve(sys.argv[1], float(sys.argv[2]))
