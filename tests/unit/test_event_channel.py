"""Events reach the launcher once each, whatever becomes of files, lines and output."""

from __future__ import annotations

import io
import json
import os
import threading

import pytest

from horovod_train.events import file as file_module
from horovod_train.events.file import ChannelReader, ChannelWriter
from horovod_train.events.types import Notice
from horovod_train.events.wire import MARK, Reporter, parse_line


@pytest.fixture
def opened(tmp_path):
    """A function that opens a writer."""
    writers = []

    def opened(folder=tmp_path):
        writers.append(ChannelWriter(folder))
        return writers[-1]

    yield opened
    for writer in writers:
        writer.close()


def texts(lines):
    return [parse_line(line).event.text for line in lines]


def test_each_line_is_read_once(opened, tmp_path):
    writer, reader = opened(), ChannelReader(tmp_path)

    assert reader.read() == []
    writer.write("a")
    writer.write("b")
    assert reader.read() == ["a", "b"]
    assert reader.read() == []
    writer.write("c")
    assert reader.read() == ["c"]


def test_half_a_line_is_read_when_it_is_whole(tmp_path):
    reader = ChannelReader(tmp_path)
    file = tmp_path / f"events-{os.getpid()}-000000001.jsonl"
    file.write_text("a\nhalf")

    assert reader.read() == ["a"]
    with file.open("a") as stream:
        stream.write(" a line\n")
    assert reader.read() == ["half a line"]


def test_of_many_lines_none_is_lost_and_none_kept(monkeypatch, opened, tmp_path):
    monkeypatch.setattr(file_module, "MAX_FILE_BYTES", 1000)
    monkeypatch.setattr(file_module, "MAX_READ_BYTES", 2500)
    reader, read = ChannelReader(tmp_path), []
    done = threading.Event()

    def write():
        writer = opened()
        for number in range(5000):
            writer.write(f"line {number}")
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    while not done.is_set():
        read += reader.read()
    thread.join()
    while lines := reader.read():
        read += lines

    assert read == [f"line {number}" for number in range(5000)]
    assert len(list(tmp_path.glob("events-*"))) == 1


@pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning")  # by JAX, of another test
def test_a_process_that_was_forked_writes_a_file_of_its_own(opened, tmp_path):
    writer, reader = opened(), ChannelReader(tmp_path)
    writer.write("parent")
    child = os.fork()
    if child == 0:
        writer.write("child")
        os._exit(0)
    os.waitpid(child, 0)
    writer.write("parent again")

    assert sorted(reader.read()) == ["child", "parent", "parent again"]
    assert len(list(tmp_path.glob("events-*"))) == 2


def test_what_the_channel_does_not_take_goes_to_the_output(opened, tmp_path):
    output = io.StringIO()
    reporter = Reporter(3, as_json=True, stream=output, channel=opened(tmp_path / "gone"))

    reporter.report(Notice(text="one"))
    (tmp_path / "gone").mkdir()
    reporter.report(Notice(text="two"))

    assert texts(output.getvalue().splitlines()) == ["one"]
    assert texts(ChannelReader(tmp_path / "gone").read()) == ["two"]


def test_a_line_that_could_not_be_written_to_its_end_spoils_no_other(monkeypatch, opened, tmp_path):
    writer, reader, write = opened(), ChannelReader(tmp_path), os.write
    writer.write("before")
    room = [3]

    def until_full(handle, data):
        if not room[0]:
            raise OSError(28, "No space left on device")
        taken, room[0] = min(room[0], len(data)), 0
        return write(handle, data[:taken])

    with monkeypatch.context() as full:
        full.setattr(file_module.os, "write", until_full)
        with pytest.raises(OSError, match="No space"):
            writer.write("a line that is cut")
    writer.write("after")

    assert reader.read() == ["before", "after"]


def test_with_a_channel_the_output_has_no_events(opened, tmp_path):
    output = io.StringIO()

    Reporter(0, as_json=True, stream=output, channel=opened()).report(Notice(text="x"))

    assert output.getvalue() == ""
    (line,) = ChannelReader(tmp_path).read()
    assert json.loads(line.removeprefix(MARK)) == {
        "kind": "notice", "rank": 0, "text": "x", "is_stall": False,
    }  # fmt: skip
