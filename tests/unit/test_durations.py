"""Durations in epochs, steps and samples: schedules, evaluations and checkpoints, on any number of ranks."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from support.training import Task, made
from support.worlds import on_ranks

from horovod_train.cli.plan import charts
from horovod_train.config.arguments import batch_size_at, samples_of_growth
from horovod_train.config.fields import Duration
from horovod_train.config.load import job_from
from horovod_train.config.schema import Job, Train
from horovod_train.data.order import DataOrder
from horovod_train.errors import ConfigError, UserError
from horovod_train.training.hooks.base import Hook
from horovod_train.training.hooks.saving import EvaluateWithinEpoch
from horovod_train.training.hooks.steps import ReportProgress
from horovod_train.training.loop import begin, train
from horovod_train.training.run import PassedIntervals, Progress


def job_of(**fields):
    return job_from({"name": "j", "task": "digits", **fields}, None, "job.yaml", environ={})


def refused(**fields):
    with pytest.raises(ConfigError) as raised:
        job_of(**fields)
    return {problem.path: (problem.found, problem.message) for problem in raised.value.problems}


def lr_of_steps(run):
    return [report.lr for report in run.hooks[0].reports]


class Evaluations(Hook):
    """Notes the steps of evaluations."""

    def __init__(self):
        self.steps = []

    def on_evaluation(self, run, *, begins):
        if begins:
            self.steps.append(run.progress.step)


def trained(*, size=1, task=None, change=lambda run: None, **job):
    """Train with evaluations within epochs; return the run of rank 0."""

    def rank(world):
        run = made(world, task() if task else None, **job)
        run.hooks += [EvaluateWithinEpoch(), Evaluations()]
        change(run)
        train(run)
        return run

    return on_ranks(size, rank)[0]


class TestNotation:
    @pytest.mark.parametrize(
        ("written", "text"),
        [
            (3, "3 epochs"),
            (0.5, "0.5 epochs"),
            (0.3, "0.3 epochs"),
            ("1 epoch", "1 epoch"),
            ("1.0 epochs", "1 epoch"),
            (" 500  steps ", "500 steps"),
            ("500step", "500 steps"),
            ("1_000_000 samples", "1000000 samples"),
            ("1e9 samples", "1000000000 samples"),
            (5e-05, "5e-05 epochs"),
            ("1e-5 epochs", "1e-05 epochs"),
        ],
    )
    def test_is_kept_in_a_job(self, written, text):
        job = job_of(evaluation={"every": written})

        assert job.model_dump(mode="json")["evaluation"]["every"] == text
        assert Job.model_validate(job.model_dump(mode="json")) == job

    @pytest.mark.parametrize(
        ("written", "why"),
        [
            ("500 batches", "must be a duration, such as '5 epochs', '500 steps'"),
            ("steps", "must be a duration"),
            ("1__0 steps", "must be a duration"),
            ("5_ steps", "must be a duration"),
            (True, "must be a duration"),
            ([1], "must be a duration"),
            ("-1 steps", "must be a duration"),
            (-1, "must be at least 0"),
            (math.nan, "must be at least 0"),
            ("0.5 steps", "must be a whole number of steps"),
            ("1e20 steps", "at most 9007199254740992 steps"),
            ("0 steps", "must be greater than 0"),
            (0, "must be greater than 0"),
        ],
    )
    def test_that_is_wrong_is_explained(self, written, why):
        ((_, message),) = refused(evaluation={"every": written}).values()

        assert why in message

    @pytest.mark.parametrize(
        ("every", "expected"),
        [(None, []), ("9 steps", ["9 steps"]), ([1, "9 steps"], ["1 epoch", "9 steps"])],
    )
    def test_of_checkpoints_are_one_or_several(self, every, expected):
        assert job_of(checkpoint={"every": every}).model_dump(mode="json")["checkpoint"]["every"] == expected

    @pytest.mark.parametrize("warmup", [0, "0 steps", "0 samples"])
    def test_of_no_length_is_none_in_any_unit(self, warmup):
        assert list(refused(lr={"decay": "inverse_sqrt", "warmup": warmup})) == ["lr.warmup"]

    def test_of_adascale_in_steps_is_that_of_the_reference_batch(self):
        job_of(lr={"scaling": "adascale", "warmup": "150 steps"}, train={"max_steps": 100, "epochs": 10})

    def test_of_a_list_has_one_unit(self):
        lr = {"decay": "points", "decay_args": {"points": [[0, 1], ["5 steps", 0.5], ["1 epoch", 0.1]]}}

        assert refused(lr=lr)["lr.decay_args.points"][1] == "must have positions in one unit"

    def test_beyond_the_job_is_refused(self):
        assert refused(lr={"warmup": "9 steps"}, train={"max_steps": 8})["lr.warmup"] == (
            "9 steps",
            "must be at most train.max_steps = 8",
        )


class TestSchedules:
    """Ten samples, two per rank and step: five steps of an epoch on one rank, three on two."""

    @pytest.mark.parametrize("warmup", ["4 steps", "8 samples", 0.8])
    def test_in_any_unit_are_the_same(self, warmup):
        lr = {"base_lr": 0.1, "scaling": "none", "warmup": warmup, "warmup_start_lr": 0.0, "decay": "cosine"}
        run = trained(lr=lr)

        ramp = [0.0, 0.025, 0.05, 0.075]
        wave = [0.05 * (1 + math.cos(math.pi * (step - 4) / 6)) for step in range(4, 10)]
        assert lr_of_steps(run) == pytest.approx([*ramp, *wave])

    @pytest.mark.parametrize("size", [1, 2])
    def test_in_steps_are_in_those_of_the_job(self, size):
        """On two ranks, the last step of an epoch has two samples only."""
        lr = {"base_lr": 0.1, "scaling": "none", "decay": "step", "decay_args": {"milestones": ["4 steps"]}}
        run = trained(size=size, lr=lr)

        assert lr_of_steps(run) == pytest.approx(
            [0.1 if n < 4 else 0.01 for n in range(10 if size == 1 else 6)]
        )

    def test_in_steps_of_legw_are_not_lengthened(self):
        lr = {"base_lr": 0.1, "scaling": "legw", "reference_batch_size": 1, "warmup_start_lr": 0}
        run = trained(lr={**lr, "warmup": "4 steps"}, train={"epochs": 4})

        peak = 0.1 * math.sqrt(2)
        assert lr_of_steps(run)[:6] == pytest.approx([0, peak / 4, peak / 2, peak * 3 / 4, peak, peak])

    def test_in_steps_that_have_passed_stay_where_they_were(self):
        """Four steps on one rank are 8 samples; afterwards, two ranks train."""
        lr = {"base_lr": 0.1, "scaling": "none", "decay": "step", "decay_args": {"milestones": ["4 steps"]}}
        before = made(lr=lr, train={"stop_at_step": 5})
        train(before)

        def rank(world):
            run = made(world, lr=lr)
            run.progress.restore(before.progress.to_json())
            begin(run)
            return run.policy.schedule.milestones

        assert on_ranks(2, rank)[0] == [Duration(0.8)]

    def test_in_steps_beyond_the_limit_of_the_job_leave_the_warmup_incomplete(self, caplog):
        lr = {"base_lr": 0.1, "scaling": "none", "warmup": "20 samples", "warmup_start_lr": 0.0}
        run = trained(lr=lr, train={"epochs": None, "max_steps": 5})

        assert lr_of_steps(run) == pytest.approx([0.01 * step for step in range(5)])
        assert "does not reach its peak" in caplog.text

    @pytest.mark.parametrize(
        ("lr", "message"),
        [
            ({"warmup": "20 steps"}, "it has 4 epochs, and train.epochs is 2"),
            (
                {"warmup": "4 steps", "decay": "step", "decay_args": {"milestones": ["2 steps"]}},
                "before the warm-up of",
            ),
        ],
    )
    def test_that_are_not_possible_are_refused_when_the_data_are_known(self, lr, message):
        with pytest.raises(UserError, match=message):
            begin(made(lr={"base_lr": 0.1, "scaling": "none", **lr}))

    @pytest.mark.parametrize("unit", ["steps", "samples"])
    def test_are_exact_where_fractions_of_epochs_are_not(self, unit):
        """5 / 3 > 1 + 2 / 3, as floating-point numbers."""
        lr = {"base_lr": 0.1, "scaling": "none", "decay": "step", "decay_args": {"milestones": [f"5 {unit}"]}}
        run = made(lr=lr, train={"batch_size_per_rank": 1})
        run.progress = Progress(DataOrder(3, 0, shuffle=False))
        begin(run)

        assert run.policy.at(1 + 1 / 3) == pytest.approx(0.1)
        assert run.policy.at(1 + 2 / 3) == pytest.approx(0.01)

    def test_a_cycle_in_steps_begins_after_the_warmup(self):
        """On two ranks, steps have 4, 4 and 2 samples: the cycle is that of the steps 3 and 4."""
        lr = {
            "base_lr": 0.1, "scaling": "none", "warmup": "2 steps", "decay": "cosine_restarts",
            "decay_args": {"first_cycle": "2 steps"},
        }  # fmt: skip
        run = trained(size=2, lr=lr)

        assert lr_of_steps(run)[2] == lr_of_steps(run)[4] == pytest.approx(0.1)
        assert lr_of_steps(run)[3] < 0.09

    @pytest.mark.parametrize("size", [1, 2, 4])
    def test_in_steps_keep_their_order_on_other_ranks(self, size):
        lr = {
            "base_lr": 0.1,
            "scaling": "none",
            "warmup": "10 steps",
            "decay": "step",
            "decay_args": {"milestones": ["12 steps"]},
        }
        section = {"epochs": 9}

        def begun(world):
            run = made(world, lr=lr, train={**section, "stop_at_step": 2})
            train(run)
            return run.progress.to_json()

        before = on_ranks(4, begun)[0]

        def rank(world):
            run = made(world, lr=lr, train=section)
            run.progress.restore(before)
            begin(run)
            return run.policy.warmup_epochs < run.policy.schedule.milestones[0].epochs

        assert all(on_ranks(size, rank))

    def test_a_growth_that_has_ended_does_not_begin_again(self):
        section = {"epochs": 99, "batch_size_per_rank": 5, "batch_warmup": {"start": 2, "length": "20 steps"}}
        before = made(train={**section, "stop_at_step": 40})
        train(before)
        assert before.batch_size_at(before.progress.epochs_passed) == 5

        def rank(world):
            run = made(world, train=section)
            run.progress.restore(before.progress.to_json())
            begin(run)
            return run.batch_size_at(run.progress.epochs_passed)

        assert on_ranks(2, rank) == [10, 10]

    @pytest.mark.parametrize("unit", ["steps", "samples"])
    def test_of_a_growing_batch(self, unit):
        length = {"steps": "40 steps", "samples": f"{samples_of_growth(2, 10, 40):.0f} samples"}[unit]
        warmup = {"start": 2, "length": length}
        run = made(train={"epochs": 100, "global_batch_size": 10, "batch_warmup": warmup})
        begin(run)

        epochs, num_steps = 0.0, 0
        while run.batch_size_at(epochs) < 10:
            epochs, num_steps = epochs + run.batch_size_at(epochs) / 10, num_steps + 1
        assert 40 <= num_steps <= 50  # sizes are rounded down

    def test_growth_takes_the_number_of_steps(self):
        num_samples = samples_of_growth(100, 1000, 500)
        section = Train(batch_warmup={"start": 100, "length": num_samples / 1e6})

        at, num_steps = 0, 0
        while at < num_samples:
            at, num_steps = at + batch_size_at(section, 1000, at / 1e6), num_steps + 1
        assert num_steps == pytest.approx(500, rel=0.01)


class TestLength:
    """Ten samples, two per rank and step."""

    @pytest.mark.parametrize(
        ("num_samples", "size", "steps"),
        [(1, 1, 1), (5, 1, 3), (10, 1, 5), (11, 1, 6), (24, 1, 12), (24, 2, 7), (24, 3, 5), (30, 3, 6)],
    )
    def test_in_samples_ends_with_the_step_that_uses_the_last_one(self, num_samples, size, steps):
        lr = {"base_lr": 0.1, "scaling": "none", "decay": "cosine"}
        run = trained(size=size, train={"epochs": None, "max_samples": num_samples}, lr=lr)

        assert run.progress.step == run.planned_steps() == steps
        assert run.policy.total_epochs == pytest.approx(run.progress.epochs_passed)
        assert lr_of_steps(run)[0] == pytest.approx(0.1)
        assert run.hooks[-1].steps[-1] == steps

    def test_in_samples_is_at_most_that_in_epochs(self):
        assert trained(train={"epochs": 2, "max_samples": 99}).progress.step == 10

    @pytest.mark.parametrize("step", range(1, 8))
    def test_in_samples_goes_on_after_a_resume(self, step):
        before = trained(train={"epochs": None, "max_samples": 15, "stop_at_step": step})
        run = made(train={"epochs": None, "max_samples": 15})
        run.progress.restore(before.progress.to_json())
        train(run)

        assert run.progress.step == 8
        assert run.policy.total_epochs == pytest.approx(1.6)

    @pytest.mark.parametrize("num_samples", [7, 10, 33, 60])
    def test_in_samples_is_planned_for_a_growing_batch(self, num_samples):
        warmup = {"start": 1, "length": 2}
        section = {"epochs": None, "max_samples": num_samples, "global_batch_size": 8, "batch_warmup": warmup}
        run = made(train=section)
        planned = run.planned_steps()
        train(run)

        assert run.progress.step == planned

    def test_in_samples_beside_one_in_steps_is_refused(self):
        assert (
            "so does train.max_steps = 5"
            in refused(train={"max_samples": 5, "max_steps": 5})["train.max_samples"][1]
        )


class TestEvaluations:
    def test_in_steps_are_made_within_epochs(self):
        run = trained(evaluation={"every": "3 steps"})

        assert run.hooks[-1].steps == [3, 6, 9, 10]

    @pytest.mark.parametrize(
        ("every", "expected"),
        [
            ("6 samples", [3, 6, 9, 10]),
            (0.5, [3, 5, 8, 10]),
            ("5 steps", [5, 10]),
            (2, [10]),
            ("100 steps", [10]),
        ],
    )
    def test_in_any_unit(self, every, expected):
        assert trained(evaluation={"every": every}).hooks[-1].steps == expected

    @pytest.mark.parametrize("size", [1, 2])
    def test_within_an_epoch_stop_training(self, size):
        section = {"every": "2 steps", "early_stopping": {"metric": "quality", "mode": "max", "patience": 2}}
        run = trained(size=size, task=lambda: Task([1.0] * 20), train={"epochs": 9}, evaluation=section)

        assert run.progress.step == 6

    def test_do_not_change_what_is_trained(self):
        plain, often = trained(), trained(evaluation={"every": "1 step"})

        assert often.replica.params == plain.replica.params

    @pytest.mark.parametrize("step", range(1, 10))
    def test_go_on_after_a_resume(self, step):
        before = trained(evaluation={"every": "3 steps"}, train={"stop_at_step": step})

        def change(run):
            run.progress.restore(before.progress.to_json())

        after = trained(evaluation={"every": "3 steps"}, change=change)

        periodic = [each for each in before.hooks[-1].steps if each % 3 == 0]
        assert [*periodic, *after.hooks[-1].steps] == [3, 6, 9, 10]

    @pytest.mark.parametrize(
        ("section", "more"),
        [
            ({"every": 2, "early_stopping": {"metric": "quality", "mode": "max", "patience": 2}}, {}),
            (
                {"every": "3 steps"},
                {"decay": "plateau", "decay_args": {"metric": "quality", "mode": "max", "patience": 0}},
            ),
        ],
    )
    @pytest.mark.parametrize("step", [5, 10, 15])
    def test_of_a_job_that_is_stopped_for_now_are_not_counted(self, section, more, step):
        fields = {"evaluation": section, "lr": {"base_lr": 0.1, "scaling": "none", **more}}
        fields["task"] = lambda: Task([1.0] * 99)
        undisturbed = trained(**fields, train={"epochs": 8})
        before = trained(**fields, train={"epochs": 8, "stop_at_step": step})

        def change(run):
            run.progress.restore(before.progress.to_json())

        after = trained(**fields, train={"epochs": 8}, change=change)

        assert after.progress.step == undisturbed.progress.step
        assert [*lr_of_steps(before), *lr_of_steps(after)] == lr_of_steps(undisturbed)

    @pytest.mark.parametrize(("every", "expected"), [(1, [5, 10]), (3, [10]), ("5 steps", [5, 10])])
    def test_after_a_checkpoint_of_the_last_step_of_an_epoch(self, every, expected):
        """Of a previous version, which does not say what was evaluated."""

        def change(run):
            run.progress.step, run.progress.cursor = 5, 10

        assert trained(evaluation={"every": every}, change=change).hooks[-1].steps == expected

    def test_go_on_if_an_epoch_has_fewer_samples(self):
        def change(run):
            run.progress.step, run.progress.epoch = 50, 10
            run.progress.evaluation = PassedIntervals("10 samples", 20)

        run = trained(evaluation={"every": "10 samples"}, train={"epochs": 13}, change=change)

        assert run.hooks[-1].steps == [55, 60, 65]

    def test_of_a_job_that_stopped_early_and_no_longer_does(self):
        section = {"early_stopping": {"metric": "quality", "mode": "max", "patience": 1}}
        before = trained(task=lambda: Task([1.0] * 9), train={"epochs": 4}, evaluation=section)
        reported = []

        def change(run):
            run.progress.restore(before.progress.to_json())
            run.hooks.append(ReportProgress(SimpleNamespace(report=reported.append), 0.0))

        assert trained(train={"epochs": 4}, change=change).progress.epoch == 4

    @pytest.mark.parametrize("was", ["1 step", 1])
    def test_of_another_interval_count_from_the_start(self, was):
        before = trained(evaluation={"every": was}, train={"stop_at_step": 4})

        def change(run):
            run.progress.restore(before.progress.to_json())

        after = trained(evaluation={"every": "3 steps"}, change=change)

        assert after.hooks[-1].steps == [6, 9, 10]


class TestThePlan:
    def text(self, **fields):
        return "\n".join(charts(job_of(**fields), 4))

    def test_draws_a_schedule_in_the_unit_of_the_job(self):
        text = self.text(lr={"warmup": "50 steps", "decay": "cosine"}, train={"max_steps": 100})

        assert "100 steps" in text.splitlines()[-1]
        assert "no chart" not in text

    def test_draws_a_schedule_in_samples(self):
        text = self.text(lr={"warmup": "500 samples", "decay": "cosine"}, train={"max_samples": 1000})

        assert "1000 samples" in text.splitlines()[-1]

    @pytest.mark.parametrize(
        ("lr", "limit"), [({"warmup": "50 steps"}, {"epochs": 3}), ({"warmup": 1}, {"max_steps": 100})]
    )
    def test_says_what_depends_on_the_data(self, lr, limit):
        text = self.text(lr=lr, train=limit)

        assert f"no chart: where {Duration.of(lr['warmup'])} ends depends on the data" in text
        assert "█" not in text
