"""What is known of runs from outside: from their events, from their state, and from what ranks say."""

from __future__ import annotations

import json
import os
import time

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from support.exporters import STEP_S, ServedRanks
from support.launching import free_port

from horovod_train.errors import UserError
from horovod_train.events.file import EventsFile, opened
from horovod_train.events.types import (
    MAX_RANKS,
    PHASES,
    Attempt,
    CheckpointWritten,
    Evaluation,
    Failure,
    HostsLost,
    Preempted,
    Progress,
    RankTimes,
    Started,
    StateChanged,
    Summary,
    Target,
    Targets,
)
from horovod_train.launch.jobs import StateFile
from horovod_train.monitor.history import MAX_POINTS, HistoryReader
from horovod_train.monitor.live import (
    COLUMNS,
    MAX_WINDOWS,
    RankSeries,
    Window,
    access_of,
    finite,
    joined,
    parse,
    scrape,
    stragglers,
    targets_of,
    unknown,
    window_between,
)
from horovod_train.monitor.runs import JobCollector, Runs, places_of
from horovod_train.monitor.view import MAX_CELLS, Board, log_tail, run_document
from horovod_train.plugins.serve.page import http_sd


def progress(step=1, **changes):
    fields = {
        "step": step, "num_steps": 10, "epoch": 0, "num_epochs": 1, "loss": 0.5, "lr": 0.1,
        "samples_per_s": 100.0, "eta_s": 1.0,
    }  # fmt: skip
    return Progress(**{**fields, **changes})


def rank_times(own_s, first_rank=0, steps=10, phase="data", step_s=0.05):
    """Ranks with so much time of their own in each step."""
    n = len(own_s)
    return RankTimes(
        first_rank=first_rank,
        seconds=steps * step_s,
        steps=(steps,) * n,
        samples=(steps * 8,) * n,
        step_s=(steps * step_s,) * n,
        phases_s={
            phase: tuple(steps * (own - 0.01) for own in own_s),
            "optimizer": (steps * 0.01,) * n,
            "allreduce_wait": tuple(steps * (step_s - own) for own in own_s),
        },
        waiting_s=(),
        waited_for_s=(),
    )


def started(size=2):
    return Started(
        job="j", num_parameters=7, world_size=size, global_batch_size=8, precision="fp32", device="cpu"
    )


def summary():
    return Summary(
        job="j", epochs=1.0, steps=10, seconds=1.0, metrics={"loss": 0.25}, samples_per_s=1.0, world_size=2,
        global_batch_size=8, lr_scaling="linear", base_lr=0.1, reference_batch_size=8, peak_lr=0.1,
        metrics_addresses=(), checkpoint="",
    )  # fmt: skip


def failure(cause, *, is_cause=True):
    return Failure(host="h", message="it broke", traceback="", is_cause=is_cause, exit_code=1, cause=cause)


def target(rank, address="127.0.0.1:1"):
    labels = {"training_job": "j", "run": "r", "rank": str(rank), "local_rank": "0", "host": "h"}
    return Target(address=address, labels=labels)


@pytest.fixture
def make(tmp_path):
    """Make a run: its events, and how it stands."""
    files = []

    def made(name="j", run="r", events=(), state=None, code=None, message="", lost=()):
        folder = tmp_path / "runs" / name / run
        folder.mkdir(parents=True, exist_ok=True)
        file = EventsFile(folder / "events.jsonl")
        files.append(file)
        for event in (opened(name, run), *events):
            file.write(event, None if isinstance(event, StateChanged | Attempt | HostsLost) else 0)
        if state is not None:
            StateFile(folder).write(state, code, message, lost_ranks=lost)
        return folder, file

    yield made
    for file in files:
        file.close()


