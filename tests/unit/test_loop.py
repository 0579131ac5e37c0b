"""The loop makes the steps that it should, evaluates and stops when it should, on every rank alike."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support.training import NUM_SAMPLES, Noted, Task, least_squares, made
from support.worlds import on_ranks

from horovod_train.collectives.base import Mesh
from horovod_train.errors import NumericError, UserError
from horovod_train.training.loop import LoopBridge, evaluate, rest_of_epoch, train


def trained(size=1, task=Task, **job):
    """Train on every rank; return the runs, or errors."""

    def rank(world):
        run = made(world, task(), **job)
        train(run)
        return run

    return on_ranks(size, rank)


def moments(run):
    return run.hooks[0].moments


def stopping(mode, values, **rule):
    """After how many epochs a job stops whose evaluations say these values."""
    section = {"early_stopping": {"metric": "quality", "mode": mode, **rule}}
    (run,) = trained(task=lambda: Task(values), train={"epochs": 9}, evaluation=section)
    return run.progress.epoch


class TestSteps:
    def test_come_in_this_order_with_everything_around_them(self):
        (run,) = trained()

        assert moments(run) == [
            "start", 1, 2, 3, 4, 5, "epoch 1 evaluated", 6, 7, 8, 9, 10, "epoch 2 evaluated", "end",
        ]  # fmt: skip

    @pytest.mark.parametrize("size", [1, 2, 3, 4])
    @pytest.mark.parametrize("accumulation", [1, 2])
    def test_train_like_one_process_with_the_joint_batch(self, size, accumulation):
        per_step = 2 * accumulation * size
        starts = range(0, NUM_SAMPLES, per_step)
        batches = [list(range(start, min(start + per_step, NUM_SAMPLES))) for start in starts] * 2
        expected = least_squares(len(batches), batches.__getitem__, lambda step: 0.1)

        for run in trained(size, train={"accumulation_steps": accumulation}):
            found = [run.replica.params["slope"], run.replica.params["offset"]]
            assert found == pytest.approx(expected, abs=1e-12)
            assert run.progress.step == len(batches)

    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_use_each_sample_once_in_each_epoch_in_another_order(self, size):
        runs = trained(size, data={"shuffle": True})

        seen = [number for run in runs for batch in run.replica.task.seen for number in batch]
        assert sorted(seen) == sorted([*range(NUM_SAMPLES)] * 2)
        (alone,) = trained(data={"shuffle": True})
        order = [number for batch in alone.replica.task.seen for number in batch]
        assert order[:NUM_SAMPLES] != order[NUM_SAMPLES:]

    def test_have_the_rate_of_the_progress_before_them(self):
        lr = {"base_lr": 0.1, "scaling": "none", "warmup": 1, "warmup_start_lr": 0.0}
        (run,) = trained(lr=lr)

        rates = [report.lr for report in run.hooks[0].reports]
        assert rates == pytest.approx([0.0, 0.02, 0.04, 0.06, 0.08, *[0.1] * 5])

    @pytest.mark.parametrize("epochs", [None, 9])
    def test_of_a_limit_alone_take_as_many_epochs_as_needed_and_the_schedule_ends_with_it(self, epochs):
        lr = {"base_lr": 0.1, "scaling": "none", "decay": "cosine"}
        (run,) = trained(train={"max_steps": 13, "epochs": epochs}, lr=lr)

        assert (run.progress.step, run.progress.epoch, run.progress.cursor) == (13, 2, 6)
        rates = [report.lr for report in run.hooks[0].reports]
        assert rates == pytest.approx([0.05 * (1 + math.cos(math.pi * step / 13)) for step in range(13)])

    def test_until_a_stop_have_the_rates_of_the_whole_job(self):
        lr = {"base_lr": 0.1, "scaling": "none", "decay": "cosine"}
        (whole,), (run,) = trained(lr=lr), trained(lr=lr, train={"stop_at_step": 7})

        rates = [[report.lr for report in each.hooks[0].reports] for each in (whole, run)]
        assert rates[1] == rates[0][:7]
        assert moments(run)[-1] == "end"

    def test_behind_a_limit_within_the_warmup_are_reported(self, caplog):
        trained(train={"max_steps": 3}, lr={"base_lr": 0.1, "scaling": "none", "warmup": 1})

        assert "does not reach its peak: the warm-up has 1 epochs, and the job ends after" in caplog.text

    def test_end_at_the_limit_also_in_mid_epoch(self):
        (run,) = trained(train={"max_steps": 7})

        assert moments(run)[-3:] == [6, 7, "end"]
        assert (run.progress.epoch, run.progress.cursor) == (1, 4)

    def test_end_at_the_limit_at_the_end_of_an_epoch(self):
        (run,) = trained(train={"max_steps": 5})

        assert moments(run)[-2:] == ["epoch 1 evaluated", "end"]

    def test_are_not_made_when_there_is_nothing_left(self):
        run = made()
        run.progress.epoch = 2

        train(run)

        assert moments(run) == ["start", "end"]
        assert run.replica.task.seen == []

    def test_go_on_in_mid_epoch(self):
        run = made()
        run.progress.step, run.progress.cursor = 2, 4

        train(run)

        assert run.replica.task.seen[0] == [4, 5]
        assert len(run.replica.task.seen) == 3 + 5

    @pytest.mark.parametrize(
        ("enabled", "every", "expected"),
        [(True, 3, [0, 3, 6, 9]), (True, 1, [*range(10)]), (False, 1, [])],
    )
    def test_take_the_norm_when_it_is_wanted(self, enabled, every, expected):
        (run,) = trained(metrics={"enabled": enabled, "grad_norm_every_steps": every})

        taken = [n for n, report in enumerate(run.hooks[0].reports) if report.outcome.grad_norm is not None]
        assert taken == expected

    def test_tell_the_loss_of_all_and_this_ranks_part_of_it(self):
        runs = trained(2, train={"max_steps": 1})

        first, second = (run.hooks[0].reports[0].outcome for run in runs)
        assert first.loss == second.loss == pytest.approx(first.local_loss + second.local_loss)
        assert first.local_loss != second.local_loss


class TestStepsThatAreNotFinite:
    def poisoned(self, size, steps, **job):
        def rank(world):
            task = Task(poison=steps if world.rank == size - 1 else ())
            run = made(world, task, **job)
            train(run)
            return run

        return on_ranks(size, rank)

    def test_end_the_job_and_name_the_rank(self):
        for error in self.poisoned(3, [1]):
            assert isinstance(error, NumericError)
            assert "step 1: the loss is nan because of rank 2" in str(error)

    def test_are_left_out_when_that_is_allowed(self):
        for run in self.poisoned(2, [2], health={"non_finite": "skip"}):
            assert [report.outcome.is_finite for report in run.hooks[0].reports] == [
                True, False, True, True, True, True,
            ]  # fmt: skip
            assert all(math.isfinite(value) for value in run.replica.params.values())
            assert run.progress.step == 6


class TestEvaluation:
    @pytest.mark.parametrize("size", [1, 2, 3, 7])
    def test_is_the_mean_over_all_samples_on_any_number_of_ranks(self, size):
        runs = on_ranks(size, made)
        for run in runs:
            run.replica.params = {"slope": np.array(1.0), "offset": np.array(0.5)}

        found = on_ranks(size, lambda world: evaluate(with_world(runs[world.rank], world)))

        expected = np.mean([(1.0 * x + 0.5 - (2 * x + 1)) ** 2 for x in np.arange(5) / 5])
        assert found == [{"loss": pytest.approx(expected)}] * size
        assert all(each == found[0] for each in found)

    def test_comes_after_each_so_many_epochs_and_after_the_last(self):
        (run,) = trained(train={"epochs": 5}, evaluation={"every": 2})

        ends = [moment for moment in moments(run) if str(moment).startswith("epoch")]
        assert ends == ["epoch 1", "epoch 2 evaluated", "epoch 3", "epoch 4 evaluated", "epoch 5 evaluated"]

    def test_is_of_the_weights_that_are_kept(self):
        (run,) = trained(train={"max_steps": 7})

        assert run.progress.metrics_step == 7
        assert run.progress.current_metrics == evaluate(run)

    def test_is_not_repeated_at_the_end(self):
        calls = []
        run = made()
        plain = run.replica.evaluate
        run.replica.evaluate = lambda batches: calls.append(1) or plain(batches)

        train(run)

        assert len(calls) == 2

    def test_needs_no_data(self):
        (run,) = trained(has_eval=False)

        assert run.progress.metrics == {}

    def test_without_data_nothing_can_be_decided_by_it(self):
        section = {"early_stopping": {"metric": "loss", "mode": "min"}}
        (error,) = trained(has_eval=False, evaluation=section, checkpoint={"best": BEST})

        assert isinstance(error, UserError)
        assert "evaluation.early_stopping.metric, checkpoint.best.metric: the task has no evaluation" in str(
            error
        )

    @pytest.mark.parametrize(
        ("job", "path"),
        [
            ({"checkpoint": {"best": {"metric": "lossy", "mode": "min"}}}, "checkpoint.best.metric"),
            (
                {"evaluation": {"early_stopping": {"metric": "lossy", "mode": "min"}}},
                "evaluation.early_stopping.metric",
            ),
        ],
    )
    def test_names_what_is_misspelled(self, job, path):
        (error,) = trained(**job)

        assert f"{path}: the evaluation has no metric 'lossy'; it has loss" in str(error)
        assert "did you mean 'loss'?" in str(error)


BEST = {"metric": "loss", "mode": "min"}


class TestStoppingEarly:
    @pytest.mark.parametrize(
        ("mode", "values", "epochs"),
        [
            ("max", [1, 2, 3, 3, 3], 5),
            ("max", [3, 2, 1, 0], 3),
            ("max", [1, 2, 3, 4, 5, 6, 7, 8, 9], 9),
            ("min", [3, 2, 1, 1, 1], 5),
            ("min", [1, 2, 3, 4], 3),
            ("min", [9, 8, 7, 6, 5, 4, 3, 2, 1], 9),
            ("min", [5, 6, 4, 5, 5], 5),
            ("max", [math.nan, math.nan], 2),
            ("max", [1, math.nan, math.nan], 3),
            ("max", [1, math.inf, 0], 3),
        ],
    )
    def test_comes_after_two_evaluations_without_a_better_one(self, mode, values, epochs):
        assert stopping(mode, [*values, *[values[-1]] * 9][:9], patience=2) == epochs

    @pytest.mark.parametrize(
        ("mode", "values", "epochs"),
        [
            ("max", [1.0, 1.5, 1.5, 1.5], 3),  # exactly min_delta is no improvement
            ("max", [1.0, 1.75, 1.75, 1.75], 4),
            ("min", [2.0, 1.5, 1.5, 1.5], 3),
            ("min", [2.0, 1.25, 1.25, 1.25], 4),
        ],
    )
    def test_takes_more_than_min_delta_for_an_improvement(self, mode, values, epochs):
        assert stopping(mode, [*values, *[values[-1]] * 9], patience=2, min_delta=0.5) == epochs

    def test_counts_patience(self):
        assert [stopping("max", [1.0] * 9, patience=patience) for patience in (1, 3, 8)] == [2, 4, 9]

    def test_is_the_same_on_all_ranks(self):
        section = {"early_stopping": {"metric": "quality", "mode": "max", "patience": 2}}
        runs = trained(3, task=lambda: Task([1.0] * 9), train={"epochs": 9}, evaluation=section)

        assert [run.progress.epoch for run in runs] == [3, 3, 3]
        assert all(run.progress.stopped_early for run in runs)

    def test_of_a_job_that_no_longer_asks_for_it_is_forgotten(self):
        run = made()
        run.progress.epoch, run.progress.step, run.progress.stopped_early = 1, 5, True

        train(run)

        assert run.progress.epoch == 2


class TestTheBridge:
    """A loop that is not ours, which calls the same moments."""

    def drive(self, run):
        bridge = LoopBridge(run)
        bridge.begin()
        seen = []
        while not bridge.is_done:
            epoch = bridge.epoch
            for step in bridge.rest_of_epoch():
                lr, want_norm = bridge.lr, bridge.wants_norm
                bridge.after_step(step, run.replica.step(step, lr, want_norm=want_norm), lr)
            seen.append((epoch, bridge.evaluates_now))
            if not bridge.is_epoch_complete:
                break
            seen.append(bridge.finish_epoch())
            bridge.after_epoch()
        bridge.end()
        return seen

    @pytest.mark.parametrize("limit", [None, 5, 7])
    def test_makes_the_same_training(self, limit):
        ours, theirs = made(train={"max_steps": limit}), made(train={"max_steps": limit})
        train(ours)

        seen = self.drive(theirs)

        assert moments(theirs) == moments(ours)
        assert theirs.replica.params == ours.replica.params
        assert [report.lr for report in theirs.hooks[0].reports] == [r.lr for r in ours.hooks[0].reports]
        assert seen[0] == (0, True)
        assert seen[1] == {"loss": pytest.approx(seen[1]["loss"])}

    def test_knows_which_epochs_end_with_an_evaluation(self):
        run = made(train={"epochs": 5}, evaluation={"every": 2})

        seen = self.drive(run)

        assert [evaluates for _, evaluates in seen[::2]] == [False, True, False, True, True]
        assert [bool(metrics) for metrics in seen[1::2]] == [False, True, False, True, True]

    def test_knows_that_an_epoch_which_ends_the_job_ends_with_an_evaluation(self):
        run = made(train={"epochs": 5, "stop_at_step": 5}, evaluation={"every": 2})

        (_, evaluates), metrics = self.drive(run)

        assert evaluates
        assert metrics

    @pytest.mark.parametrize(("limit", "planned"), [(None, 5), (5, 3), (4, 2), (2, 0), (1, 0)])
    def test_is_given_no_steps_behind_the_limit(self, limit, planned):
        run = made(train={"max_steps": limit})
        assert len(LoopBridge(made()).rest_of_epoch()) == 5
        run.progress.step = 2  # it may have been resumed behind a limit that was lowered

        assert len(LoopBridge(run).rest_of_epoch()) == planned

    def test_without_evaluation_data_expects_none(self):
        run = made(has_eval=False)

        run.progress.cursor = len(run.train_reader)

        assert not LoopBridge(run).evaluates_now


class TestThePlan:
    @pytest.mark.parametrize(
        ("epoch", "cursor", "step", "limit", "expected"),
        [
            (0, 0, 0, None, 10),
            (0, 4, 2, None, 10),
            (1, 0, 5, None, 10),
            (2, 0, 10, None, 10),
            (0, 0, 0, 7, 7),
            (0, 0, 0, 70, 10),
            (1, 0, 5, 3, 5),
            (0, 10, 5, None, 10),
            (0, 10, 5, 7, 7),
        ],
    )
    def test_says_at_which_step_the_job_will_end(self, epoch, cursor, step, limit, expected):
        run = made(train={"max_steps": limit})
        run.progress.epoch, run.progress.cursor, run.progress.step = epoch, cursor, step

        assert run.planned_steps() == expected

    @pytest.mark.parametrize("batch", [1, 3, 4, 20])
    @pytest.mark.parametrize("limit", [1, 5, 7, 10, 33, None])
    @pytest.mark.parametrize("done", [0, 2, 4])
    @pytest.mark.parametrize("warmup", [None, {"start": 1, "length": 1.3}])
    def test_says_at_which_epoch_the_job_will_end(self, batch, limit, done, warmup):
        run = made(
            train={"max_steps": limit, "batch_size_per_rank": batch, "epochs": 4, "batch_warmup": warmup}
        )
        for _ in range(done):
            if not run.is_done:
                run.progress.advance(rest_of_epoch(run)[0].share.num_samples, 0.0)
                if run.is_epoch_complete:
                    run.progress.finish_epoch()
        planned = run.planned_end()
        train(run)

        assert planned == (run.progress.step, pytest.approx(run.progress.epochs_passed))

    @pytest.mark.parametrize("batch", range(1, 12))
    @pytest.mark.parametrize("size", [1, 2])
    def test_is_what_comes(self, batch, size):
        def planned_and_made(world):
            run = made(world, train={"batch_size_per_rank": batch, "epochs": 3})
            planned = run.planned_steps()
            train(run)
            return planned == run.progress.step

        assert on_ranks(size, planned_and_made) == [True] * size

    def test_tells_hooks_how_many_samples_were_this_ranks(self):
        runs = trained(2)

        per_step = [[report.share.num_local_samples for report in run.hooks[0].reports] for run in runs]
        # Two samples are left for the third step: too few to give each rank a batch.
        assert per_step == [[2, 2, 2] * 2, [2, 2, 0] * 2]
        assert isinstance(runs[0].hooks[0], Noted)


class TestAMesh:
    """Ranks that share samples are not all the ranks of the world, as with tensor parallelism."""

    def on_a_grid(self, num_data, num_copies, make=made):
        """Train with ``num_copies`` ranks for each place of the data axis; return the runs."""

        def rank(world):
            run = make(world, Task(), data_ranks=world.split(world.rank % num_copies))
            train(run)
            return run

        return on_ranks(num_data * num_copies, rank)

    @pytest.mark.parametrize(("num_data", "num_copies"), [(2, 2), (3, 2), (1, 4)])
    def test_trains_as_its_data_axis_does_alone(self, num_data, num_copies):
        alone = trained(num_data)

        runs = self.on_a_grid(num_data, num_copies)

        assert [run.mesh.data.size for run in runs] == [num_data] * len(runs)
        for rank, run in enumerate(runs):
            expected = alone[rank // num_copies]
            assert run.replica.params == expected.replica.params
            assert run.replica.task.seen == expected.replica.task.seen
            assert run.progress.metrics == expected.progress.metrics
            assert [r.lr for r in run.hooks[0].reports] == [r.lr for r in expected.hooks[0].reports]
            assert run.global_batch_size == expected.global_batch_size

    def test_scales_the_learning_rate_with_its_data_axis(self):
        def linear(*args, **kwargs):
            section = {"base_lr": 0.01, "scaling": "linear", "reference_batch_size": 2}
            return made(*args, lr=section, **kwargs)

        runs = self.on_a_grid(2, 2, linear)

        assert [run.hooks[0].reports[0].lr for run in runs] == [pytest.approx(0.02)] * 4


def with_world(run, world):
    run.mesh = Mesh.data_parallel(world)
    return run
