"""What cannot be shown or written is dropped, and told; it never ends anything."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

from horovod_train.system.files import LogFile
from horovod_train.system.streams import MAX_LINES_AT_ONCE, DroppingStream

FULL = "/dev/full"  # says what a full disk says
# The same calls as `horovod-train run` makes; prints, and then says in a file that it came to its end.
PROGRAM = """
import sys
from horovod_train.system.streams import install_dropping_streams
install_dropping_streams()
for number in range({lines}):
    print("line", number)
print("to standard error", file=sys.stderr)
open({done!r}, "w").write("done")
raise SystemExit(7)
"""


def program(tmp_path, lines=1000):
    return [sys.executable, "-c", PROGRAM.format(lines=lines, done=str(tmp_path / "done"))]


class TestAProgram:
    def ends_as_it_wants(self, process, tmp_path):
        assert process.wait(30) == 7
        assert (tmp_path / "done").read_text() == "done"

    def test_goes_on_when_its_pipe_is_cut(self, tmp_path):
        reading, writing = os.pipe()
        process = subprocess.Popen(program(tmp_path, 100_000), stdout=writing, stderr=writing)
        os.close(writing)
        os.read(reading, 10)
        os.close(reading)

        self.ends_as_it_wants(process, tmp_path)

    def test_goes_on_when_the_disk_is_full(self, tmp_path):
        with Path(FULL).open("wb") as full:
            process = subprocess.Popen(program(tmp_path), stdout=full, stderr=full)

        self.ends_as_it_wants(process, tmp_path)

    def test_goes_on_when_its_terminal_is_closed(self, tmp_path):
        terminal, inside = pty.openpty()
        process = subprocess.Popen(program(tmp_path, 100_000), stdout=inside, stderr=inside)
        os.close(inside)
        os.read(terminal, 10)
        os.close(terminal)

        self.ends_as_it_wants(process, tmp_path)

    def test_goes_on_without_any_output(self, tmp_path):
        command = ["/bin/sh", "-c", 'exec "$@" >&- 2>&-', "sh", *program(tmp_path)]

        self.ends_as_it_wants(subprocess.Popen(command), tmp_path)

    def test_shows_everything_in_order_where_it_can(self, tmp_path):
        done = subprocess.run(program(tmp_path, 3), capture_output=True, text=True, check=False)

        assert done.stdout == "line 0\nline 1\nline 2\n"
        assert done.stderr == "to standard error\n"
        assert done.returncode == 7


class TestAReaderThatDoesNotRead:
    def test_is_waited_for_once_and_told_afterwards_what_is_missing(self):
        reading, writing = os.pipe()
        stream = DroppingStream(writing, patience_s=0.3)
        started = time.monotonic()

        for _ in range(100):
            stream.write(b"x" * 4096)
        took_s = time.monotonic() - started
        dropped = stream.num_dropped_bytes
        while len(os.read(reading, 1 << 20)) == 1 << 20:
            pass
        stream.write(b"again\n")
        shown = os.read(reading, 1 << 20)

        assert 0.3 <= took_s < 3
        assert 0 < dropped < 100 * 4096
        assert shown == f"\n... {dropped} bytes could not be shown ...\nagain\n".encode()
        assert stream.num_dropped_bytes == 0
        os.close(reading)
        os.close(writing)

    def test_of_a_terminal_neither(self):
        terminal, inside = pty.openpty()
        termios.tcflow(inside, termios.TCOOFF)  # as Ctrl-S
        stream = DroppingStream(inside, patience_s=0.2)

        assert stream.isatty()
        assert stream.write(b"never seen") == 10
        assert stream.num_dropped_bytes == 10
        termios.tcflow(inside, termios.TCOON)
        os.close(inside)
        os.close(terminal)


def test_mpirun_never_finds_more_lines_than_it_can_tag(monkeypatch):
    """It reads up to 4096 bytes at once, and may be late."""
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    reading, writing = os.pipe()
    pieces = []

    def read():
        while piece := os.read(reading, 4096):
            pieces.append(piece)
            time.sleep(0.001)

    thread = threading.Thread(target=read)
    thread.start()
    stream = DroppingStream(writing)
    text = b"".join(b"%d\n" % number for number in range(2000)) + b"a long line " * 1000 + b"\n"
    for begin in range(0, len(text), 5000):
        stream.write(text[begin : begin + 5000])
    os.close(writing)
    thread.join()
    os.close(reading)

    assert b"".join(pieces) == text
    assert max(piece.count(b"\n") for piece in pieces) <= MAX_LINES_AT_ONCE


def test_an_mpirun_that_does_not_read_is_waited_for_once(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    reading, writing = os.pipe()
    stream = DroppingStream(writing, patience_s=0.3)
    lines = b"line\n" * MAX_LINES_AT_ONCE

    begun_s = time.monotonic()
    for _ in range(10):
        stream.write(lines)
    took_s = time.monotonic() - begun_s

    assert 0.3 <= took_s < 9 * 0.3
    assert stream.num_dropped_bytes == 9 * len(lines)
    assert os.read(reading, 4096) == lines
    stream.write(b"more\n")
    assert os.read(reading, 4096) == f"\n... {9 * len(lines)} bytes could not be shown ...\nmore\n".encode()
    os.close(reading)
    os.close(writing)


class TestLogs:
    def test_have_every_line(self, tmp_path):
        log = LogFile(tmp_path / "log")
        log.write("one")
        log.write("two\x00 \ud800")
        log.close()

        assert (tmp_path / "log").read_bytes() == b"one\ntwo\x00 ?\n"
        assert (tmp_path / "log").stat().st_mode & 0o077 == 0

    def test_on_a_full_disk_lose_lines_and_say_so(self):
        problems = []
        log = LogFile(Path(FULL), problems.append)

        log.write("one")
        log.write("two")
        log.close()

        assert set(problems) == {"full is incomplete: No space left on device"}

    def test_go_on_when_there_is_room_again(self, tmp_path, monkeypatch):
        log = LogFile(tmp_path / "log")
        log.write("one")
        real = os.write

        def full(handle, data):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as context:
            context.setattr(os, "write", full)
            log.write("two")
            log.write("three")
        log.write("four")
        log.close()

        assert os.write is real
        assert (tmp_path / "log").read_text() == "one\n... 2 lines could not be written ...\nfour\n"

    def test_never_join_half_a_line_and_the_next(self, tmp_path, monkeypatch):
        log = LogFile(tmp_path / "log")
        real = os.write

        def half(handle, data):
            if len(data) < 4:
                raise OSError(28, "No space left on device")
            return real(handle, data[:4])

        with monkeypatch.context() as context:
            context.setattr(os, "write", half)
            log.write("123456")
        log.write("seven")
        log.close()

        assert (tmp_path / "log").read_text() == "1234\n... 1 lines could not be written ...\nseven\n"


def test_a_stream_never_raises():
    reading, writing = os.pipe()
    os.close(reading)
    os.close(writing)
    stream = DroppingStream(writing, patience_s=0.0)

    assert stream.write(b"nobody") == 6
    assert not stream.isatty()
    stream.flush()
