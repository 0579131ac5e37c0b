"""What hooks do around the loop: metrics, checkpoints, checks, progress, leaving, going on."""

from __future__ import annotations

import math
import random
from threading import Event

import numpy as np
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from support.training import Framework, Task, Told, made, manager_of
from support.worlds import on_ranks

from horovod_train.checkpoint.store import list_checkpoints, read_checkpoint, read_manifest
from horovod_train.checkpoint.writing import Writing
from horovod_train.collectives.base import SingleRank
from horovod_train.errors import CheckpointError, DesyncError, NumericError, PreemptedError
from horovod_train.frameworks.plain_data import from_blob, to_blob
from horovod_train.telemetry.recorder import Recorder
from horovod_train.training.hooks import steps as progress_module
from horovod_train.training.hooks.base import Hook
from horovod_train.training.hooks.checks import CheckReplicasIdentical
from horovod_train.training.hooks.saving import (
    PreemptionAgreement,
    PreemptionRequest,
    SaveCheckpoints,
    StopWhenPreempted,
    save,
)
from horovod_train.training.hooks.steps import RecordMetrics, ReportProgress
from horovod_train.training.loop import train
from horovod_train.worker import resume


class At(Hook):
    """Does something after a step."""

    def __init__(self, step, do):
        self.step, self.do = step, do

    def on_step(self, run):
        if run.progress.step == self.step:
            self.do(run)


def identical_every(num_steps, replica):
    """Replicas that are identical after every so many steps, and at the end of an epoch."""
    step, made = replica.step, []

    def watched(planned, lr, *, want_norm):
        made.append(planned)
        replica.replicas_identical = len(made) % num_steps == 0 or planned.is_last
        return step(planned, lr, want_norm=want_norm)

    replica.step = watched


def metrics_of(recorder):
    text = generate_latest(recorder.registry).decode()
    return {
        sample.name.removeprefix("horovod_train_"): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "phase" not in sample.labels and not sample.name.endswith("_bucket")
    }


class TestRecordMetrics:
    def recorded(self, size, **job):
        def rank(world):
            recorder = Recorder("line", "run", world, size)
            run = made(world, **job)
            run.hooks.append(RecordMetrics(recorder))
            train(run)
            return metrics_of(recorder), run.hooks[0].reports

        return on_ranks(size, rank)

    def test_says_of_each_rank_what_it_did(self):
        found = self.recorded(2, metrics={"grad_norm_every_steps": 1})

        for rank, (metrics, reports) in enumerate(found):
            last = reports[-1]
            assert metrics["steps_total"] == 6
            assert metrics["samples_total"] == [12, 8][rank]
            assert metrics["epoch"] == 2.0
            assert metrics["loss"] == last.outcome.loss
            assert metrics["local_loss"] == last.outcome.local_loss
            assert metrics["learning_rate"] == last.lr
            assert metrics["gradient_norm"] == last.outcome.grad_norm
            assert (
                metrics["allreduce_bytes_total"] == sum(r.outcome.numbers["sent_bytes"] for r in reports) > 0
            )
            assert metrics["non_finite_steps_total"] == 0
            assert metrics["step_seconds_count"] == 6
        (first, _), (second, _) = found
        assert first["loss"] == second["loss"]
        assert first["local_loss"] != second["local_loss"]

    def test_says_what_the_last_evaluation_found(self):
        ((metrics, _),) = self.recorded(1)

        assert 0 < metrics["evaluation"] < 2


