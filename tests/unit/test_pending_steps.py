"""Readings that come late, and what hooks answer: in order, nothing lost, alike on all ranks."""

from __future__ import annotations

import time
from time import sleep

import pytest
from support.training import Framework, Task, Told, made, manager_of
from support.worlds import on_ranks

from horovod_train.checkpoint.store import list_checkpoints, read_checkpoint
from horovod_train.checkpoint.writing import Writing
from horovod_train.collectives.base import SingleRank
from horovod_train.errors import CheckpointError, NumericError, PeerError, PreemptedError, UserError
from horovod_train.frameworks.plain_data import from_blob
from horovod_train.telemetry.recorder import Recorder
from horovod_train.training import run as readings_module
from horovod_train.training.hooks.base import Hook
from horovod_train.training.hooks.saving import (
    PreemptionAgreement,
    PreemptionRequest,
    SaveCheckpoints,
    StopWhenPreempted,
)
from horovod_train.training.loop import LoopBridge, train
from horovod_train.training.run import ExitPreempted, PendingSteps, RestoreCheckpoint, StepReport, Stop
from horovod_train.worker import restore_from, resume

NEVER = 10**6


def late(run, lag):
    """Let a run be told of steps some steps later; those behind one that is not finite are not made."""
    step, has_ended = run.replica.step, []

    def later(planned, lr, *, want_norm):
        before = {name: array.copy() for name, array in run.replica.params.items()}
        found = step(planned, lr, want_norm=want_norm)
        if has_ended:
            run.replica.params.update(before)
            found.was_executed = False
        elif not found.is_finite:
            has_ended.append(True)
        return found

    run.replica.step = later
    run.pending_steps = PendingSteps(lag)
    return run


class TestLateReadings:
    @pytest.mark.parametrize("size", [1, 2])
    @pytest.mark.parametrize("lag", [1, 2, 3, 4, 5, NEVER])
    def test_are_those_that_would_have_come_at_once_in_their_order(self, lag, size):
        def reports(world, lag):
            run = late(made(world), lag)
            train(run)
            return [(r.step, r.epochs_passed, r.share, r.lr, r.outcome.loss) for r in run.hooks[0].reports]

        on_time = on_ranks(size, lambda world: reports(world, 0))

        assert on_ranks(size, lambda world: reports(world, lag)) == on_time
        assert [step for step, *_ in on_time[0]] == list(range(1, len(on_time[0]) + 1))

    def test_come_so_many_steps_later_on_every_rank(self):
        outstanding = []

        class Count(Hook):
            def on_step(self, run):
                outstanding.append(run.progress.step - len(run.hooks[0].reports))

        for lag in (0, 1, 2, 5):
            outstanding.clear()
            run = late(made(train={"epochs": 1, "batch_size_per_rank": 1}, has_eval=False), lag)
            run.hooks.append(Count())
            train(run)
            assert outstanding == [min(lag, step) for step in range(1, 11)]

    def test_are_all_there_before_a_save_a_comparison_of_epochs_and_the_end(self, tmp_path):
        run = late(made(checkpoint={"every": "4 steps"}), 3)
        manager = manager_of(tmp_path, run)
        known = {}
        save = manager.save

        def watched(step, **what):
            known[step] = len(run.hooks[0].reports)
            save(step, **what)

        manager.save = watched
        run.hooks.append(SaveCheckpoints(manager, Framework()))
        train(run)
        manager.close()

        assert known == {4: 4, 8: 8, 10: 10}

    def test_are_all_there_before_an_evaluation(self):
        known = []

        class Count(Hook):
            def on_epoch(self, run, *, evaluated):
                known.append((evaluated, len(run.hooks[0].reports)))

        run = late(made(), NEVER)
        run.hooks.append(Count())
        evaluate = run.replica.evaluate
        run.replica.evaluate = lambda batches: known.append(len(run.hooks[0].reports)) or evaluate(batches)
        train(run)

        assert known == [5, (True, 5), 10, (True, 10)]

    def test_are_all_there_before_ranks_leave(self, tmp_path):
        def rank(world):
            run = late(made(world, train={"epochs": 9}), 3)
            manager = manager_of(tmp_path, run)
            request = PreemptionRequest()
            request.is_received = True
            agreement = PreemptionAgreement(
                world, lambda: request.is_received, clock=lambda: float(run.progress.step)
            )
            recorder = Recorder("line", "run", world, world.size)
            run.hooks.append(StopWhenPreempted(agreement, manager, Framework(), recorder, Told().reporter))
            with pytest.raises(PreemptedError):
                train(run)
            manager.close()
            return [report.step for report in run.hooks[0].reports]

        assert on_ranks(2, rank) == [[1]] * 2

    def test_are_told_though_training_fails(self):
        class Broken(Task):
            def gradient(self, params, batch):
                if len(self.seen) == 4:
                    raise RuntimeError("the disk is gone")
                return super().gradient(params, batch)

        run = late(made(task=Broken()), 3)
        with pytest.raises(RuntimeError, match="the disk is gone"):
            train(run)

        assert [report.step for report in run.hooks[0].reports] == [1, 2, 3, 4]

    def test_name_the_step_they_speak_of(self):
        run = late(made(task=Task(poison=[3])), 2)

        with pytest.raises(NumericError, match="^step 3: the loss is nan"):
            train(run)

        assert run.progress.step == 5
        # What came after it was not made, as it had not been if the step were known at once.
        assert [report.step for report in run.hooks[0].reports] == [1, 2]

    def test_end_training_when_another_rank_is_lost(self):
        class Lost:
            def outcome(self):
                raise PeerError("a collective was ended")

        run = made()
        run.replica.step = lambda *_, **__: Lost()

        with pytest.raises(PeerError):
            train(run)


