"""Trackers are told of losses and metrics on rank 0, and never hold training up."""

from __future__ import annotations

import csv
import re
from contextlib import ExitStack
from threading import Event
from time import monotonic, sleep

import pytest
from support.training import Told, made
from support.worlds import on_ranks

from horovod_train.collectives.base import SingleRank
from horovod_train.config.load import load_job
from horovod_train.errors import ConfigError, UserError
from horovod_train.telemetry import tracking
from horovod_train.telemetry.trackers.csv_file import CsvFile
from horovod_train.telemetry.tracking import TrackedRun
from horovod_train.training.hooks.base import HookParts
from horovod_train.training.hooks.steps import Track
from horovod_train.training.loop import train


class Kept:
    """A tracker that keeps what it is told, in this process."""

    told = None
    fails_at = None
    fails_with = ConnectionError
    may_go_on = None
    may_end = None

    def __init__(self, prefix=""):
        self.prefix = prefix

    def start(self, run):
        self.told.append(("start", run.run_id, run.step, run.world_size, run.job["name"]))

    def log(self, step, epochs, values):
        if self.may_go_on is not None:
            self.may_go_on.wait(10)
        if step == self.fails_at:
            raise self.fails_with("no way to the server")
        self.told.append((step, epochs, {self.prefix + name: value for name, value in values.items()}))

    def end(self):
        if self.may_end is not None:
            self.may_end.wait(10)
        self.told.append(("end",))


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    monkeypatch.setattr(Kept, "told", [])
    return Kept


NAME = f"{__name__}:Kept"


class Counted:
    """A recorder that counts the calls that trackers have lost."""

    def __init__(self):
        self.num_lost = 0

    def record(self, source):
        self.num_lost += source.num_lost


def tracked(world=None, trackers=({"name": NAME},), fails=False, **job):
    """Train with trackers; return what a person was told, and what hooks saw of the steps."""
    world, told, recorder = world or SingleRank(), Told(), Counted()
    run = made(world, metrics={"trackers": list(trackers), "grad_norm_every_steps": 2}, **job)
    with ExitStack() as stack:
        parts = HookParts(
            run.job, "run-1", world, None, None, recorder, told.reporter, None, lambda: False, 1.0, stack
        )
        hook = Track.of(parts)
        run.hooks += [hook] if hook is not None else []
        if fails:
            run.hooks.append(Fails())
            with pytest.raises(ZeroDivisionError):
                train(run)
        else:
            train(run)
    kept_count.append(recorder.num_lost)
    return told.text, run.hooks[0].reports


kept_count = []
"""Calls that were lost in each training of this module."""


class Fails:
    """A hook that ends training at its third step."""

    def on_start(self, run):
        pass

    def on_result(self, run, report):
        pass

    def on_step(self, run):
        return 1 // 0 if run.progress.step == 3 else None


def test_every_step_and_evaluation_is_told_once_in_order(kept):
    said, reports = tracked()

    steps = [(*told[:2], told[2]) for told in kept.told[1:-1] if "loss" in told[2]]
    evaluations = [told for told in kept.told[1:-1] if "loss" not in told[2]]
    assert kept.told[0] == ("start", "run-1", 0, 1, "line")
    assert kept.told[-1] == ("end",)
    assert [told[:2] for told in steps] == [(report.step, report.epochs_passed) for report in reports]
    assert [told[2]["loss"] for told in steps] == [report.outcome.loss for report in reports]
    assert [told[2]["lr"] for told in steps] == [report.lr for report in reports]
    assert ["grad_norm" in told[2] for told in steps] == [r.outcome.grad_norm is not None for r in reports]
    assert [told[1] for told in evaluations] == [1.0, 2.0]
    assert all(list(told[2]) == ["eval/loss"] for told in evaluations)
    assert said == ""


def test_of_several_ranks_the_first_one_tells(kept):
    on_ranks(2, tracked)

    assert [told for told in kept.told if told[0] == "start"] == [("start", "run-1", 0, 2, "line")]
    assert kept.told.count(("end",)) == 1


def test_a_tracker_may_want_to_know_of_some_steps_only(kept):
    tracked(trackers=[{"name": NAME, "every_steps": 3}])

    assert [told[0] for told in kept.told[1:-1] if "loss" in told[2]] == [3, 6, 9]


def test_arguments_of_the_job_reach_the_tracker(kept):
    tracked(trackers=[{"name": NAME, "args": {"prefix": "a/"}}])

    assert "a/loss" in kept.told[1][2]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ConnectionError, "ConnectionError: no way to the server"),
        (SystemExit, "the tracker called sys.exit('no way to the server')"),
    ],
)
def test_a_tracker_that_fails_is_left_out_and_told_once(kept, monkeypatch, error, text):
    monkeypatch.setattr(Kept, "fails_at", 2)
    monkeypatch.setattr(Kept, "fails_with", error)

    said, reports = tracked()

    assert said.count("is disabled") == 1
    assert text in said
    assert len(reports) > 2
    # The call that failed, and all later ones; the summary is one of them only if the tracker has it.
    assert kept_count[-1] == len(reports) + 2 - 1
    assert kept.told[-1][0] == 1