class TestCheckReplicasIdentical:
    def drifting(self, step, **health):
        def rank(world):
            run = made(world, health=health)

            def drift(run):
                if run.world.rank == 1:
                    run.replica.params["slope"] = run.replica.params["slope"] + 1e-9

            run.hooks = [CheckReplicasIdentical(), At(step, drift), *run.hooks]
            try:
                train(run)
            except DesyncError as error:
                return run.progress.step, str(error)
            return None

        return on_ranks(2, rank)

    def test_notices_at_the_end_what_nobody_looked_for(self):
        for step, text in self.drifting(2):
            assert step == 6
            assert "ranks differ at the end: rank 0 against rank 1, in 1 of 5 arrays" in text
            assert "first model.slope" in text

    def test_notices_at_the_next_look(self):
        assert [step for step, _ in self.drifting(3, sync_check_every_steps=2)] == [4, 4]

    def test_notices_before_the_first_step(self):
        def rank(world):
            run = made(world)
            run.replica.params["offset"] = np.array(float(world.rank))
            run.hooks.insert(0, CheckReplicasIdentical())
            train(run)

        assert all("before the first step" in str(error) for error in on_ranks(2, rank))

    @pytest.mark.parametrize(("every_steps", "moments"), [(2, ["after step 4"]), (0, [])])
    def test_waits_until_replicas_should_be_identical(self, every_steps, moments):
        def rank(world):
            run = made(world, health={"sync_check_every_steps": every_steps}, train={"epochs": 1})
            identical_every(4, run.replica)
            looked = []
            check = CheckReplicasIdentical()
            check._check = lambda run, when: looked.append(when)
            run.hooks = [check]
            train(run)
            return looked

        # Five steps on one rank; due after 2 and 4, identical after 4 and at the end.
        assert on_ranks(1, rank) == [["before the first step", *moments, "at the end"]]

    def test_reads_the_state_where_it_is(self):
        """A copy of a large model for each look would be felt."""

        def rank(world):
            run = made(world, health={"sync_check_every_steps": 1})
            copies, state = [], run.replica.state

            def watched(*, copy):
                copies.append(copy)
                return state(copy=copy)

            run.replica.state = watched
            run.hooks = [CheckReplicasIdentical(), *run.hooks]
            train(run)
            return copies

        assert on_ranks(2, rank) == [[False] * 8] * 2

    def test_has_nothing_to_compare_in_a_world_of_one(self):
        run = made(health={"sync_check_every_steps": 1})
        run.hooks.append(CheckReplicasIdentical())
        run.replica.state = None  # would be called

        train(run)

    def test_nor_before_it_is_saved(self, tmp_path, monkeypatch):
        monkeypatch.setattr("horovod_train.training.hooks.base.check_before_saving", None)  # would be called
        run = made()
        manager = manager_of(tmp_path, run)
        run.hooks.append(SaveCheckpoints(manager, Framework()))

        train(run)
        manager.close()

        assert len(list_checkpoints(tmp_path)) > 0


