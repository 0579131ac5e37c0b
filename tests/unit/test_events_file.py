"""The file of a run's events: every line an event, never too large, never in the way."""

from __future__ import annotations

import itertools
import json
import math
import os
import threading

import numpy as np
import pytest
from support.following import event

from horovod_train import __version__
from horovod_train.events.file import EventsFile, opened, places_to_keep, read_events, series_of, thinned
from horovod_train.events.types import Evaluation, Notice, Progress, StateChanged
from horovod_train.events.wire import parse_line
from horovod_train.launch import jobs
from horovod_train.monitor.history import HistoryReader
from horovod_train.plugins.report.document import MAX_POINTS as REPORT_POINTS
from horovod_train.plugins.report.document import curve_of

FULL = "/dev/full"


def progress(step, **fields):
    return parse_line(event("progress", step=step, **fields)).event


def test_events_are_read_as_they_were_written(tmp_path):
    file = EventsFile(tmp_path / "events.jsonl", clock=lambda: 7.5)
    written = [opened("j", "run-1"), progress(3), StateChanged(state="running", message="2 rank(s)")]
    for number, each in enumerate(written):
        file.write(each, number or None)
    file.close()

    found = list(read_events(tmp_path / "events.jsonl"))

    assert [record.event for record in found] == written
    assert [record.rank for record in found] == [None, 1, 2]
    assert {record.time_unix_s for record in found} == {7.5}


def test_a_start_says_what_wrote_the_file(tmp_path):
    file = EventsFile(tmp_path / "events.jsonl")
    file.write(opened("j", "run-1"))
    file.close()

    (line,) = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())

    assert line.pop("time_unix_s") > 1e9
    assert line == {
        "rank": None,
        "kind": "opened",
        "format_version": 1,
        "package_version": __version__,
        "job": "j",
        "run_id": "run-1",
    }


def test_a_second_start_adds_to_the_file(tmp_path):
    for step in (1, 2):
        file = EventsFile(tmp_path / "events.jsonl")
        file.write(progress(step), 0)
        file.close()

    assert [record.event.step for record in read_events(tmp_path / "events.jsonl")] == [1, 2]


def test_what_cannot_be_read_is_left_out(tmp_path):
    path = tmp_path / "events.jsonl"
    lines = ['{"kind": "notice", "rank"', "[]", "7", '{"kind": "of a later version"}', "\0", "[" * 5000]
    file = EventsFile(path)
    file.write(Notice(text="it has no time"), 0)
    file.close()
    good = path.read_text()
    path.write_text("\n".join([*lines, '{"kind": "notice", "rank": 0, "text": "x"}', good]))

    assert [record.event.text for record in read_events(path)] == ["it has no time"]


@pytest.mark.parametrize("max_bytes", [3_000, 20_000])
def test_a_file_stays_below_its_size_and_keeps_what_is_rare(tmp_path, max_bytes):
    path = tmp_path / "events.jsonl"
    file = EventsFile(path, max_bytes=max_bytes)
    file.write(opened("j", "run-1"))
    for step in range(2_000):
        file.write(progress(step), 0)
        if step % 500 == 0:
            file.write(Notice(text=f"at {step}"), 0)
        assert path.stat().st_size <= max_bytes
    file.close()

    found = [record.event for record in read_events(path)]

    assert path.stat().st_size > max_bytes / 4
    assert [each.text for each in found if isinstance(each, Notice)] == [
        "at 0",
        "at 500",
        "at 1000",
        "at 1500",
    ]
    steps = [each.step for each in found if isinstance(each, Progress)]
    assert (steps[0], steps[-1]) == (0, 1_999)
    assert steps == sorted(steps)
    assert len(path.read_text().splitlines()) == len(found)


@pytest.mark.parametrize("max_bytes", [0, 1, 150, 10_000])
def test_thinning_ends_whatever_the_lines_are(max_bytes):
    kinds = enumerate("abab" * 8)
    lines = ["garbage", "{}", *(f'{{"kind": "{kind}", "of": "{place:40}"}}' for place, kind in kinds)]

    kept = thinned(lines, max_bytes)

    assert sum(len(line) + 1 for line in kept) <= max_bytes
    assert [line for line in lines if line in kept] == kept


