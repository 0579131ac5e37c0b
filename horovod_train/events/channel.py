"""Transfer of events from ranks to the launcher or agent, in files of the run folder on each host.

    rank: ChannelWriter -- <run folder>/events-<pid>-<number>.jsonl --> launcher or agent: ChannelReader

Events are separate from the output of ranks, which may block or end in an unfinished line. Each file has one
writer. The writer starts a new file when the current file is large, so that the reader may delete old files.
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
"""A call of ``ChannelReader.read`` opens no further file after this number of bytes."""


class ChannelWriter:
    """Writer of the events of this process, in the run folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pid = 0
        self._handle = -1
        self._number = 0
        self._size_bytes = 0

    def write(self, line: str) -> None:
        """Append a line.

        Raises:
            OSError: The line cannot be written, or only a part of it.
        """
        if self._pid != os.getpid() or self._size_bytes >= MAX_FILE_BYTES:
            self._open_next()
        data = f"{line}\n".encode(errors="backslashreplace")
        while data:
            try:
                written = os.write(self._handle, data)
            except OSError:
                self._size_bytes = MAX_FILE_BYTES  # a part of this line is written: the next starts a file
                raise
            self._size_bytes += written
            data = data[written:]

    def _open_next(self) -> None:
        name = f"events-{os.getpid()}-{self._number + 1:09}.jsonl"
        handle = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.close()
        self._handle, self._pid, self._number, self._size_bytes = handle, os.getpid(), self._number + 1, 0

    def close(self) -> None:
        """Close the file; the next line starts another file."""
        if self._handle >= 0:
            os.close(self._handle)
        self._handle, self._pid = -1, 0


class ChannelReader:
    """Reader of the events of all processes of a run on this host; returns each event once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: defaultdict[str, int] = defaultdict(int)

    def read(self) -> list[str]:
        """Return lines that were written since the last call, about MAX_READ_BYTES at most."""
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
                # The writer's next file was listed before this file was read, so this file is complete.
                if following is not None and _pid_of(following) == _pid_of(file):
                    file.unlink()
                    del self._offsets[file.name]
        return lines


def _pid_of(file: Path) -> str:
    return file.name.split("-")[1]


def channel_of(environ: Mapping[str, str]) -> ChannelWriter | None:
    """Return the channel of a rank that ``horovod-train run`` has started; None for other ranks."""
    folder = environ.get("HOROVOD_TRAIN_RUN")
    return ChannelWriter(Path(folder)) if folder is not None else None