class TestHistory:
    def test_follows_a_file_that_grows(self, make):
        folder, file = make(events=[started(), progress(3)])
        reader = HistoryReader(folder)
        assert reader.update().last.step == 3

        file.write(progress(5), 0)
        file.write(Evaluation(epoch=1, metrics={"loss": 0.75}), 0)
        history = reader.update()

        assert [point.step for point in history.points] == [3, 5]
        assert history.metrics == {"loss": 0.75}
        assert history.counts["progress"] == 2

    def test_waits_for_the_end_of_half_a_line(self, make):
        folder, file = make(events=[progress(3)])
        file.close()
        path = folder / "events.jsonl"
        whole = path.read_text()
        path.write_text(whole[:-20])
        reader = HistoryReader(folder)
        assert reader.update().last is None
        with path.open("a") as more:
            more.write(whole[-20:])

        assert reader.update().last.step == 3

    def test_begins_anew_with_a_file_that_was_written_anew(self, make):
        folder, file = make(events=[progress(step) for step in range(1, 9)])
        reader = HistoryReader(folder)
        assert len(reader.update().points) == 8
        file.close()
        path = folder / "events.jsonl"
        lines = path.read_text().splitlines()
        (folder / "new").write_text("\n".join(lines[::2]) + "\n")
        (folder / "new").replace(path)

        assert len(reader.update().points) == 4

    def test_passes_over_what_it_does_not_know(self, make):
        folder, file = make(events=[progress(3)])
        file.close()
        with (folder / "events.jsonl").open("a") as more:
            more.write(
                '{"kind": "invented", "time_unix_s": 1, "rank": 0}\nnonsense\n[]\n' + "[" * 5000 + "\n"
            )

        assert HistoryReader(folder).update().last.step == 3

    def test_of_a_file_that_is_not_there_is_empty(self, tmp_path):
        assert HistoryReader(tmp_path / "none").update().last is None

    def test_counts_starts_losses_and_preemptions_once(self, make):
        attempt = Attempt(number=0, num_ranks=2, num_wanted=3, hosts=("a", "b"))
        folder, _ = make(
            events=[
                attempt, started(), Preempted(step=1, epoch=0.1), Preempted(step=1, epoch=0.1),
                attempt, HostsLost(hosts=("b",), why="silent"), attempt, Preempted(step=2, epoch=0.2),
            ]
        )  # fmt: skip
        history = HistoryReader(folder).update()

        assert (history.num_attempts, history.num_preemptions, history.hosts_lost) == (3, 2, ["b"])
        assert history.world_size_desired == 3

    def test_forgets_targets_and_failures_of_ranks_that_are_started_again(self, make):
        attempt = Attempt(number=0, num_ranks=2, num_wanted=2, hosts=())
        folder, _ = make(
            events=[attempt, Targets(targets=(target(0), target(1))), failure("lost"), attempt,
                    Targets(targets=(target(0, "127.0.0.1:2"),))]
        )  # fmt: skip
        history = HistoryReader(folder).update()

        assert {rank: each.address for rank, each in history.targets.items()} == {0: "127.0.0.1:2"}
        assert history.failures == []

    def test_keeps_the_first_and_the_last_point_of_many(self, make):
        folder, _ = make(events=[progress(step, num_steps=10**6) for step in range(3 * MAX_POINTS)])
        points = HistoryReader(folder).update().points

        assert len(points) <= MAX_POINTS
        assert (points[0].step, points[-1].step) == (0, 3 * MAX_POINTS - 1)

    def test_a_summary_says_the_last_step(self, make):
        folder, _ = make(events=[progress(7), summary()])

        assert HistoryReader(folder).update().last.step == 10


class TestSeries:
    def test_events_of_32_ranks_make_one_window(self):
        series = RankSeries()
        series.begin(40)
        for _ in range(2):
            series.add_event(1.0, rank_times([0.02] * 32))
            series.add_event(1.1, rank_times([0.03] * 8, first_rank=32))

        assert [window.table.shape[1] for window in series.windows] == [40, 40]
        assert series.windows[0].own_s / 10 == pytest.approx([0.02] * 32 + [0.03] * 8, rel=1e-4)

    def test_ranks_that_tell_of_themselves_make_one_as_well(self):
        series = RankSeries()
        for order in ([1, 0, 2], [0, 2, 1]):
            for rank in order:
                series.add_event(1.0, rank_times([0.01 * (rank + 2)], first_rank=rank))

        assert len(series.windows) == 2
        assert series.windows[1].own_s / 10 == pytest.approx([0.02, 0.03, 0.04], rel=1e-4)

    def test_many_windows_become_half_as_many_with_the_same_sums(self):
        series = RankSeries()
        for _ in range(MAX_WINDOWS + 1):
            series.add_event(1.0, rank_times([0.02, 0.03]))

        assert len(series.windows) <= MAX_WINDOWS // 2 + 1
        assert sum(window["steps"][0] for window in series.windows) == 10 * (MAX_WINDOWS + 1)

    def test_ranks_that_a_run_does_not_have_are_left_out(self):
        series = RankSeries()
        series.begin(2)
        series.add_event(1.0, rank_times([0.02, 0.03]))
        series.add_event(1.1, rank_times([0.02], first_rank=MAX_RANKS - 1))

        assert [window.table.shape[1] for window in series.windows] == [2]

    def test_very_many_ranks_take_little_memory(self):
        series = RankSeries()
        for _ in range(10):
            series.add_event(1.0, rank_times([0.02], first_rank=MAX_RANKS - 1))

        assert sum(window.table.nbytes for window in series.windows) < 200e6

    def test_what_is_unknown_stays_unknown_and_what_is_known_in_part_counts(self):
        first, second = (Window(1.0, 1.0, unknown(2)) for _ in range(2))
        first.table[COLUMNS.index("steps")] = [1, np.nan]
        second.table[COLUMNS.index("steps")] = [2, np.nan]
        steps = joined([first, second])["steps"]

        assert steps[0] == 3
        assert np.isnan(steps[1])

    def test_the_recent_time_ends_where_ranks_have_changed(self):
        series = RankSeries()
        series.add_event(1.0, rank_times([0.02] * 3))
        series.add_event(2.0, rank_times([0.02] * 2))
        series.add_event(3.0, rank_times([0.02] * 2))

        assert series.recent(100.0).seconds == pytest.approx(1.0)
        assert series.recent(0.1).seconds == pytest.approx(0.5)
        assert RankSeries().recent(1.0) is None

    def test_of_ranks_that_do_not_talk_waiting_follows_from_sums(self):
        series = RankSeries()
        series.add_event(1.0, rank_times([0.02, 0.04, 0.04, 0.02]))
        waiting, waited_for = series.windows[0].wait_times

        assert waiting == pytest.approx([0.2, 0.0, 0.0, 0.2], abs=1e-3)
        assert waited_for == pytest.approx([0.0, 0.2, 0.2, 0.0], abs=1e-3)