def test_bytes_that_are_no_text_are_in_nobodys_way(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"\xff\xfe\n" * 300)
    file = EventsFile(path, max_bytes=3_000)
    for step in range(50):
        file.write(progress(step), 0)
        assert path.stat().st_size <= 3_000
    file.close()

    assert [record.event.step for record in read_events(path)][-1] == 49


def test_an_event_that_is_larger_than_the_file_may_be_is_left_out(tmp_path):
    problems = []
    file = EventsFile(tmp_path / "events.jsonl", problems.append, max_bytes=2_000)
    file.write(progress(1), 0)
    file.write(Notice(text="x" * 5_000), 0)
    assert (tmp_path / "events.jsonl").stat().st_size <= 2_000
    file.write(progress(2), 0)
    file.close()

    assert [record.event.step for record in read_events(tmp_path / "events.jsonl")] == [1, 2]
    assert len(problems) == 1


def test_a_disk_that_is_full_is_told_once_and_may_be_told_in_an_event(tmp_path):
    problems = []

    def warn(problem):
        problems.append(problem)
        file.write(Notice(text=problem))

    (tmp_path / "events.jsonl").symlink_to(FULL)
    file = EventsFile(tmp_path / "events.jsonl", warn)
    for step in range(3):
        file.write(progress(step), 0)
    file.close()

    assert problems == ["events.jsonl is incomplete: No space left on device"]