class TestSaveCheckpoints:
    def saved(self, folder, size=1, before=(), identical_steps=1, task=None, **job):
        """Train on every rank with checkpoints; return the steps that were saved, and the runs."""
        section = {"every": None, "keep_last": 100, **job.pop("checkpoint", {})}

        def rank(world):
            run = made(world, task, checkpoint=section, **job)
            identical_every(identical_steps, run.replica)
            manager = manager_of(folder, run)
            run.hooks = [*before, SaveCheckpoints(manager, Framework()), *run.hooks]
            try:
                train(run)
            finally:
                manager.close()
            return run

        runs = on_ranks(size, rank)
        return sorted(found.step for found in list_checkpoints(folder)), runs

    @pytest.mark.parametrize(
        ("section", "steps"),
        [
            ({}, [15]),
            ({"every": 1}, [5, 10, 15]),
            ({"every": 2}, [10, 15]),
            ({"every": "4 steps"}, [4, 8, 12, 15]),
            ({"every": "12 samples"}, [6, 12, 15]),
            ({"every": 0.5}, [3, 5, 8, 10, 13, 15]),
            ({"every": [1, "5 steps"]}, [5, 10, 15]),
        ],
    )
    def test_saves_when_the_job_says_and_at_the_end(self, tmp_path, section, steps):
        found, _ = self.saved(tmp_path, checkpoint=section, train={"epochs": 3})

        assert found == steps

    @pytest.mark.parametrize(
        ("mode", "values", "steps"),
        [
            ("max", [1, 3, 2, 5], [5, 10, 20]),
            ("min", [3, 1, 2, 4], [5, 10, 20]),
            ("max", [math.nan] * 4, [20]),
        ],
    )
    def test_saves_the_best_evaluation_so_far(self, tmp_path, mode, values, steps):
        """And the end; the metric of the last epoch is that of step 20."""
        best = {"metric": "quality", "mode": mode}
        found, _ = self.saved(tmp_path, task=Task(values), checkpoint={"best": best}, train={"epochs": 4})

        assert found == steps

    def test_saves_when_replicas_are_identical(self, tmp_path):
        """Two epochs of five steps, identical after 3, 5, 6, 9, 10; due after 2, 4, 6, 8, 10."""
        found, _ = self.saved(tmp_path, checkpoint={"every": [1, "2 steps"]}, identical_steps=3)

        assert found == [3, 5, 6, 9, 10]

    def test_saves_where_training_stands(self, tmp_path):
        _, (run,) = self.saved(tmp_path, checkpoint={"every": [1, "3 steps"]})

        (third, *_) = sorted(list_checkpoints(tmp_path), key=lambda found: found.step)
        content = read_checkpoint(third.path)
        progress = content.documents["state"]["progress"]
        assert (progress["step"], progress["epoch"], progress["cursor"]) == (3, 0, 6)
        assert content.summary["epochs"] == pytest.approx(0.6)
        assert content.arrays["model"].keys() == {"slope", "offset"}
        assert run.progress.step == 10

    def test_keeps_metrics_only_of_the_weights_that_are_saved(self, tmp_path):
        self.saved(tmp_path, checkpoint={"every": [1, "3 steps"]})

        metrics = {c.step: read_manifest(c.path).summary["metrics"] for c in list_checkpoints(tmp_path)}
        assert {step for step, found in metrics.items() if found} == {5, 10}

    def test_saves_buffers_that_ranks_have_made_equal(self, tmp_path):
        """Statistics of a batch normalization are each rank's own until then."""
        run = made()
        called, sync, state = [], run.replica.sync_buffers, run.replica.state
        run.replica.sync_buffers = lambda: (called.append("sync"), sync())
        run.replica.state = lambda copy: (called.append("state"), state(copy=copy))[1]
        manager = manager_of(tmp_path, run)

        save(run, manager, Framework(), wait=True)
        manager.close()

        assert called == ["sync", "state"]

    def test_writes_while_training_goes_on(self, tmp_path, monkeypatch):
        is_at_the_end, write = Event(), Writing.complete

        def write_slowly(*what):
            assert is_at_the_end.wait(20)
            return write(*what)

        monkeypatch.setattr(Writing, "complete", write_slowly)

        steps, _ = self.saved(
            tmp_path, before=[At(10, lambda run: is_at_the_end.set())], checkpoint={"every": "9 steps"}
        )

        assert steps == [9, 10]

    def test_a_result_that_cannot_be_written_is_an_error(self, tmp_path, monkeypatch):
        def refuse(*_):
            raise CheckpointError("the disk is full")

        monkeypatch.setattr(Writing, "complete", refuse)
        steps, errors = self.saved(tmp_path, size=2)

        assert steps == []
        assert all("the last checkpoint was not written: the disk is full" in str(error) for error in errors)

    def test_keeps_the_generators_of_each_rank(self, tmp_path):
        self.saved(tmp_path, size=3)

        content = read_checkpoint(list_checkpoints(tmp_path)[0].path)
        assert content.arrays["rng"].keys() == {"rank.0", "rank.1", "rank.2"}

    def test_saves_nothing_that_is_not_finite(self, tmp_path):
        def spoil(run):
            run.replica.params["slope"] = np.array(np.inf)

        steps, (error,) = self.saved(tmp_path, before=[At(3, spoil)], checkpoint={"every": [1, "3 steps"]})

        assert isinstance(error, NumericError)
        assert "step 3: weights are not finite, and are not saved" in str(error)
        assert steps == []

    def test_saves_nothing_that_ranks_do_not_share(self, tmp_path):
        def drift(run):
            if run.world.rank == 2:
                run.replica.params["slope"] = run.replica.params["slope"] + 1e-9

        steps, errors = self.saved(
            tmp_path, size=3, before=[At(2, drift)], checkpoint={"every": [1, "1 step"]}, train={"epochs": 3}
        )

        assert steps == [1]
        for error in errors:
            assert (
                "ranks differ after step 2, which is therefore not saved: rank 2 against the others"
                in str(error)
            )


