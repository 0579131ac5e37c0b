"""Events of ranks in files of the run's folder on each host, apart from what ranks print.

    rank: ChannelWriter -- <run folder>/events-<pid>-<number>.jsonl --> launcher or agent: ChannelReader

A rank's output may stop being read, and its last line may be unfinished: events depend on neither. A file has
one writer. A writer begins the next file when one is large, so that a reader may remove those before.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path

MAX_FILE_BYTES = 2**20
MAX_READ_BYTES = 2**20
"""A call of ``ChannelReader.read`` stops after the file with which it has read so many bytes."""


class ChannelWriter:
    """Writes the events of this process.

    Args:
        folder: Of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pid = 0
        self._handle = -1
        self._number = 0
        self._size_bytes = 0

    def write(self, line: str) -> None:
        """Append a line.

        Raises:
            OSError: It cannot be written, or not all of it.
        """
        if self._pid != os.getpid() or self._size_bytes >= MAX_FILE_BYTES:
            self._open_next()
        data = f"{line}\n".encode(errors="backslashreplace")
        while data:
            try:
                written = os.write(self._handle, data)
            except OSError:
                self._size_bytes = MAX_FILE_BYTES  # half of this line is there: the next begins a file
                raise
            self._size_bytes += written
            data = data[written:]

    def _open_next(self) -> None:
        name = f"events-{os.getpid()}-{self._number + 1:09}.jsonl"
        handle = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.close()
        self._handle, self._pid, self._number, self._size_bytes = handle, os.getpid(), self._number + 1, 0

    def close(self) -> None:
        """Let go of the file; a line that is written after that begins another one."""
        if self._handle >= 0:
            os.close(self._handle)
        self._handle, self._pid = -1, 0


class ChannelReader:
    """Reads the events of all processes of a run on this host, each once.

    Args:
        folder: Of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: defaultdict[str, int] = defaultdict(int)

    def read(self) -> list[str]:
        """Return lines that were written since the last call; of more than MAX_READ_BYTES, the first."""
        lines: list[str] = []
        size_bytes = 0
        files = sorted(self._folder.glob("events-*.jsonl"))
        for file, following in zip_longest(files, files[1:]):
            if size_bytes >= MAX_READ_BYTES:
                break
            with suppress(OSError):
                with file.open("rb") as stream:
                    stream.seek(self._offsets[file.name])
                    data = stream.read()
                whole = data[: data.rfind(b"\n") + 1]
                lines += whole.decode(errors="replace").splitlines()
                size_bytes += len(whole)
                self._offsets[file.name] += len(whole)
                # Listed before this one was read to its end: its writer has gone on to the next.
                if following is not None and _pid_of(following) == _pid_of(file):
                    file.unlink()
                    del self._offsets[file.name]
        return lines


def _pid_of(file: Path) -> str:
    return file.name.split("-")[1]


def channel_of(environ: Mapping[str, str]) -> ChannelWriter | None:
    """Return the channel of a rank that a launch of ours has started; None: it was started otherwise."""
    folder = environ.get("HOROVOD_TRAIN_RUN")
    return ChannelWriter(Path(folder)) if folder is not None else None