def test_lost_events_leave_a_line_that_is_an_event(tmp_path, monkeypatch):
    file = EventsFile(tmp_path / "events.jsonl")
    write = os.write

    def refuse(handle, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("horovod_train.system.files.os.write", refuse)
    file.write(progress(1), 0)
    file.write(progress(2), 0)
    monkeypatch.setattr("horovod_train.system.files.os.write", write)
    file.write(progress(3), 0)
    file.close()

    told, last = (record.event for record in read_events(tmp_path / "events.jsonl"))
    assert told == Notice(text="2 events could not be written")
    assert last == progress(3)


def test_many_threads_may_write(tmp_path):
    file = EventsFile(tmp_path / "events.jsonl", max_bytes=20_000)
    threads = [
        threading.Thread(target=lambda: [file.write(progress(step), 0) for step in range(100)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    file.close()

    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert len(lines) == len(list(read_events(tmp_path / "events.jsonl"))) > 20


def test_each_change_of_state_is_told_once(tmp_path):
    seen = []
    state = jobs.StateFile(tmp_path, on_change=lambda *change: seen.append(change))

    state.write("running", message="2 rank(s)")
    state.write("running", message="2 rank(s)")
    state.set_warning("run.log", "run.log is incomplete")
    state.write("failed", 1, "no")

    assert seen == [
        ("running", "2 rank(s)"),
        ("running", "2 rank(s); run.log is incomplete"),
        ("failed", "no; run.log is incomplete"),
    ]


def loss_of(step):
    """A loss over ten million steps: it falls fast, then slowly, with one step of 5."""
    return 2 * math.exp(-step / 2e4) + 10 * (step + 1) ** -0.3 + 5 * (4_000_000 <= step < 4_001_000)


NUM_STEPS, INTERVAL = 10**7, 250


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of 30 days, whose file has been thinned out about 60 times."""
    folder = tmp_path_factory.mktemp("run")
    clock = itertools.count(1.7e9, 30 * 86_400 / (NUM_STEPS / INTERVAL))
    file = EventsFile(folder / "events.jsonl", max_lines=1_500, clock=lambda: next(clock))
    for step in range(0, NUM_STEPS + 1, INTERVAL):
        file.write(progress(step, loss=loss_of(step)), 0)
        if step % 100_000 == 0:
            file.write(Evaluation(epoch=step // 100_000, metrics={"loss": loss_of(step)}, step=step), 0)
    file.close()
    return folder


def is_true(steps, losses):
    """Whether lines between the points differ from the loss of each step by at most 1 % of its range."""
    every = np.arange(0, NUM_STEPS + 1, INTERVAL)
    expected = np.array([loss_of(int(step)) for step in every])
    return np.abs(np.interp(every, steps, losses) - expected).max() <= 0.01 * np.ptp(expected)


class TestALongRun:
    def test_has_a_true_curve_for_programs(self, folder):
        points = series_of(record.event for record in read_events(folder / "events.jsonl"))

        assert is_true(*zip(*points["loss"], strict=True))
        assert len(points["eval/loss"]) == 101

    def test_has_a_true_curve_on_the_page_whenever_it_is_read(self, folder, tmp_path):
        lines = (folder / "events.jsonl").read_text().splitlines()
        reader = HistoryReader(tmp_path)
        for end in (len(lines) // 2, len(lines)):
            (tmp_path / "events.jsonl").write_text("".join(f"{line}\n" for line in lines[:end]))
            reader.update()

        assert is_true(*zip(*((each.step, each.loss) for each in reader.history.points), strict=True))

    def test_has_a_true_curve_in_a_report(self, folder):
        points = series_of(record.event for record in read_events(folder / "events.jsonl"))["loss"]

        curve = curve_of("loss", points)

        assert len(curve.x) <= REPORT_POINTS
        assert is_true(curve.x, curve.y)


def test_old_and_new_parts_of_a_run_have_the_same_resolution(tmp_path):
    file = EventsFile(tmp_path / "events.jsonl", max_lines=500)
    for step in range(20_000):
        file.write(progress(step), 0)
    file.close()

    steps = np.array([record.event.step for record in read_events(tmp_path / "events.jsonl")])
    quarters = np.histogram(steps[steps < 19_000], bins=4, range=(0, 19_000))[0]

    assert len(steps) <= 500
    assert quarters[1:].min() > 0.4 * quarters[1:].max()


def test_a_second_start_counts_the_lines_of_the_first(tmp_path):
    for _ in range(3):
        file = EventsFile(tmp_path / "events.jsonl", max_lines=100)
        for step in range(60):
            file.write(progress(step), 0)
        file.close()

    assert len((tmp_path / "events.jsonl").read_text().splitlines()) <= 100


@pytest.mark.parametrize(
    "outlier",
    [2**53, -(10**15), 10**400, math.inf, math.nan],
    ids=["large", "negative", "huge", "inf", "nan"],
)
def test_one_wrong_position_costs_no_curve(outlier):
    positions = [*range(2_000), outlier]

    kept = places_to_keep(positions, [{"loss": 1.0}] * 2_001, 1_000)

    assert 250 <= len(kept) <= 1_000
    assert max(b - a for a, b in itertools.pairwise(kept)) < 20


def test_a_curve_without_positions_is_thinned_evenly():
    kept = places_to_keep([7] * 2_000, [{}] * 2_000, 1_000)

    assert len(kept) >= 500


def test_odd_lines_are_thinned_like_others(tmp_path):
    path = tmp_path / "events.jsonl"
    old = '{"time_unix_s": 1.0, "rank": 0, "kind": "progress", "step": %d, "loss": 1.0}'
    odd = [
        '{"kind": "progress", "time_unix_s": 1, "step": 1e400}',
        f'{{"kind": "x", "time_unix_s": {10**400}}}',
    ]
    path.write_text("".join(f"{line}\n" for line in [*odd, *(old % step for step in range(200))]))

    file = EventsFile(path, max_lines=150)
    file.write(progress(201), 0)
    file.close()

    lines = path.read_text().splitlines()
    assert 20 < len(lines) <= 150
    assert sum('"rank": 0' in line for line in lines) > 15


def test_many_kinds_are_thinned_in_one_go(tmp_path):
    lines = [f'{{"kind": "rank_times", "first_rank": {rank}, "time_unix_s": 1}}' for rank in range(5_000)] * 3

    assert 4_000 < len(thinned(lines, 2**30, 7_000)) <= 7_000


@pytest.mark.parametrize("num_points", [0, 1, 2, 3, 100])
@pytest.mark.parametrize("max_points", [1, 2, 3, 10])
def test_a_curve_of_any_length_keeps_its_ends(num_points, max_points):
    values = [{"loss": math.nan if step % 3 else float(step)} for step in range(num_points)]

    kept = places_to_keep([7] * num_points, values, max_points)

    assert len(kept) == min(num_points, max_points) or 0 < len(kept) <= max_points
    if num_points:
        assert kept[-1] == num_points - 1
        assert kept[0] == 0 or max_points == 1
