"""Studies: their trials, their table against NumPy, their sentences, and the advice before a run."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from horovod_train.cli.main import cli
from horovod_train.config.load import job_file, load_job
from horovod_train.errors import UserError
from horovod_train.events.file import Record
from horovod_train.events.types import Evaluation, Progress, Resumed, Summary
from horovod_train.plugins.report.document import as_html, as_markdown
from horovod_train.plugins.study.results import (
    Result,
    Study,
    fingerprint_of,
    locked,
    open_study,
    policies_of,
    policy_digest,
    read_study,
    result_of,
    trials_of,
    upper_tail,
)
from horovod_train.plugins.study.run import (
    Branching,
    batch_warmup,
    critical_batch,
    critical_blocks,
    default_epochs,
    mean_losses,
    report_of_study,
    run_trials,
    time_left_s,
)
from horovod_train.plugins.study.table import Metric, advice_for, cells_of, metric_of, table_of, verdicts

ACCURACY = Metric("accuracy", "max")


def digits(*settings):
    return load_job(job_file("digits"), settings, environ={})


def trials(job, names=("linear",), ranks=(1, 4), seeds=2, cores=64):
    return trials_of(job, policies_of(job, names), ranks, seeds, folder=Path("/s"), num_cores=cores)


class TestTrials:
    def test_are_one_for_each_policy_number_of_ranks_and_seed(self):
        found = trials(digits(), ["linear", "sqrt"])

        assert [trial.name for trial in found] == [
            "linear-r1-s0", "linear-r1-s1", "linear-r4-s0", "linear-r4-s1", "sqrt-r4-s0", "sqrt-r4-s1",
        ]  # fmt: skip
        assert [trial.global_batch_size for trial in found] == [32, 32, 128, 128, 128, 128]
        assert [round(trial.learning_rate.peak_lr, 3) for trial in found] == [0.015] * 2 + [0.06] * 2 + [
            0.03
        ] * 2

    def test_train_the_same_global_batches_on_fewer_cores(self):
        (trial,) = trials(digits(), ranks=[6], seeds=1, cores=4)

        assert trial.job.launch.num_ranks == 3
        assert (trial.global_batch_size, trial.job.train.global_batch_size) == (192, 192)
        assert not trial.is_real

    def test_of_strategies_whose_ranks_differ_use_real_ranks(self):
        (trial,) = trials(digits("strategy=adasum"), ranks=[6], seeds=1, cores=4)

        assert trial.is_real

    def test_on_other_hosts_use_real_ranks(self):
        job = digits("launch.hosts=[a:4,b:4]", "launch.num_ranks=8", "run_dir=/srv/runs")
        (trial,) = trials(job, ranks=[8], seeds=1, cores=2)

        assert trial.is_real

    def test_beyond_the_limits_of_a_rule_are_refused_before_any_is_run(self):
        with pytest.raises(UserError, match="makes the warm-up 16 times as long"):
            trials(digits(), ["legw"], ranks=[1, 16])

    def test_take_policies_from_files(self, tmp_path):
        file = tmp_path / "lamb.yaml"
        file.write_text(
            "optimizer: {name: lamb, args: {weight_decay: 0.01}}\nlr: {scaling: sqrt, base_lr: 0.002}\n"
        )
        found = trials(digits(), ["linear", str(file)], ranks=[1], seeds=1)

        assert [trial.policy for trial in found] == ["linear", "lamb"]
        assert found[1].job.optimizer.args == {"weight_decay": 0.01}
        assert found[1].learning_rate.peak_lr == 0.002

    def test_measure_the_noise_scale_where_the_strategy_can(self):
        assert trials(digits(), ranks=[4], seeds=1)[0].job.metrics.noise_scale_every_steps == 10
        (trial,) = trials(digits("strategy=fsdp"), ranks=[4], seeds=1)
        assert trial.job.metrics.noise_scale_every_steps is None

    @pytest.mark.parametrize(
        ("names", "message"),
        [
            (["liner"], "'liner' is neither a scaling rule nor a file"),
            (["linear", "linear"], "linear is given twice"),
        ],
    )
    def test_of_unknown_or_doubled_policies_are_refused(self, names, message):
        with pytest.raises(UserError, match=message):
            policies_of(digits(), names)

    def test_of_a_policy_that_the_job_cannot_have_are_refused(self):
        with pytest.raises(UserError, match="policy adascale cannot be used with this job"):
            trials(digits("strategy=fsdp"), ["adascale"])


def event(number, content):
    return Record(float(number), 0, content)


def progress(step, **numbers):
    return Progress(
        step=step, num_steps=10, epoch=0, num_epochs=1, loss=1.0, lr=0.1, samples_per_s=1.0, eta_s=None,
        numbers=numbers,
    )  # fmt: skip


def summary(steps, seconds, **metrics):
    return Summary(
        job="x", epochs=2.0, steps=steps, seconds=seconds, metrics=metrics, samples_per_s=1.0, world_size=1,
        global_batch_size=32, lr_scaling="linear", base_lr=0.1, reference_batch_size=32, peak_lr=0.1,
        metrics_addresses=(), checkpoint="",
    )  # fmt: skip


def test_the_result_of_a_trial_that_was_killed_is_that_of_its_last_start():
    (trial,) = trials(digits(), ranks=[1], seeds=1)
    records = [
        event(0, progress(3, noise_scale=50.0)),
        event(1, Evaluation(epoch=1, metrics={"loss": 0.5}, step=5)),
        event(2, Evaluation(epoch=2, metrics={"loss": 9.9}, step=10)),
        event(3, Resumed(checkpoint="step-5", epoch=1.0, step=5)),
        event(4, progress(6, noise_scale=70.0)),
        event(5, Evaluation(epoch=2, metrics={"loss": 0.4}, step=10)),
        event(6, summary(10, 3.0, loss=0.4)),
    ]
    found = result_of(trial, records)

    assert found.evaluations == [(5, {"loss": 0.5}), (10, {"loss": 0.4})]
    assert found.seconds == 6.0  # 5 of 10 steps took 3 s
    assert found.noise_scale == 70.0
    assert found.best("loss", "min") == 0.4
    assert found.seconds_to("loss", 0.5) == 3.0
    assert found.seconds_to("loss", 0.1) is None
    assert result_of(trial, records, "no memory").error == "no memory"
    assert result_of(trial, []).error == "it has no summary"


def result(policy="linear", ranks=1, seed=0, accuracy=0.98, loss=0.06, seconds=10.0, **more):
    return Result(
        trial=f"{policy}-r{ranks}-s{seed}", policy=policy, num_ranks=ranks, seed=seed,
        global_batch_size=32 * ranks, base_lr=0.01, peak_lr=0.01 * ranks,
        policy_digest=more.pop("policy_digest", policy), job_digest=more.pop("job_digest", ""),
        is_real=more.pop("is_real", True),
        metrics={"accuracy": accuracy, "loss": loss}, num_steps=100 // ranks, epochs=2.0, seconds=seconds,
        evaluations=[(50 // ranks, {"loss": 2 * loss}), (100 // ranks, {"loss": loss})], **more,
    )  # fmt: skip


def by_seed(policy, ranks, accuracies, **more):
    return [result(policy, ranks, seed, accuracy, **more) for seed, accuracy in enumerate(accuracies)]


class TestTheTable:
    RESULTS = (
        *by_seed("linear", 1, [0.980, 0.982, 0.984]),
        *by_seed("linear", 4, [0.960, 0.962, 0.964], seconds=3.0, loss=0.09),
        *by_seed("adascale", 4, [0.981, 0.983, 0.982], seconds=4.0),
    )

    def test_has_means_and_comparisons(self):
        columns, rows = cells_of(table_of(self.RESULTS, ACCURACY))
        cells = dict(zip(columns, rows[1], strict=True))

        accuracies = np.array([0.960, 0.962, 0.964])
        assert cells["accuracy"] == f"{100 * accuracies.mean():.1f} %"
        assert cells["spread"] == f"{100 * accuracies.std(ddof=1):.1f}"
        assert cells["relative accuracy"] == f"{(0.962 / 0.982 - 1):+.1%}"
        assert cells["relative loss"] == "+50.0%"
        assert cells["speed-up"] == "3.33"
        assert cells["efficiency"] == "83%"
        # Each run reaches 0.09: the runs on one rank in their last evaluation, for 0.12 is above it.
        assert cells["time to loss 0.09"] == "3.0 s"
        assert rows[0][columns.index("time to loss 0.09")] == "10.0 s"
        assert [row[:3] for row in rows] == [
            ("linear", "1", "32"), ("linear", "4", "128"), ("adascale", "4", "128"),
        ]  # fmt: skip

    def test_says_in_words_what_scaling_has_cost(self):
        sentences = list(verdicts(table_of(self.RESULTS, ACCURACY)))

        worse = "2.0 points worse than 1 rank (98.2 %)"
        reason = "the mean accuracy of the seeds is worse than by chance"
        assert sentences == [
            f"4 ranks, linear: accuracy 96.2 % is {worse}: {reason}.",
            "Best at 4 ranks: adascale, 98.2 %.",
        ]

    def test_of_one_seed_draws_no_conclusion(self):
        sentences = list(verdicts(table_of([result(), result(ranks=2, accuracy=0.9)], ACCURACY)))

        assert (
            "8.0 points worse than 1 rank (98.0 %); one seed does not show if that is chance" in sentences[0]
        )

    def test_of_a_loss_knows_that_smaller_is_better(self):
        results = [*by_seed("linear", 1, [0, 0], loss=0.06), *by_seed("linear", 2, [0, 0], loss=0.08)]
        sentences = list(verdicts(table_of(results, Metric("loss", "min"))))

        assert "loss 0.0800 is 0.0200 worse than 1 rank (0.0600)" in sentences[0]

    def test_marks_times_that_are_not_of_real_ranks(self):
        results = [*by_seed("linear", 1, [0.9, 0.9]), *by_seed("linear", 8, [0.9, 0.9], is_real=False)]
        study = Study(Path("/s"), "x", "p", "i", "now")
        columns, rows = cells_of(table_of(results, ACCURACY))
        markdown = as_markdown(report_of_study(study, table_of(results, ACCURACY)))

        assert dict(zip(columns, rows[1], strict=True))["time"] == "10.0 s*"
        assert dict(zip(columns, rows[1], strict=True))["speed-up"] == "-"
        assert "this machine has fewer cores than ranks" in markdown.lower()

    def test_shows_a_row_that_failed_with_its_reason(self):
        failed = replace(result(ranks=8), error="the loss is nan", metrics={}, evaluations=[])
        columns, rows = cells_of(table_of([result(), failed], ACCURACY))

        assert rows[1][:3] == ("linear", "8", "256")
        assert len(rows[1]) == len(columns)
        sentences = list(verdicts(table_of([result(), failed], ACCURACY)))
        assert sentences == ["8 ranks, linear: 1 of 1 seeds failed: the loss is nan."]

    def test_a_row_with_failed_seeds_is_neither_safe_nor_best(self):
        failed = replace(result("sqrt", 4, 1), error="killed", metrics={}, evaluations=[])
        results = [
            *by_seed("linear", 1, [0.9, 0.91]),
            result("sqrt", 4, 0, 0.99),
            failed,
            *by_seed("linear", 4, [0.9, 0.9]),
        ]
        table = table_of(results, ACCURACY)

        assert [table.is_safe(row) for row in table.rows] == [True, False, True]
        assert "Best at 4 ranks: linear, 90.0 %." in list(verdicts(table))
        assert "4 ranks, sqrt: 1 of 2 seeds failed: killed." in list(verdicts(table))

    def test_without_the_metric_has_times(self):
        results = [replace(result(ranks=ranks), metrics={}) for ranks in (1, 2)]
        columns, rows = cells_of(table_of(results, ACCURACY))

        assert [row[columns.index("time")] for row in rows] == ["10.0 s", "10.0 s"]
        assert [row[columns.index("accuracy")] for row in rows] == ["-", "-"]

    @pytest.mark.parametrize(
        ("settings", "wanted", "expected"),
        [
            ((), None, ("accuracy", "max")),
            (("checkpoint.best=null",), None, ("accuracy", "max")),
            (("checkpoint.best={metric: loss, mode: min}",), None, ("loss", "min")),
            ((), "top5_error", ("top5_error", "min")),
            ((), "perplexity", ("perplexity", "min")),
            ((), "rating:min", ("rating", "min")),
        ],
    )
    def test_compares_the_metric_of_the_best_checkpoint(self, settings, wanted, expected):
        assert metric_of(digits(*settings), ["accuracy", "loss"], wanted) == Metric(*expected)

    def test_a_metric_of_unknown_direction_is_refused(self):
        with pytest.raises(UserError, match="it is not known whether smaller or larger values are better"):
            metric_of(digits(), [], "rating")

    def test_is_html_with_charts_too(self):
        study = Study(Path("/s"), "x", "p", "i", "now")
        html = as_html(report_of_study(study, table_of(self.RESULTS, ACCURACY)))
        (charts,) = re.findall(r'id="charts">(.*?)</script>', html)

        assert [chart["title"] for chart in json.loads(charts)] == [
            "accuracy by global batch", "Loss by global batch", "Time of training by global batch",
        ]  # fmt: skip


class TestTheFile:
    def study(self, folder, job, *results):
        study = open_study(job, folder, "id")
        study.results = {each.trial: each for each in results}
        study.critical = [{"epoch": 1, "seed": 0, "batch": 32, "loss": 0.5, "length": 1.0}]
        study.metric = ("accuracy", "max")
        folder.mkdir(exist_ok=True)
        study.save()
        return study

    def test_comes_back_as_it_was(self, tmp_path):
        study = self.study(tmp_path / "s", digits(), result(), result(ranks=4, accuracy=math.pi / 4))

        assert read_study(tmp_path / "s") == study
        assert read_study(tmp_path / "other") is None

    def test_of_another_job_is_refused(self, tmp_path):
        self.study(tmp_path / "s", digits())

        assert open_study(digits("train.seed=7", "lr.base_lr=1.0"), tmp_path / "s", "other").id == "id"
        with pytest.raises(UserError, match="another task, or of other code, data or length"):
            open_study(digits("train.epochs=15"), tmp_path / "s", "other")

    def test_of_other_code_is_refused(self, tmp_path):
        (tmp_path / "own.py").write_text("import json, helper\nclass Own: ...\n")
        (tmp_path / "helper.py").write_text("from deeper import x\n")
        job = digits(f"task={tmp_path}/own.py:Own")
        self.study(tmp_path / "s", job)
        assert open_study(job, tmp_path / "s", "other").id == "id"

        (tmp_path / "plot.py").write_text("import own\n")
        assert open_study(job, tmp_path / "s", "other").id == "id", "it is not imported by the task"
        (tmp_path / "deeper.py").write_text("x = 3\n")

        with pytest.raises(UserError, match="other code"):
            open_study(job, tmp_path / "s", "other")

    def test_goes_on_with_another_number_of_cores(self, tmp_path):
        (two,), (one,) = (trials(digits(), ranks=[2], seeds=1, cores=cores) for cores in (2, 1))
        found = replace(result_of(two, [event(1, summary(10, 3.0, loss=0.4))]), error="")
        study = self.study(tmp_path / "s", digits(), found)

        assert two.job != one.job
        assert study.result_of(one) == found
        assert two.digest != one.digest, "an interrupted trial is started again under another key"

    def test_of_other_settings_is_refused(self, tmp_path):
        (trial,) = trials(digits(), ranks=[1], seeds=1)
        found = replace(result_of(trial, [event(1, summary(10, 3.0, loss=0.4))]), error="")
        study = self.study(tmp_path / "s", digits(), found)

        assert study.result_of(trial) == found
        (other,) = trials(digits("lr.base_lr=1.0"), ranks=[1], seeds=1)
        with pytest.raises(
            UserError, match="has a result of linear-r1-s0 that was trained with other settings"
        ):
            study.result_of(other)

    def test_is_locked_while_a_study_runs(self, tmp_path):
        with locked(tmp_path), pytest.raises(UserError, match="another study is running"), locked(tmp_path):
            pass

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "[]",
            "{}",
            '{"format_version": 2}',
            "nonsense",
            "[" * 100_000,
            '{"format_version": 1, "results": [{}]}',
        ],
    )
    def test_that_is_damaged_is_refused(self, tmp_path, text):
        (tmp_path / "study.json").write_text(text)

        with pytest.raises(UserError, match=r"study\.json cannot be read: .*"):
            read_study(tmp_path)

    def test_results_are_not_computed_again(self, tmp_path, monkeypatch):
        job, said, run = digits(), [], []
        wanted = trials(job, ranks=[1, 2], seeds=2)
        ended = [event(1, summary(10, 3.0, loss=0.4))]
        study = self.study(tmp_path / "s", job, *(result_of(trial, ended) for trial in wanted[:3]))
        monkeypatch.setattr(
            "horovod_train.plugins.study.run.run_trial",
            lambda study, trial, report: run.append(trial) or result_of(trial, ended),
        )
        run_trials(study, wanted, said.append)

        assert run == wanted[3:]
        assert said[:2] == ["3 of 4 trials have results already", "1 trial to train: 1 on 2 ranks"]
        assert len(read_study(tmp_path / "s").results) == 4

    def test_the_time_left_is_that_of_trials_on_as_many_ranks(self):
        one, two, *_ = trials(digits(), ranks=[1, 2], seeds=1)

        assert time_left_s([(one, 10.0), (two, 20.0)], [two, two, one]) == 50.0
        assert time_left_s([(one, 10.0)], [two]) == 10.0


class TestAdvice:
    def advice(self, tmp_path, job, num_ranks, *more, lost=0.02):
        adascale = digits("lr.scaling=adascale")
        results = [
            *by_seed("linear", 1, [0.98, 0.982], policy_digest=policy_digest(digits())),
            *by_seed("linear", 4, [0.979, 0.981], policy_digest=policy_digest(digits())),
            *by_seed("linear", 8, [0.98 - lost, 0.982 - lost], policy_digest=policy_digest(digits())),
            *by_seed("adascale", 8, [0.979, 0.981], policy_digest=policy_digest(adascale)),
        ]
        study = Study(tmp_path, "digits", fingerprint_of(digits()), "id", "2026-01-01 10:00")
        study.results = {each.trial: each for each in [*results, *more]}
        study.metric = ("accuracy", "max")
        study.save()
        return advice_for(job, num_ranks, tmp_path)

    @pytest.mark.parametrize("num_ranks", [1, 2, 4])
    def test_is_empty_where_nothing_was_lost(self, tmp_path, num_ranks):
        assert not self.advice(tmp_path, digits(), num_ranks)

    def test_names_the_loss_and_the_policy_that_holds(self, tmp_path):
        assert self.advice(tmp_path, digits(), 8) == (
            "a study of this job (2026-01-01 10:00 UTC) has found accuracy 96.1 % at a global batch of 256 "
            "with linear, and 98.1 % at 32: the mean accuracy of the seeds is worse than by chance; "
            "adascale has 98.0 % (--set lr.scaling=adascale)"
        )

    def test_names_the_price_of_the_policy_that_holds(self, tmp_path):
        digest = policy_digest(digits("lr.scaling=adascale"))
        longer = [
            replace(each, epochs=7.0) for each in by_seed("adascale", 8, [0.979, 0.981], policy_digest=digest)
        ]
        text = self.advice(tmp_path, digits(), 8, *longer)

        assert text.endswith("(--set lr.scaling=adascale, 3.5 times as many epochs)")

    def test_says_that_training_has_diverged(self, tmp_path):
        digest = policy_digest(digits())
        failed = [
            replace(result("linear", 16, seed, policy_digest=digest), error="the loss is nan", metrics={})
            for seed in (0, 1)
        ]
        assert self.advice(tmp_path, digits(), 16, *failed).endswith(
            "has failed at a global batch of 512 with linear, for 2 of 2 seeds: the loss is nan"
        )

    def test_does_not_compare_with_branches_of_the_critical_batch(self, tmp_path):
        branch = replace(result(accuracy=0.5), trial="critical-base", policy="critical batch")

        assert self.advice(tmp_path, digits(), 8, branch) == self.advice(tmp_path, digits(), 8)

    def test_names_the_largest_batch_that_was_examined(self, tmp_path):
        assert "has not examined a global batch of 512" in self.advice(tmp_path, digits(), 16)

    def test_is_empty_for_the_policy_that_holds(self, tmp_path):
        assert not self.advice(tmp_path, digits("lr.scaling=adascale"), 8)

    def test_says_that_a_policy_was_not_examined(self, tmp_path):
        assert self.advice(tmp_path, digits("lr.base_lr=0.5"), 8).endswith(
            "has not examined this learning rate and optimizer; it has examined adascale, linear"
        )
        assert not self.advice(tmp_path, digits("lr.base_lr=0.5"), 1)

    def test_says_that_a_larger_batch_loses_and_this_one_was_not_examined(self, tmp_path):
        assert self.advice(tmp_path, digits(), 6).endswith(
            "has not examined a global batch of 192; at 256, it is worse"
        )

    def test_is_empty_for_another_problem(self, tmp_path):
        assert not self.advice(tmp_path, digits("train.epochs=3", "lr.warmup=0"), 8)

    def test_counts_the_batch_and_not_the_ranks(self, tmp_path):
        assert self.advice(tmp_path, digits("train.batch_size_per_rank=128"), 2)
        assert not self.advice(tmp_path, digits("train.batch_size_per_rank=4"), 8)

    def test_of_a_damaged_study_says_so(self, tmp_path):
        (tmp_path / "study.json").write_text("{")

        assert "gives no advice" in advice_for(digits(), 8, tmp_path)

    @pytest.mark.parametrize("verb", [["plan"], ["run", "--dry-run"], ["submit", "--dry-run"]])
    def test_is_printed_before_a_launch(self, tmp_path, verb):
        self.advice(tmp_path / "digits" / "study", digits(), 8)
        command = [*verb, "digits", "-n", "8", "--set", f"run_dir={tmp_path}"]
        done = CliRunner().invoke(cli, command)

        assert done.stderr.count("warning: a study of this job") == 1
        assert "adascale" in done.stderr


def study_of(*rows):
    """A study of rows (policy, ranks, accuracies, losses)."""
    return table_of(
        [
            result(policy, ranks, seed, accuracy, loss)
            for policy, ranks, accuracies, losses in rows
            for seed, (accuracy, loss) in enumerate(zip(accuracies, losses, strict=True))
        ],
        ACCURACY,
    )


class TestEvidence:
    BASE = ("linear", 1, [0.852, 0.802, 0.758, 0.840, 0.846], [0.61, 0.68, 0.74, 0.62, 0.66])

    def test_finds_seeds_that_have_diverged(self):
        table = study_of(
            self.BASE, ("linear", 8, [0.756, 0.394, 0.840, 0.808, 0.652], [0.7, 4.55, 0.62, 0.7, 1.6])
        )

        assert table.is_safe(table.rows[1]) is False
        (sentence,) = verdicts(table)
        assert sentence.endswith("seed 1 has accuracy 39.4 %, far from those of 1 rank.")

    def test_finds_one_seed_of_three(self):
        losses = [0.06, 0.06, 0.06]
        table = study_of(("linear", 1, [0.98, 0.97, 0.98], losses), ("linear", 8, [0.97, 0.97, 0.13], losses))

        assert table.is_safe(table.rows[1]) is False

    def test_finds_a_loss_within_the_spread_of_the_metric(self):
        table = study_of(
            self.BASE,
            ("linear", 8, self.BASE[2], [loss + 0.5 + 0.02 * i for i, loss in enumerate(self.BASE[3])]),
        )

        assert table.is_safe(table.rows[1]) is False
        assert "loss" in table.reason(table.rows[1])

    @pytest.mark.parametrize(
        ("base", "row"),
        [
            ({0: 0.98, 1: 0.97, 2: 0.98}, {0: 0.1}),
            ({0: 0.98}, {0: 0.1, 1: 0.1}),
            ({0: 0.9, 1: 0.9}, {2: 0.1, 3: 0.1}),
        ],
    )
    def test_of_seeds_that_are_not_those_of_the_base_is_missing(self, base, row):
        results = [result(seed=seed, accuracy=each) for seed, each in base.items()]
        results += [result(ranks=8, seed=seed, accuracy=each) for seed, each in row.items()]
        table = table_of(results, ACCURACY)

        assert table.is_safe(table.rows[1]) is None
        (sentence,) = verdicts(table)
        assert "does not show if that is chance" in sentence

    @pytest.mark.parametrize(
        ("accuracies", "losses", "is_safe"),
        [
            ([0.0] * 3, [0.0] * 3, True),
            ([0.5] * 3, [0.0] * 3, True),
            ([0.0] * 3, [1e200, 0.1, 0.1], False),
            ([0.0] * 3, [math.inf, 0.1, 0.1], False),
            ([0.0] * 3, [math.inf, -math.inf, 0.1], False),
        ],
    )
    def test_of_odd_numbers(self, accuracies, losses, is_safe):
        table = study_of(("linear", 1, [0.0] * 3, [0.0] * 3), ("linear", 8, accuracies, losses))

        assert table.is_safe(table.rows[1]) is is_safe
        assert isinstance(list(verdicts(table)), list)

    def test_of_a_base_with_a_loss_that_is_not_finite_uses_its_other_seeds(self):
        table = study_of(
            ("linear", 1, [0.9] * 3, [1.0, 1.1, math.nan]), ("linear", 8, [0.9] * 3, [50.0, 50.0, 50.0])
        )

        assert table.is_safe(table.rows[1]) is False

    def test_finds_a_metric_that_is_not_finite(self):
        table = study_of(self.BASE, ("linear", 8, [*self.BASE[2][:4], math.nan], self.BASE[3]))

        assert table.is_safe(table.rows[1]) is False
        (sentence,) = verdicts(table)
        assert sentence == "8 ranks, linear: accuracy is missing or not finite for a seed."

    @pytest.mark.parametrize(("num_rows", "num_seeds"), [(1, 3), (3, 5), (9, 3)])
    def test_of_studies_without_a_difference_is_rare(self, num_rows, num_seeds):
        draw = np.random.default_rng(num_rows)

        def row(policy):
            return policy, 1, draw.normal(0.8, 0.01, num_seeds), draw.normal(0.6, 0.02, num_seeds)

        tables = [study_of(*(row(f"p{number}") for number in range(num_rows + 1))) for _ in range(200)]

        warned = sum(any(table.is_safe(each) is False for each in table.rows) for table in tables)
        assert warned <= 17, "5 % are 10; more than 17 happen once in 50 times"

    def test_of_a_loss_of_several_spreads_is_found(self):
        draw = np.random.default_rng(0)
        found = 0
        for _ in range(100):
            rows = [
                ("linear", ranks, draw.normal(0.8, 0.01, 5), draw.normal(0.6, 0.02, 5)) for ranks in (1, 2, 4)
            ]
            table = study_of(*rows, ("linear", 8, draw.normal(0.75, 0.01, 5), draw.normal(0.6, 0.02, 5)))
            found += table.is_safe(table.rows[-1]) is False
        assert found > 90

    @pytest.mark.parametrize(
        ("t", "dof", "expected"), [(6.3138, 1, 0.05), (4.3027, 2, 0.025), (-2.0, 3, 0.93)]
    )
    def test_uses_students_distribution(self, t, dof, expected):
        assert upper_tail(t, dof) == pytest.approx(expected, rel=1e-3)


class TestTheCriticalBatch:
    @staticmethod
    def quadratic_loss(batch, *, steps_at_8=512, rate=0.02, noise=1.0, dimension=50, distance=1.0):
        """Expected loss of SGD on |w|^2 / 2 with gradient noise, under linear scaling, in closed form.

        E|w|^2 follows v -> (1 - a)^2 v + a^2 S / b, with the rate a = rate b / 8.
        """
        a, covariance = rate * batch / 8, noise**2 * dimension
        decay = (1 - a) ** 2
        power = decay ** (steps_at_8 * 8 / batch)
        fixed = a**2 * covariance / batch / (1 - decay)
        return (power * distance**2 + fixed * (1 - power)) / 2

    @pytest.mark.parametrize("rate", [0.01, 0.02, 0.04])
    def test_of_a_noisy_quadratic_is_that_of_the_closed_form(self, rate):
        losses = {b: self.quadratic_loss(b, rate=rate) for b in (8, 16, 32, 64, 128, 256, 512)}
        fine = np.geomspace(8, 512, 20000)
        limit = 1.01 * losses[8]
        above = [b for b in fine if self.quadratic_loss(b, rate=rate) > limit]

        assert critical_batch(losses, 0.01) == pytest.approx(above[0], rel=0.25)

    def test_that_was_not_reached_is_unknown(self):
        assert critical_batch({8: 1.0, 16: 0.9, 32: 1.005}, 0.01) is None

    def test_is_of_the_means_over_seeds(self):
        branches = [
            {"epoch": 1, "seed": s, "batch": b, "loss": loss + 0.1 * s}
            for s in (-1, 1) for b, loss in ((8, 1.0), (16, 1.0), (32, 1.02))
        ]  # fmt: skip
        (losses,) = mean_losses(branches).values()
        assert critical_batch(losses, 0.01) == pytest.approx(8 * 2**1.5)
        assert max(losses) == 32
        text = str(list(critical_blocks(branches)))
        assert "'23'" in text

    @given(
        st.dictionaries(st.integers(1, 50), st.floats(8, 1000), min_size=2),
        st.floats(16, 2000),
    )
    def test_a_batch_warm_up_stays_below_it(self, critical, full):
        warmup = batch_warmup(critical, full)
        if warmup is None:
            return
        start, epochs = warmup
        for epoch, batch in critical.items():
            size = start + (full - start) * min(1.0, epoch / epochs)
            assert size <= batch * (1 + 1e-9) or batch >= full

    def test_branches_must_fit_in_the_training(self):
        for settings, message in (
            (["train.max_steps=10"], "train.max_steps may end the training"),
            (["train.epochs=1", "lr.warmup=0"], "the job has one epoch"),
        ):
            with pytest.raises(UserError, match=message):
                Branching((1,)).check(digits(*settings))
        with pytest.raises(UserError, match="--branch-length -1 must be"):
            Branching((1,), length_epochs=-1.0).check(digits())
        with pytest.raises(UserError, match="cannot begin after 14 epochs of 14"):
            Branching((14,)).check(digits())
        with pytest.raises(UserError, match="must be increasing and begin with 1"):
            Branching((1,), (2, 4)).check(digits())
        assert default_epochs(1) == ()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--multiples", "1,2"], "--multiples has no effect without --critical-batch"),
        (["--critical-batch", "--tune-lr"], "--tune-lr has no effect with --critical-batch"),
        (["--branch-length", "1.0"], "--branch-length has no effect without --critical-batch"),
        (["--critical-batch", "--ranks", "1,2"], "--ranks has no effect with --critical-batch"),
        (["--critical-batch", "--policies", "sqrt"], "--policies has no effect with --critical-batch"),
    ],
)
def test_options_of_the_other_measurement_are_refused(options, problem):
    done = CliRunner().invoke(cli, ["study", "digits", *options])

    assert done.exit_code == 2
    assert problem in done.output


@pytest.mark.parametrize("option", ["--ranks", "--multiples", "--branch-epochs"])
def test_numbers_that_are_none_are_refused(option):
    done = CliRunner().invoke(cli, ["study", "digits", option, "1,x"])

    assert done.exit_code == 2
    assert "'1,x' must be whole numbers of at least 1, as in 1,2,4" in done.output