class Answer(Hook):
    """Answers once, at a moment."""

    def __init__(self, moment, step, answer):
        self.moment, self.step, self.answer = moment, step, answer

    def _once(self, moment, step):
        if (moment, step) != (self.moment, self.step):
            return None
        answer, self.answer = self.answer, None
        return answer

    def on_result(self, run, report):
        return self._once("reading", report.step)

    def on_step(self, run):
        return self._once("step", run.progress.step)

    def on_epoch(self, run, *, evaluated):
        return self._once("epoch", run.progress.epoch)


class TestStop:
    @pytest.mark.parametrize(
        ("moment", "number", "steps"), [("step", 4, 4), ("reading", 4, 4), ("epoch", 1, 5)]
    )
    @pytest.mark.parametrize("size", [1, 3])
    def test_evaluates_and_saves_as_at_the_end(self, tmp_path, moment, number, steps, size):
        def rank(world):
            run = made(world, train={"epochs": 3, "batch_size_per_rank": 1 if size > 1 else 2})
            manager = manager_of(tmp_path, run)
            run.hooks += [
                Answer(moment, number, Stop(number, "enough")),
                SaveCheckpoints(manager, Framework()),
            ]
            train(run)
            manager.close()
            return run.progress.step, run.hooks[0].moments[-1], run.progress.current_metrics

        for step, last, metrics in on_ranks(size, rank):
            wanted = steps if moment != "epoch" or size == 1 else 4  # ten samples by three
            assert (step, last) == (wanted, "end")
            assert metrics["loss"] > 0

    def test_comes_when_a_late_reading_says_so(self):
        run = late(made(), 2)
        run.hooks.append(Answer("reading", 2, Stop(2, "enough")))
        train(run)

        assert run.progress.step == 4
        assert [report.step for report in run.hooks[0].reports] == [1, 2, 3, 4]


class TestReplicasThatDifferBetweenMeans:
    def test_are_identical_again_before_training_stops(self):
        run = made()
        step = run.replica.step

        def differing(planned, lr, *, want_norm):
            run.replica.replicas_identical = (run.progress.step + 1) % 3 == 0 or planned.is_last
            return step(planned, lr, want_norm=want_norm)

        run.replica.step = differing
        run.hooks.append(Answer("step", 1, Stop(1, "enough")))
        train(run)

        assert run.progress.step == 3


