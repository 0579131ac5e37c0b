"""``horovod-train serve`` in a process of its own, which may be killed and started again."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import horovod_train as ht
from support.launching import BIN, environment, free_port

READ, SUBMIT = "read-token-0123456789", "submit-token-0123456789"


class Service:
    """A server on a fixed port. Jobs are those of this environment's account.

    Args:
        folder: Its working directory.
        prefix: Command that runs it, such as in a namespace of the network.
        variables: Further environment variables.
    """

    def __init__(
        self, folder: Path, prefix: Sequence[str] = (), variables: Mapping[str, str] | None = None
    ) -> None:
        self.folder = folder
        self._prefix = prefix
        self._environment = environment(**(variables or {}))
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        tokens = folder / "tokens"
        tokens.write_text(f"read {READ}\nsubmit {SUBMIT}\n")
        tokens.chmod(0o600)
        self._process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [
                *self._prefix,
                *(str(BIN / "horovod-train"), "serve", "--port", str(self._port)),
                *("--allow-submit", "--tokens", str(self.folder / "tokens")),
            ],
            cwd=self.folder, env=self._environment, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        assert "page: " in process.stdout.readline()
        return process

    def kill(self) -> None:
        """Kill the server without warning, and start it again."""
        self.end(signal.SIGKILL)
        self._process = self._start()

    def end(self, number: int = signal.SIGTERM) -> None:
        """End the server."""
        self._process.send_signal(number)
        self._process.wait(30)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def client(self) -> ht.Client:
        """Return a client that may submit."""
        return ht.Client(self.url, SUBMIT)


def kill_after(service: Service, pause_s: float) -> None:
    """Kill a server at a moment."""
    time.sleep(pause_s)
    service.kill()
