"""What each rank writes, in its own log."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from horovod_train.events.wire import Line
from horovod_train.system.files import LogFile


class RankLogs:
    """Writes what ranks say, and no events, to ``rank-N.log``.

    Args:
        log_dir: Folder of the run.
        on_loss: Told what is wrong when a line is lost.
    """

    def __init__(self, log_dir: Path, on_loss: Callable[[str], None]) -> None:
        self._log_dir = log_dir
        self._on_loss = on_loss
        self._logs: dict[int, LogFile] = {}

    def handle(self, line: Line) -> None:
        """Write a line that a launcher has tagged with its rank."""
        if line.event is not None or line.rank is None:
            return
        if line.rank not in self._logs:
            self._logs[line.rank] = LogFile(self._log_dir / f"rank-{line.rank}.log", self._on_loss)
        self._logs[line.rank].write(line.text)

    def close(self) -> None:
        """Close the logs."""
        for log in self._logs.values():
            log.close()
