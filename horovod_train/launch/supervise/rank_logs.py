"""Log files of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from horovod_train.events.wire import Line
from horovod_train.launch.supervise.follow import Follower
from horovod_train.system.files import LogFile


class RankLogs(Follower):
    """Follower that writes the output of each rank, without events, to ``rank-N.log`` in the run folder."""

    def __init__(self, log_dir: Path, on_loss: Callable[[str], None]) -> None:
        self._log_dir = log_dir
        self._on_loss = on_loss
        self._logs: dict[int, LogFile] = {}

    def handle(self, line: Line) -> None:
        """Write a line, if the launcher has tagged it with its rank."""
        if line.event is not None or line.rank is None:
            return
        if line.rank not in self._logs:
            self._logs[line.rank] = LogFile(self._log_dir / f"rank-{line.rank}.log", self._on_loss)
        self._logs[line.rank].write(line.text)

    def close(self) -> None:
        """Close the logs."""
        for log in self._logs.values():
            log.close()