def test_what_training_did_before_it_failed_is_told(kept):
    tracked(fails=True)

    assert [told[0] for told in kept.told if isinstance(told[0], int)] == [1, 2, 3]
    assert kept.told[-1] == ("end",)


def test_a_slow_tracker_holds_no_rank_up_and_what_it_missed_is_told(kept, monkeypatch):
    monkeypatch.setattr(Kept, "may_go_on", Event())
    monkeypatch.setattr(tracking, "MAX_QUEUED_CALLS", 3)
    monkeypatch.setattr(tracking, "CLOSE_S", 0.1)

    said, reports = tracked()

    Kept.may_go_on.set()
    num_missed = int(
        re.search(r"tracker .*Kept has not answered for 0 s \(is its server reachable\?\): (\d+) call", said)[
            1
        ]
    )
    num_calls = 1 + len(reports) + 2
    assert num_calls - 2 <= num_missed <= num_calls - 1
    assert kept_count[-1] == num_missed


def test_a_tracker_that_hangs_as_it_closes_is_told_and_no_call_is_said_to_be_missed(kept, monkeypatch):
    monkeypatch.setattr(Kept, "may_end", Event())
    monkeypatch.setattr(tracking, "CLOSE_S", 0.5)

    said, reports = tracked()

    Kept.may_end.set()
    assert re.search(r"tracker .*Kept has not closed after 0.5 s", said)
    assert "is too slow" not in said
    assert len(reports) > 2


def test_a_tracker_that_prepares_something_is_waited_for(kept, monkeypatch):
    monkeypatch.setattr(tracking, "CLOSE_S", 0.1)
    monkeypatch.setattr(Kept, "is_preparing", True, raising=False)
    start = Kept.start

    def prepare(self, run):
        sleep(1.0)
        start(self, run)

    monkeypatch.setattr(Kept, "start", prepare)

    said, reports = tracked()

    assert "dropped" not in said
    assert kept.told[-1] == ("end",)
    assert len(reports) > 2


def test_a_tracker_that_fails_as_it_ends_delays_nothing_and_shows_no_credentials(kept, monkeypatch):
    def end(self):
        raise ConnectionError("no way to http://me:s3cret@mlflow.example/")

    monkeypatch.setattr(Kept, "end", end)
    monkeypatch.setattr(tracking, "CLOSE_S", 30.0)
    begun_s = monotonic()

    said, _ = tracked()

    assert monotonic() - begun_s < 20
    assert "is disabled: ConnectionError: no way to http://***@mlflow.example/" in said
    assert "has not closed" not in said


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"name": "no_such_module:X"}, "cannot import 'no_such_module'"),
        ({"name": NAME, "args": {"no_such": 1}}, "cannot be created"),
    ],
)
def test_a_tracker_that_cannot_be_made_is_an_error(section, said):
    with pytest.raises(UserError, match=said):
        tracked(trackers=[section])


class TestCsvFile:
    def write(self, folder, run_id="a", **args):
        tracker = CsvFile(**args)
        tracker.start(TrackedRun({}, run_id, folder, 2, 0))
        tracker.log(1, 0.5, {"loss": 0.1 + 0.2, "lr": float("nan")})
        tracker.log(1, 0.5, {"eval/accuracy": 1.0})
        tracker.end()

    def rows(self, path):
        with path.open(newline="") as file:
            return list(csv.reader(file))

    def test_has_a_row_for_each_value(self, tmp_path):
        self.write(tmp_path)

        assert self.rows(tmp_path / "metrics.csv") == [
            ["run", "step", "epochs", "name", "value"],
            ["a", "1", "0.5", "loss", "0.30000000000000004"],
            ["a", "1", "0.5", "lr", "nan"],
            ["a", "1", "0.5", "eval/accuracy", "1.0"],
        ]

    def test_keeps_what_earlier_runs_wrote(self, tmp_path):
        self.write(tmp_path)
        before = (tmp_path / "metrics.csv").read_bytes()

        self.write(tmp_path, "b")

        after = (tmp_path / "metrics.csv").read_bytes()
        assert after.startswith(before)
        assert after[len(before) :] == before.partition(b"\r\n")[2].replace(b"a,1", b"b,1")

    def test_a_row_that_was_cut_off_spoils_no_other(self, tmp_path):
        (tmp_path / "metrics.csv").write_bytes(b"run,step,epochs,name,value\r\na,1,0.5,lo")

        self.write(tmp_path, "b")

        assert self.rows(tmp_path / "metrics.csv")[1:3] == [
            ["a", "1", "0.5", "lo"],
            ["b", "1", "0.5", "loss", "0.30000000000000004"],
        ]

    def test_may_lie_elsewhere(self, tmp_path):
        self.write(tmp_path / "runs", path=str(tmp_path / "there" / "x.csv"))

        assert (tmp_path / "there" / "x.csv").exists()


def test_a_name_that_nobody_has_is_refused_with_those_there_are(tmp_path):
    job = tmp_path / "job.yaml"
    job.write_text("name: x\ntask: digits\nmetrics: {trackers: [{name: cvs}]}\n")

    with pytest.raises(ConfigError, match=r"(?s)metrics.trackers.0.name.*not a known tracker; known: csv"):
        load_job(job)
