"""The search of base rates in a study: which trials it makes, and with which rates the table is trained."""

from __future__ import annotations

import json
import math

import pytest

from horovod_train.config.load import job_file, load_job
from horovod_train.errors import UserError
from horovod_train.plugins.report.document import as_html
from horovod_train.plugins.study.results import (
    Study,
    fingerprint_of,
    policies_of,
    read_study,
    result_of,
    trials_of,
)
from horovod_train.plugins.study.run import TUNING, Tuning, report_of_study, search
from horovod_train.plugins.study.table import Metric, price_text, settings_text, table_of
from tests.unit.test_study import event, summary


class Trainings:
    """Trains nothing: the accuracy of a trial falls with the distance from the best rate of its ranks."""

    def __init__(self, folder, monkeypatch, best, diverges_at=math.inf):
        self.job = load_job(job_file("digits"), (), environ={})
        self.study = read_study(folder) or Study(
            folder, "digits", fingerprint_of(self.job), "id", "2026-01-01"
        )
        self.best, self.diverges_at, self.trained, self.said = best, diverges_at, [], []
        monkeypatch.setattr("horovod_train.plugins.study.run.run_trial", self.run)

    def run(self, study, trial, report):
        self.trained.append(trial)
        rate = trial.job.lr.base_lr
        if rate >= self.diverges_at:
            return result_of(trial, [], "the loss is nan")
        accuracy = 1 - 0.1 * abs(math.log2(rate / self.best[trial.num_ranks]))
        return result_of(trial, [event(1, summary(10, 3.0, accuracy=accuracy, loss=1.0))])

    def trials(self, ranks=(1, 2), names=("linear",), seeds=2):
        tuning = Tuning(self.study, self.job, seeds, self.study.folder, 64, None, self.said.append)
        policies = policies_of(self.job, names)
        plain = trials_of(self.job, policies, ranks, seeds, folder=self.study.folder, num_cores=64)
        return tuning.tuned(plain, policies)


BASE = 0.015  # of the job


def test_each_row_has_its_best_rate(tmp_path, monkeypatch):
    made = Trainings(tmp_path, monkeypatch, {1: 4 * BASE, 2: BASE / 2})
    found = made.trials()

    rates = [(trial.num_ranks, trial.seed, trial.job.lr.base_lr) for trial in found]
    assert rates == [(1, 0, 4 * BASE), (1, 1, 4 * BASE), (2, 0, BASE / 2), (2, 1, BASE / 2)]
    assert {trial.policy for trial in found} == {"tuned linear"}
    assert "linear, 1 rank: the best base rate is 0.06" in made.said


def test_the_search_has_a_seed_of_its_own_and_is_not_in_the_table(tmp_path, monkeypatch):
    made = Trainings(tmp_path, monkeypatch, {1: BASE, 2: BASE})
    made.trials(seeds=3)

    assert {trial.seed for trial in made.trained} == {2**31}
    assert made.study.trials == []
    assert {each.policy for each in made.study.results.values()} == {TUNING}


def test_the_search_goes_on_where_it_was_interrupted(tmp_path, monkeypatch):
    first = Trainings(tmp_path, monkeypatch, {1: 4 * BASE, 2: BASE})
    expected = first.trials()
    again = Trainings(tmp_path, monkeypatch, {})

    assert [trial.job for trial in again.trials(seeds=5)][:2] == [trial.job for trial in expected][:2]
    assert again.trained == []


def test_a_rate_that_failed_is_tried_again(tmp_path, monkeypatch):
    Trainings(tmp_path, monkeypatch, {1: 4 * BASE}, diverges_at=2 * BASE).trials(ranks=[1])
    again = Trainings(tmp_path, monkeypatch, {1: 4 * BASE})
    again.trials(ranks=[1])

    assert [trial.job.lr.base_lr for trial in again.trained] == [2 * BASE, 4 * BASE, 8 * BASE]


def test_policies_that_are_equal_at_the_reference_batch_are_searched_once(tmp_path, monkeypatch):
    made = Trainings(tmp_path, monkeypatch, {1: BASE, 2: BASE})
    found = made.trials(names=["linear", "sqrt"])

    rows = {(trial.policy, trial.num_ranks) for trial in found}
    assert rows == {("tuned linear", 1), ("tuned linear", 2), ("tuned sqrt", 2)}
    assert len(made.trained) == 3 * len(rows)


def test_the_search_begins_at_the_rate_of_the_policy(tmp_path, monkeypatch):
    file = tmp_path / "a-policy-with-a-name-that-is-longer-than-most.yaml"
    file.write_text("lr: {base_lr: 0.4}")
    made = Trainings(tmp_path / "s", monkeypatch, {1: 0.8})
    made.study.folder.mkdir()

    assert made.trials(ranks=[1], names=[str(file)])[0].job.lr.base_lr == 0.8
    assert len({trial.name for trial in made.trained}) == 4


def test_rates_that_diverge_are_not_the_best(tmp_path, monkeypatch):
    made = Trainings(tmp_path, monkeypatch, {1: 4 * BASE}, diverges_at=2 * BASE)

    assert made.trials(ranks=[1])[0].job.lr.base_lr == BASE
    assert "linear, 1 rank: base rate 0.03: the loss is nan" in made.said


def test_without_a_rate_that_trains_the_study_ends(tmp_path, monkeypatch):
    made = Trainings(tmp_path, monkeypatch, {1: BASE}, diverges_at=0.0)

    with pytest.raises(UserError, match=r"no base rate from 0\.0002344 to 0\.03 trains"):
        made.trials(ranks=[1])


@pytest.mark.parametrize("best", [-9, -6, -3, -1, 0, 1, 2, 6, 9])
def test_the_grid_is_continued_at_its_end(best):
    tried = []

    def value_at(doublings):
        tried.append(doublings)
        return abs(doublings - best)

    assert search(value_at) == min(max(best, -6), 6)
    assert len(tried) == len(set(tried)) <= 9


def test_of_equal_rates_the_nearest_is_taken():
    assert search(lambda _: 0.5) == 0


def test_the_report_says_how_rates_were_found(tmp_path, monkeypatch):
    made = Trainings(tmp_path, monkeypatch, {1: BASE, 2: 2 * BASE})
    for trial in made.trials():
        made.study.results[trial.name] = made.run(made.study, trial, print)
    table = table_of(made.study.trials, Metric("accuracy", "max"))
    text = as_html(report_of_study(made.study, table))

    assert "the base rate of each row was searched with a seed outside of the table" in text
    assert json.dumps("is_log") in text
    assert settings_text(table.rows[1]) == "--set lr.scaling=linear --set lr.base_lr=0.03"
    assert price_text(table.rows[1], table.rows[0]) == ""