class TestGoingOn:
    def save(self, folder, size, steps):
        def rank(world):
            random.seed(world.rank)
            run = made(world, train={"max_steps": steps})
            manager = manager_of(folder, run)
            run.hooks = [SaveCheckpoints(manager, Framework())]
            train(run)
            manager.close()
            return run

        return on_ranks(size, rank)

    def go_on(self, folder, size, **job):
        def rank(world):
            told = Told(world.rank)
            run = made(world, **job)
            manager = manager_of(folder, run)
            framework = Framework()
            framework.seed = lambda *numbers: seeds.append(numbers)
            resume(run, manager, framework, told.reporter)
            manager.close()
            return run, told

        seeds = []
        return on_ranks(size, rank), seeds

    @pytest.mark.parametrize("size", [1, 2])
    def test_is_as_if_nothing_had_happened(self, tmp_path, size):
        before = self.save(tmp_path, size, 3)

        found, seeds = self.go_on(tmp_path, size)

        for (run, _), old in zip(found, before, strict=True):
            assert run.replica.params == old.replica.params
            assert run.progress.to_json() == old.progress.to_json()
        if size == 1:
            whole, resumed = made(), found[0][0]
            train(whole)
            train(resumed)
            assert resumed.replica.params == whole.replica.params
        assert seeds == []
        assert found[0][1].events("resumed")[0]["step"] == 3

    @pytest.mark.parametrize(("before", "now"), [(1, 2), (2, 1), (3, 2)])
    def test_in_another_world_starts_generators_anew(self, tmp_path, before, now):
        self.save(tmp_path, before, 2)

        found, seeds = self.go_on(tmp_path, now)

        assert sorted(seeds) == [(0, rank + 1, 2) for rank in range(now)]
        assert all(run.progress.step == 2 for run, _ in found)

    @pytest.mark.parametrize("keeping", [(0,), (1,), (0, 2), (0, 1, 2)])
    def test_what_some_ranks_have_kept_for_themselves_is_given_to_all(self, tmp_path, keeping):
        def rank(world):
            run = made(world, train={"max_steps": 2})
            own = {"kept": to_blob(np.full(3, world.rank + 0.5))} if world.rank in keeping else {}
            run.replica.rank_state = lambda: own
            manager = manager_of(tmp_path, run)
            save(run, manager, Framework(), wait=True)
            given = []
            run.replica.load_rank_states = given.extend
            resume(run, manager, Framework(), Told(world.rank).reporter)
            manager.close()
            return [{name: from_blob(blob).tolist() for name, blob in kept.items()} for kept in given]

        expected = [{"kept": [number + 0.5] * 3} if number in keeping else {} for number in range(3)]
        assert on_ranks(3, rank) == [expected] * 3

    def test_with_other_settings_says_so_once(self, tmp_path):
        self.save(tmp_path, 2, 3)

        found, _ = self.go_on(tmp_path, 2, lr={"base_lr": 0.2, "scaling": "none"}, train={"max_steps": 3})

        texts = [notice["text"] for notice in found[0][1].events("notice")]
        assert texts == ["changed since step-000000000003: lr.base_lr: 0.1 -> 0.2"]
        assert found[1][1].events() == []

    def test_without_a_checkpoint_does_nothing(self, tmp_path):
        ((run, told),), seeds = self.go_on(tmp_path, 1)

        assert (run.progress.step, told.events(), seeds) == (0, [], [])


class TestLeaving:
    def leaving(self, folder, size, asked_after, grace_s=30.0, identical_steps=1, **job):
        def rank(world):
            told, request = Told(world.rank), PreemptionRequest()
            run = made(world, launch={"grace_s": grace_s}, **job)
            identical_every(identical_steps, run.replica)
            manager = manager_of(folder, run)
            recorder = Recorder("line", "run", world, size)
            checkpoints = SaveCheckpoints(manager, Framework())

            def ask(run):
                request.is_received = run.world.rank == size - 1

            agreement = PreemptionAgreement(
                world, lambda: request.is_received, clock=lambda: 1.0 * run.progress.step
            )
            leave = StopWhenPreempted(agreement, manager, Framework(), recorder, told.reporter)
            run.hooks = [At(asked_after, ask), checkpoints, leave]
            try:
                train(run)
            except PreemptedError:
                return run, told, recorder
            finally:
                manager.close()
            return None, told, recorder

        return on_ranks(size, rank)

    @pytest.mark.parametrize("size", [1, 3])
    def test_saves_and_ends_all_ranks_after_the_same_step(self, tmp_path, size):
        for run, told, _ in self.leaving(tmp_path, size, asked_after=2, train={"epochs": 9}):
            assert run.progress.step == 2
            (preempted,) = told.events("preempted")
            assert preempted["step"] == 2
        assert [found.step for found in list_checkpoints(tmp_path)] == [2]

    @pytest.mark.parametrize("size", [1, 2])
    def test_waits_until_replicas_are_identical(self, tmp_path, size):
        for run, *_ in self.leaving(
            tmp_path, size, asked_after=1, identical_steps=3, train={"epochs": 9, "batch_size_per_rank": 1}
        ):
            assert run.progress.step == 3
        assert [found.step for found in list_checkpoints(tmp_path)] == [3]

    def test_nobody_asked_stays(self, tmp_path):
        for run, told, _ in self.leaving(tmp_path, 2, asked_after=-1):
            assert run is None
            assert told.events("preempted") == []

    @pytest.mark.parametrize(("grace_s", "is_told"), [(1e-9, True), (30.0, False)])
    def test_a_grace_that_is_too_short_is_told_once_by_rank_0(self, tmp_path, grace_s, is_told):
        section = {"every": "1 step", "background": False}
        found = self.leaving(tmp_path, 2, asked_after=-1, grace_s=grace_s, checkpoint=section)

        texts = [[notice["text"] for notice in told.events("notice")] for _, told, _ in found]
        assert len(texts[0]) == is_told
        assert texts[1] == []
        assert metrics_of(found[0][2])["grace_needed_seconds"] > 0
        assert not is_told or "raise it, and the grace that Slurm or Kubernetes gives" in texts[0][0]

    def test_is_not_done_before_all_is_saved(self, tmp_path, monkeypatch):
        def refuse(*_):
            raise CheckpointError("the disk is full")

        monkeypatch.setattr(Writing, "complete", refuse)

        (error,) = self.leaving(tmp_path, 1, asked_after=2)

        assert isinstance(error, CheckpointError)
        assert "the last checkpoint was not written: the disk is full" in str(error)