class TestGoBack:
    def run_of(self, folder, world, *hooks, lag=0, restored=lambda run: None):
        run = late(made(world, checkpoint={"every": "2 steps", "keep_last": 9}), lag)
        manager = manager_of(folder, run)
        framework = Framework()
        resume(run, manager, framework, Told().reporter)

        def restore(step):
            restore_from(run, manager.at(step), framework)
            restored(run)

        run.restore = restore
        run.hooks += [SaveCheckpoints(manager, framework), *hooks]
        try:
            train(run)
        finally:
            manager.close()
        weights = {name: float(array) for name, array in run.replica.params.items()}
        return weights, [step for step in run.hooks[0].moments if isinstance(step, int)]

    @pytest.mark.parametrize("size", [1, 2])
    @pytest.mark.parametrize("lag", [0, 1])
    def test_goes_on_from_the_checkpoint(self, tmp_path, size, lag):
        undisturbed = on_ranks(size, lambda world: self.run_of(tmp_path / "a", world))
        last = undisturbed[0][1][-1]

        def rank(world):
            return self.run_of(
                tmp_path / "b", world, Answer("step", 5, RestoreCheckpoint(2, "a spike")), lag=lag
            )

        for weights, steps in on_ranks(size, rank):
            assert weights == undisturbed[0][0]
            assert steps == [1, 2, 3, 4, 5, *range(3, last + 1)]
        assert {found.step for found in list_checkpoints(tmp_path / "b")} == {*range(2, last + 1, 2)}

    def test_has_heard_of_all_steps_before_and_drops_what_they_ask_for(self, tmp_path):
        known = []
        _, steps = self.run_of(
            tmp_path,
            SingleRank(),
            Answer("step", 5, RestoreCheckpoint(4, "a spike")),
            Answer("reading", 5, Stop(5, "too late: this step is taken back")),
            lag=NEVER,
            restored=lambda run: known.append([report.step for report in run.hooks[0].reports]),
        )

        assert known == [[1, 2, 3, 4, 5]]
        assert steps == [1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10]

    def test_saves_anew_what_comes_out_otherwise(self, tmp_path):
        def push(run):
            before.append(slope_at(4))  # written: the manager has waited for it
            run.replica.params["slope"] = run.replica.params["slope"] + 1.0

        def slope_at(step):
            (found,) = [found for found in list_checkpoints(tmp_path) if found.step == step]
            return from_blob(read_checkpoint(found.path).arrays["model"]["slope"])

        before = []
        self.run_of(tmp_path, SingleRank(), Answer("step", 5, RestoreCheckpoint(2, "a spike")), restored=push)

        assert slope_at(4) > before[0] + 0.1

    def test_waits_for_a_checkpoint_that_is_being_written(self, tmp_path, monkeypatch):
        write = Writing.complete

        def slowly(*what):
            sleep(0.3)
            return write(*what)

        monkeypatch.setattr(Writing, "complete", slowly)
        _, steps = self.run_of(tmp_path, SingleRank(), Answer("step", 4, RestoreCheckpoint(4, "a spike")))

        assert steps == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]

    def test_of_a_step_without_a_checkpoint_is_an_error_on_all_ranks(self, tmp_path):
        def rank(world):
            return self.run_of(tmp_path, world, Answer("step", 3, RestoreCheckpoint(1, "a spike")))

        for error in on_ranks(2, rank):
            assert isinstance(error, CheckpointError)
            assert "has no step-000000000001" in str(error)

    def test_where_there_are_no_checkpoints_is_an_error(self):
        run = made()
        run.hooks.append(Answer("step", 3, RestoreCheckpoint(1, "a spike")))

        with pytest.raises(UserError, match=r"restore step 1 \(a spike\): the run has no checkpoints"):
            train(run)


class TestAnswers:
    def test_the_first_hook_has_the_say(self):
        run = made()
        run.hooks += [Answer("step", 2, ExitPreempted(2)), Answer("step", 2, Stop(2, "enough"))]

        with pytest.raises(PreemptedError, match="after step 2"):
            train(run)

    def test_are_kept_when_they_come_while_something_is_saved(self, tmp_path):
        run = late(made(checkpoint={"every": "4 steps"}), NEVER)
        manager = manager_of(tmp_path, run)
        run.hooks += [SaveCheckpoints(manager, Framework()), Answer("reading", 3, Stop(3, "enough"))]
        train(run)
        manager.close()

        assert run.progress.step == 4

    def test_that_a_foreign_loop_cannot_follow_are_refused(self):
        for answer, said in (
            (Stop(1, "enough"), "to stop at step 1"),
            (RestoreCheckpoint(1, "a spike"), "to restore a checkpoint at step 1"),
        ):
            run = made()
            run.hooks.append(Answer("step", 1, answer))
            bridge = LoopBridge(run)
            step = bridge.rest_of_epoch()[0]
            with pytest.raises(UserError, match=f"{said} .*numpy's loop does not support"):
                bridge.after_step(step, run.replica.step(step, 0.1, want_norm=False), 0.1)

    def test_to_leave_ends_a_foreign_loop(self):
        run = made()
        run.hooks.append(Answer("epoch", 1, ExitPreempted(5)))
        bridge = LoopBridge(run)
        for step in bridge.rest_of_epoch():
            bridge.after_step(step, run.replica.step(step, 0.1, want_norm=False), 0.1)

        bridge.finish_epoch()
        with pytest.raises(PreemptedError, match="after step 5"):
            bridge.after_epoch()


class TestOfATrainingThatHasFailed:
    class Reading:
        def __init__(self, number, comes_s):
            self.number, self.there_s = number, time.monotonic() + comes_s

        def is_ready(self):
            return time.monotonic() >= self.there_s

        def outcome(self):
            return self.number

    def told(self, *comes_s):
        pending_steps = PendingSteps(2)
        for number, seconds in enumerate(comes_s):
            pending_steps.add(StepReport(number, 0.0, None, 0.1, self.Reading(number, seconds)))
        return [report.step for report in pending_steps.drain()]

    def test_what_comes_soon_is_told(self, monkeypatch):
        monkeypatch.setattr(readings_module, "DRAIN_TIMEOUT_S", 60.0)

        assert self.told(0.0, 0.05, 0.1) == [0, 1, 2]

    def test_what_a_device_that_stands_still_will_never_tell_is_not_waited_for(self, monkeypatch):
        monkeypatch.setattr(readings_module, "DRAIN_TIMEOUT_S", 0.1)

        assert self.told(0.0, 1e6, 0.0) == [0]