class TestStragglers:
    def window(self, own_s, phase="data"):
        series = RankSeries()
        series.add_event(1.0, rank_times(own_s, phase=phase))
        return series.windows[0]

    @pytest.mark.parametrize("phase", ["data", "forward", "backward", "compute"])
    def test_are_named_with_the_phase(self, phase):
        (found,) = stragglers(self.window([0.02, 0.02, 0.045, 0.021], phase))

        assert (found.rank, found.phase) == (2, phase)
        assert found.own_s == pytest.approx(0.045)
        assert found.excess_s == pytest.approx(0.025, rel=1e-3)

    def test_two_are_both_named_the_slower_one_first(self):
        found = stragglers(self.window([0.04, 0.02, 0.045, 0.02, 0.02]))

        assert [each.rank for each in found] == [2, 0]

    @pytest.mark.parametrize("own_s", [[0.02, 0.02], [0.02, 0.0235, 0.02], [0.03], [0.02, 0.029]])
    def test_nobody_is_named_for_a_little(self, own_s):
        assert stragglers(self.window(own_s)) == []

    def test_a_slow_network_names_nobody(self):
        series = RankSeries()
        series.add_event(1.0, rank_times([0.02] * 4, step_s=0.5))

        assert stragglers(series.windows[0]) == []

    def test_where_own_time_is_unknown_nobody_is_named(self):
        window = Window(1.0, 1.0, unknown(3))

        assert stragglers(window) == []