class TestProgress:
    @pytest.fixture
    def clock(self, monkeypatch):
        now = [100.0]
        monkeypatch.setattr(progress_module, "monotonic", lambda: now[0])
        return now

    def reported(self, clock, step_s, interval_s, world=None, **job):
        told = Told()
        run = made(world or SingleRank(), **job)

        class Pass(Hook):
            def on_result(self, run, report):
                clock[0] += step_s(run.progress.step) if callable(step_s) else step_s

        run.hooks = [Pass(), ReportProgress(told.reporter, interval_s)]
        train(run)
        return told

    def test_is_told_at_intervals(self, clock):
        told = self.reported(clock, step_s=1.0, interval_s=3.0)

        assert [event["step"] for event in told.events("progress")] == [1, 4, 7, 10]

    def test_is_told_of_the_last_step_whenever_that_was(self, clock):
        told = self.reported(clock, step_s=1.0, interval_s=4.0)

        assert [event["step"] for event in told.events("progress")] == [1, 5, 9, 10]

    def test_says_how_far_and_how_long_it_will_take(self, clock):
        told = self.reported(clock, step_s=0.5, interval_s=2.0)

        *_, last, _ = told.events("progress")
        assert last["step"] == 9
        assert (last["num_steps"], last["epoch"], last["num_epochs"]) == (10, 1, 2)
        assert last["samples_per_s"] == pytest.approx(4.0)
        assert last["eta_s"] == pytest.approx(0.5)
        assert last["lr"] == 0.1
        assert 0 < last["loss"] < 2

    def test_knows_the_speed_of_steps_that_are_fast(self, clock):
        told = self.reported(clock, step_s=0.01, interval_s=0.0)

        assert told.events("progress")[-1]["samples_per_s"] == pytest.approx(200.0)

    def test_averages_over_some_seconds(self, clock):
        told = self.reported(clock, lambda step: 0.5 + step % 2, interval_s=0.0, train={"epochs": 12})

        rates = [event["samples_per_s"] for event in told.events("progress")]
        assert rates[20:] == pytest.approx([2.0] * 40, rel=0.1)

    def test_follows_a_speed_that_changes(self, clock):
        def step_s(step):
            return 0.25 if step <= 50 else 4.0

        told = self.reported(clock, step_s, interval_s=1.0, train={"epochs": 12})

        rates = {event["step"]: event["samples_per_s"] for event in told.events("progress")}
        assert max(rates) == 60
        assert [rates[step] for step in sorted(rates) if 4 < step <= 50] == pytest.approx([8.0] * 12)
        assert [rates[step] for step in range(54, 61)] == pytest.approx([0.5] * 7)

    def test_is_told_by_rank_0_alone(self, clock):
        def rank(world):
            told = Told(world.rank)
            run = made(world)
            run.hooks = [ReportProgress(told.reporter, 0.0)]
            train(run)
            return len(told.events())

        first, second = on_ranks(2, rank)
        assert first > 0
        assert second == 0

    def test_evaluations_and_early_stops_are_told(self, clock):
        section = {"early_stopping": {"metric": "loss", "mode": "max", "patience": 1}}
        told = self.reported(clock, step_s=1.0, interval_s=99.0, evaluation=section, train={"epochs": 9})

        evaluations = told.events("evaluation")
        assert [event["epoch"] for event in evaluations] == [1, 2]
        assert evaluations[0]["metrics"].keys() == {"loss"}
        assert told.events("notice")[-1]["text"] == "stopping early: loss did not improve in 1 evaluations"