class TestRuns:
    def test_are_found_from_any_folder_above(self, make, tmp_path):
        folder, _ = make()
        for place in (tmp_path / "runs", tmp_path / "runs" / "j", folder):
            assert [run.key for run in Runs([place]).all()] == ["j/r"]
        assert Runs([tmp_path / "none"]).all() == []

    def test_newest_come_first_and_none_outside_is_found(self, make, tmp_path):
        first, _ = make(run="r1")
        make(run="r2")
        os.utime(first / "events.jsonl", (1, 1))
        runs = Runs([tmp_path / "runs"])

        assert [run.run_id for run in runs.all()] == ["r2", "r1"]
        assert runs.find("j/r1").log_dir == first
        for key in ("../runs/j/r1", "j/../j/r1", "/etc", "j", "", "j/r3"):
            assert runs.find(key) is None

    @pytest.mark.parametrize(
        ("events", "state"),
        [
            ([progress()], "running"),
            ([summary()], "succeeded"),
            ([failure("task")], "failed"),
            ([Preempted(step=1, epoch=0.1)], "preempted"),
        ],
    )
    def test_launched_by_hand_stand_as_rank_0_says(self, make, tmp_path, events, state):
        make(events=events)
        (run,) = Runs([tmp_path / "runs"]).all()

        assert run.status().state == state

    def test_launched_by_hand_that_are_silent_have_ended(self, make, tmp_path):
        folder, _ = make(events=[progress()])
        os.utime(folder / "events.jsonl", (time.time() - 1000,) * 2)
        (run,) = Runs([tmp_path / "runs"]).all()

        assert run.status().has_ended

    def test_what_is_neither_folder_nor_job_is_said(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
        with pytest.raises(UserError, match="/nothing is not a folder, and no job 'nothing'"):
            places_of(["nothing"])


class TestTargets:
    def test_of_runs_that_go_on_are_given_to_prometheus(self, make, tmp_path):
        make(run="r1", events=[Targets(targets=(target(0), target(1)))], state="running")
        make(run="r2", events=[Targets(targets=(target(0),))], state="succeeded", code=0)
        found = http_sd(Runs([tmp_path / "runs"]).all())

        assert found == [{"targets": [t.address], "labels": dict(t.labels)} for t in (target(0), target(1))]

    def test_can_be_named_in_a_file_by_an_address_or_one_by_one(self, tmp_path):
        file = tmp_path / "targets.json"
        file.write_text(json.dumps([{"targets": ["a:1", "b:2"], "labels": {"rank": "0"}}]))

        assert [each.address for each in targets_of(str(file))] == ["a:1", "b:2"]
        assert [each.address for each in targets_of("a:1, b:2".replace(" ", ""))] == ["a:1", "b:2"]
        assert targets_of("runs") is None
        for text in ("{", '{"a": 1}', "[1]", '[{"labels": {}}]'):
            file.write_text(text)
            with pytest.raises(UserError, match="is not a list of Prometheus targets"):
                targets_of(str(file))
        with pytest.raises(UserError, match="is not a list of Prometheus targets"):
            targets_of(f"http://127.0.0.1:{free_port()}/targets")


def labels_of(sample):
    return (value for name, value in sorted(sample.labels.items()) if name != "run")


class TestJobMetrics:
    def shown(self, folder):
        registry = CollectorRegistry()
        registry.register(JobCollector(Runs([folder])))
        text = generate_latest(registry).decode()
        return {
            (
                s.name.removeprefix("horovod_train_job_"),
                *(v for k, v in sorted(s.labels.items()) if k != "run"),
            ): s.value
            for family in text_string_to_metric_families(text)
            for s in family.samples
        }

    def test_say_how_the_newest_run_of_each_job_stands(self, make, tmp_path):
        attempt = Attempt(number=0, num_ranks=2, num_wanted=3, hosts=())
        old, _ = make("a", "r1", [failure("task")], "failed", 1)
        os.utime(old / "events.jsonl", (1, 1))
        os.utime(old / "state.json", (1, 1))
        make("a", "r2", [attempt, started(), attempt, started()], "running")
        make("b", "r1", [attempt, failure("replicas_differ")], "failed", 1)
        shown = self.shown(tmp_path / "runs")

        assert shown["state", "running", "a"] == shown["state", "failed", "b"] == 1
        assert shown["failed", "replicas_differ", "b"] == 1
        assert not any(key[0] == "failed" and "a" in key for key in shown)
        assert (shown["desired_ranks", "a"], shown["present_ranks", "a"]) == (3, 2)
        assert shown["present_ranks", "b"] == 0
        assert shown["restarts_total", "a"] == 1
        assert shown["events_total", "attempt", "a"] == 2
        assert ("ended_timestamp_seconds", "a") not in shown
        assert shown["ended_timestamp_seconds", "b"] == pytest.approx(time.time(), abs=30)

    def test_a_rank_that_only_noticed_is_not_the_cause(self, make, tmp_path):
        make("a", "r", [failure("lost", is_cause=False), failure("not_finite")], "failed", 3)

        assert self.shown(tmp_path / "runs")["failed", "not_finite", "a"] == 1

    def test_jobs_that_ended_long_ago_are_left_out(self, make, tmp_path, monkeypatch):
        make("a", "r", [summary()], "succeeded", 0)
        monkeypatch.setattr("horovod_train.monitor.runs.time", lambda: time.time() + 8 * 24 * 3600)

        assert not self.shown(tmp_path / "runs")


class TestAsking:
    def test_gives_windows_of_what_counters_have_done(self):
        ranks = ServedRanks([0.02, 0.04], free_port())
        try:
            while ranks.num_steps < 2:
                time.sleep(STEP_S)
            before = {rank: scrape(address) for rank, address in enumerate(ranks.addresses)}
            time.sleep(5 * STEP_S)
            ranks.stop()
            made = ranks.num_steps
            time.sleep(1.1)  # an answer is good for a second
            now = {rank: scrape(address) for rank, address in enumerate(ranks.addresses)}
        finally:
            ranks.close()
        window = window_between(before, now, 1.0, 2)
        steps = made - before[0].values["steps"]

        assert window["steps"].tolist() == [steps, made - before[1].values["steps"]]
        assert window["step_s"][0] == pytest.approx(steps * STEP_S, rel=1e-4)
        assert window["samples"][0] == 8 * steps
        assert now[1].labels["host"] == "n1"

    def test_a_counter_that_began_again_counts_from_nothing(self):
        text = 'horovod_train_steps_total{{rank="0"}} {}\n'
        window = window_between({0: parse(text.format(90))}, {0: parse(text.format(7))}, 1.0, 1)

        assert window["steps"].tolist() == [7.0]

    def test_who_does_not_answer_or_answers_nonsense_is_told_apart_by_nothing(self):
        assert scrape(f"127.0.0.1:{free_port()}") is None

    def test_passwords_and_certificates_follow_from_the_job(self):
        job = {
            "metrics": {
                "tls": {"certificate": "/none"},
                "basic_auth": {"user": "p", "password_variable": "X"},
            }
        }
        access = access_of(job, {"X": "y"})

        assert (access.scheme, access.authorization) == ("https", "Basic cDp5")
        assert access_of({}, {}).scheme == access_of({"metrics": {"tls": None}}, {}).scheme == "http"

    def test_numbers_for_json_are_short_and_finite(self):
        assert finite([1.23456, 0.0, float("nan"), float("inf"), 123456.0, -0.00098765]) == [
            1.23, 0.0, None, None, 123000.0, -0.000988,
        ]  # fmt: skip


class TestTheView:
    def document(self, folder):
        board = Board([folder])
        try:
            return run_document(*board.request_run("j/r"))
        finally:
            board.close()

    def test_is_plain_json_whatever_the_numbers(self, make, tmp_path):
        make(events=[started(), progress(1, loss=float("nan"), lr=float("inf")), rank_times([0.02, 0.03])])
        document = self.document(tmp_path / "runs")

        assert json.loads(json.dumps(document, allow_nan=False))["loss"] is None
        assert document["points"]["loss"] == [None]
        assert document["heat"]["rows"] == [[0.02], [0.03]]
        assert document["ranks"]["own_s"] == [0.02, 0.03]

    def test_of_an_empty_run_is_one_too(self, make, tmp_path):
        make()
        document = self.document(tmp_path / "runs")

        assert json.dumps(document, allow_nan=False)
        assert document["ranks"]["rank"] == []

    def test_a_picture_of_a_thousand_ranks_has_a_bounded_number_of_cells(self, make, tmp_path):
        parts = [rank_times([0.02] * 32, first_rank=first) for first in range(0, 1024, 32)]
        make(events=[started(1024), *parts * 70])
        heat = self.document(tmp_path / "runs")["heat"]

        assert len(heat["rows"]) == 1024
        assert len(heat["rows"]) * len(heat["time_unix_s"]) <= MAX_CELLS

    def test_where_waiting_is_unknown_the_time_of_steps_is_shown_and_said(self, make, tmp_path):
        times = rank_times([0.02, 0.03])
        make(events=[started(), RankTimes(**{**times.model_dump(), "phases_s": {}})])
        heat = self.document(tmp_path / "runs")["heat"]

        assert not heat["is_own"]
        assert heat["rows"] == [[0.05], [0.05]]

    def test_ranks_that_failed_or_were_killed_are_marked(self, make, tmp_path):
        make(
            events=[started(3), rank_times([0.02] * 3), failure("task")],
            state="failed", code=1, message="rank 2 was killed; rank 1 failed as a consequence", lost=[2],
        )  # fmt: skip

        assert self.document(tmp_path / "runs")["ranks"]["state"] == ["failed", "ended", "dead"]

    def test_a_log_is_shown_as_a_person_reads_it(self, make, tmp_path):
        folder, _ = make()
        event = '@horovod-train {"kind": "notice", "rank": 1, "text": "slow disk"}'
        (folder / "run.log").write_text(f"x\n[1,1]<stdout>:{event}\n[1,0]<stdout>:hello\n")
        (run,) = Runs([tmp_path / "runs"]).all()

        assert log_tail(run).splitlines() == ["x", "rank 1: slow disk", "[rank 0] hello"]

    def test_every_phase_has_its_column(self):
        assert set(PHASES) < set(COLUMNS)
        assert CheckpointWritten(path="p", seconds=1.0, error="").kind == "checkpoint"
