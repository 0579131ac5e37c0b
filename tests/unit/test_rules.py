"""Each alert fires when it should, and not when it should not: promtool's own engine says so."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from support.prometheus import needs_prometheus, promtool

from horovod_train.plugins.dashboards import rules_file
from horovod_train.plugins.dashboards.rules import RECORDINGS, alerts, anchor, document
from horovod_train.telemetry.catalog import CATALOG

pytestmark = needs_prometheus
RUNBOOK = Path(__file__).parents[2] / "docs" / "runbook.md"
JOB = 'training_job="digits", run="r1"'
MINUTE = 4  # a point each 15 s
ALERTS = {alert.name: alert for alert in alerts()}


def rank(number: int) -> str:
    return f'{JOB}, rank="{number}", local_rank="{number}", host="n{number}"'


def series(metric: str, labels: str, values: str) -> dict[str, str]:
    return {"series": f"horovod_train_{metric}{{{labels}}}", "values": values}


def own(number: int, per_step: float, steps: int = 15) -> list[dict[str, str]]:
    """A rank that makes a step a second, each with so much time of its own."""
    return [
        series("steps_total", rank(number), f"0+{steps}x200"),
        series("own_seconds_total", rank(number), f"0+{steps * per_step:g}x200"),
    ]


def phase(number: int, data: float) -> list[dict[str, str]]:
    """A rank that spends this part of its steps waiting for data."""
    return [
        series("step_phase_seconds_sum", f'{rank(number)}, phase="data"', f"0+{15 * data:g}x200"),
        series("step_phase_seconds_sum", f'{rank(number)}, phase="forward"', f"0+{15 - 15 * data:g}x200"),
        series("step_seconds_sum", rank(number), "0+15x200"),
    ]


def steady(metric: str, value: float, labels: str = rank(0)) -> dict[str, str]:
    return series(metric, labels, f"{value:g}x200")


@dataclass
class Case:
    """Series with which an alert fires, and series with which it does not.

    Attributes:
        fires: The first ones.
        quiet: The others, several cases of them.
        told_of: Values of these labels of the alerts that fire, one for each.
        at: When it is looked at.
    """

    fires: list[dict[str, str]]
    quiet: list[list[dict[str, str]]]
    told_of: list[dict[str, str]] = field(default_factory=list)
    at: str = "20m"


def missing(present: int, size: int = 3) -> list[dict[str, str]]:
    return [
        each
        for number in range(present)
        for each in (
            series("steps_total", rank(number), "0+1x200"),
            steady("world_size_present", size, rank(number)),
        )
    ]


def state(name: str) -> dict[str, str]:
    return steady("job_state", 1, f'{JOB}, state="{name}"')


STANDS_STILL = [series("steps_total", rank(number), "0+5x10 50x200") for number in range(2)]

THERE = steady("world_size_present", 1, f'{JOB}, there="x"')
"""Ranks of the job answer."""

OF_JOBS = {"HorovodTrainReplicasDiffer", "HorovodTrainJobFailed"}

CASES = {
    "HorovodTrainRankMissing": Case(
        missing(2),
        [
            missing(3),
            [*missing(2), state("stopping")],
            # All have ended: no series is left.
            [
                series("steps_total", rank(0), "0+1x20 _x200"),
                series("world_size_present", rank(0), "3x20 _x200"),
            ],
        ],
        [{"training_job": "digits"}],
    ),
    "HorovodTrainStraggler": Case(
        [*own(0, 0.02), *own(1, 0.02), *own(2, 0.025), *own(3, 0.05)],
        [
            [*own(0, 0.02), *own(1, 0.02), *own(2, 0.023), *own(3, 0.023)],
            own(0, 0.02),
            # For three minutes only.
            [
                *own(0, 0.02),
                *own(1, 0.02),
                series("steps_total", rank(2), "0+15x200"),
                series("own_seconds_total", rank(2), f"0+0.3x{12 * MINUTE} 15+0.9x{3 * MINUTE} 26+0.3x200"),
            ],
        ],
        [{"rank": "3", "host": "n3"}],
    ),
    "HorovodTrainNoProgress": Case(
        STANDS_STILL,
        [
            [series("steps_total", rank(0), "0+5x10 50x200"), series("steps_total", rank(1), "0+1x200")],
            [*STANDS_STILL, state("stopping")],
            [*STANDS_STILL, state("failed")],
            [series("steps_total", rank(0), "0+5x10 _x200")],
            # Begun twelve minutes ago, and the first step takes its time.
            [series("steps_total", rank(0), f"_x{8 * MINUTE} 0x200")],
            [*STANDS_STILL, series("evaluating", rank(0), f"0x{8 * MINUTE} 1x200")],
        ],
        [{"training_job": "digits"}],
    ),
    "HorovodTrainRankNotInCollective": Case(
        [steady("waiting_now_seconds", 0, rank(1)), series("waiting_now_seconds", rank(0), "0+15x200")],
        [
            [steady("waiting_now_seconds", 0, rank(1)), series("waiting_now_seconds", rank(0), "90x200")],
            [series("waiting_now_seconds", rank(number), "0+15x200") for number in range(2)],
        ],
        [{"rank": "1", "host": "n1"}],
    ),
    "HorovodTrainNonFiniteSteps": Case(
        [series("non_finite_steps_total", rank(0), f"0x{15 * MINUTE} 1x200")],
        [[steady("non_finite_steps_total", 3)]],
        [{"training_job": "digits"}],
    ),
    "HorovodTrainLossSpike": Case(
        [series("loss", rank(0), f"1x{16 * MINUTE} 2.5x200")],
        [
            [series("loss", rank(0), f"1x{16 * MINUTE} 1.9x200")],
            [series("loss", rank(0), "10-0.1x200")],
            # Of a model that has learned everything.
            [series("loss", rank(0), f"2x8 0.001x{15 * MINUTE} 0.0025x200")],
            # Losses below zero have no "twice".
            [series("loss", rank(0), f"-1x{16 * MINUTE} -0.4x200")],
        ],
        [{"training_job": "digits"}],
    ),
    "HorovodTrainCheckpointTooOld": Case(
        [steady("checkpoint_age_seconds", 3700)],
        [[steady("checkpoint_age_seconds", 3500)]],
        [{"training_job": "digits"}],
    ),
    "HorovodTrainCheckpointsFail": Case(
        [series("checkpoint_failures_total", rank(0), f"0x{10 * MINUTE} 1x200")],
        [[steady("checkpoint_failures_total", 0)]],
        [{"training_job": "digits"}],
    ),
    "HorovodTrainDataBound": Case(
        [*phase(0, 0.5), *phase(1, 0.1)],
        [[*phase(0, 0.2), *phase(1, 0.1)]],
        [{"training_job": "digits"}],
    ),
    "HorovodTrainWorldTooSmall": Case(
        [steady("world_size_present", 2), steady("world_size_desired", 3)],
        [[steady("world_size_present", 3), steady("world_size_desired", 3)]],
        [{"training_job": "digits"}],
    ),
    "HorovodTrainGpuThrottled": Case(
        [steady("gpu_throttled", 1, f'{rank(0)}, reason="thermal_software"')],
        [
            [steady("gpu_throttled", 0, f'{rank(0)}, reason="thermal_software"')],
            [steady("gpu_throttled", 1, f'{rank(0)}, reason="power_cap"')],
        ],
        [{"rank": "0", "host": "n0"}],
    ),
    "HorovodTrainGpuMemoryErrors": Case(
        [series("gpu_ecc_errors_total", f'{rank(1)}, kind="uncorrected"', f"0x{10 * MINUTE} 2x200")],
        [[series("gpu_ecc_errors_total", f'{rank(1)}, kind="corrected"', f"0x{10 * MINUTE} 2x200")]],
        [{"rank": "1"}],
    ),
    "HorovodTrainReplicasDiffer": Case(
        [steady("job_failed", 1, f'{JOB}, cause="replicas_differ"')],
        [[steady("job_failed", 1, f'{JOB}, cause="task"')]],
        [{"training_job": "digits"}],
    ),
    "HorovodTrainJobFailed": Case(
        [
            steady("job_failed", 1, f'{JOB}, cause="lost"'),
            steady("job_ended_timestamp_seconds", 600, JOB),
        ],
        [
            [
                steady("job_failed", 1, f'{JOB}, cause="lost"'),
                steady("job_ended_timestamp_seconds", 1200 - 3601, JOB),
            ],
            [steady("job_ended_timestamp_seconds", 600, JOB), state("succeeded")],
            [steady("job_ended_timestamp_seconds", 600, JOB), state("cancelled")],
        ],
        [{"cause": "lost"}],
    ),
    "HorovodTrainGraceTooShort": Case(
        [steady("grace_needed_seconds", 45), steady("grace_granted_seconds", 30)],
        [[steady("grace_needed_seconds", 25), steady("grace_granted_seconds", 30)]],
        [{"training_job": "digits"}],
    ),
}


def unit_test(given: list[dict[str, str]], expected: list[dict[str, object]]) -> dict[str, object]:
    return {"interval": "15s", "input_series": given, "promql_expr_test": expected}


def firing(name: str, at: str, labels: tuple[str, ...], found: list[dict[str, str]]) -> dict[str, object]:
    """What a query for the alerts that fire is to give."""
    samples = []
    for each in found:
        text = ", ".join(f'{label}="{value}"' for label, value in sorted(each.items()))
        samples.append({"labels": f"{{{text}}}", "value": 1})
    expr = f'max by ({", ".join(labels)}) (ALERTS{{alertname="{name}", alertstate="firing"}})'
    return {"expr": expr, "eval_time": at, "exp_samples": samples}


def test_every_alert_has_a_case():
    assert CASES.keys() == ALERTS.keys()


@pytest.mark.parametrize("name", CASES)
def test_an_alert_fires_for_whom_it_should_and_is_quiet_otherwise(tmp_path, name):
    case = CASES[name]
    there = [] if name in OF_JOBS else [THERE]
    labels = tuple(case.told_of[0])
    tests = [unit_test([*case.fires, *there], [firing(name, case.at, labels, case.told_of)])]
    tests += [unit_test([*quiet, *there], [firing(name, case.at, labels, [])]) for quiet in case.quiet]
    if there:
        # Neither is it of what ranks have left behind, nor of a job whose ranks are all gone.
        left = [*case.fires, *there, steady("rank_ended_timestamp_seconds", 60)]
        one_is_there = [*left, steady("rank_ended_timestamp_seconds", 0, rank(1))]
        tests.append(unit_test(left, [firing(name, case.at, labels, [])]))
        tests.append(unit_test(one_is_there, [firing(name, case.at, labels, case.told_of)]))
        if not any("world_size_present" in each["series"] for each in case.fires):
            tests.append(unit_test(case.fires, [firing(name, case.at, labels, [])]))
    # When it is over, it clears: the series end.
    over = [{**each, "values": f"{each['values']} _x400"} for each in case.fires]
    tests.append(unit_test(over, [firing(name, "100m", labels, [])]))
    judge(tmp_path, tests)


def judge(folder, tests, rules=None):
    """Let promtool say whether rules do what tests want."""
    (folder / "rules.yaml").write_text(rules or rules_file())
    document = {"rule_files": ["rules.yaml"], "evaluation_interval": "15s", "tests": tests}
    (folder / "tests.yaml").write_text(yaml.safe_dump(document))
    promtool("test", "rules", str(folder / "tests.yaml"))


def test_an_alert_says_who_and_by_how_much(tmp_path):
    who = {"training_job": "digits", "run": "r1", "rank": "3", "local_rank": "3", "host": "n3"}
    summary = "digits: rank 3 on n3 needs 2.5 times as long for its own part of a step as the median rank"
    told = {"summary": summary, "runbook_url": "https://wiki.example/runbook#horovodtrainstraggler"}
    fires = {"exp_labels": {"severity": "warning", **who}, "exp_annotations": told}
    test = {
        "interval": "15s",
        "input_series": [*own(0, 0.02), *own(1, 0.02), *own(2, 0.02), *own(3, 0.05), THERE],
        "alert_rule_test": [
            {"eval_time": "20m", "alertname": "HorovodTrainStraggler", "exp_alerts": [fires]}
        ],
    }

    judge(tmp_path, [test], rules_file("https://wiki.example/runbook"))


def test_of_four_ranks_two_that_are_slow_are_both_named(tmp_path):
    given = [*own(0, 0.02), *own(1, 0.02), *own(2, 0.05), *own(3, 0.05), THERE]
    expected = firing("HorovodTrainStraggler", "20m", ("rank",), [{"rank": "2"}, {"rank": "3"}])

    judge(tmp_path, [unit_test(given, [expected])])


def test_promtool_is_content_with_the_rules(tmp_path):
    (tmp_path / "rules.yaml").write_text(rules_file())

    told = promtool("check", "rules", str(tmp_path / "rules.yaml")).stdout

    assert f"{len(RECORDINGS) + len(ALERTS)} rules found" in told


def test_the_age_of_a_checkpoint_can_be_chosen():
    (_, alerting) = document(checkpoint_age_s=7200)["groups"]
    (rule,) = (each for each in alerting["rules"] if each["alert"] == "HorovodTrainCheckpointTooOld")

    assert "checkpoint_age_seconds) > 7200)" in rule["expr"]


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_has_its_section_of_the_runbook(name):
    titles = re.findall(r"^## (.+)$", RUNBOOK.read_text(), re.MULTILINE)

    assert titles.count(name) == 1
    assert anchor(ALERTS[name]) == name.lower(), "as Markdown makes addresses of titles"


def test_the_runbook_has_no_section_of_an_alert_that_is_gone():
    titles = re.findall(r"^## (HorovodTrain\w+)$", RUNBOOK.read_text(), re.MULTILINE)

    assert titles == list(ALERTS)


def test_rules_ask_for_metrics_that_exist():
    known = {metric.name for metric in CATALOG} | {recording.name for recording in RECORDINGS}
    text = rules_file()
    asked = set(re.findall(r"horovod_train[_:][a-z_:]*[a-z]", text))
    from horovod_train.monitor.runs import JOB_CATALOG

    known |= {metric.name for metric in JOB_CATALOG}
    suffixes = {f"{metric.name}{end}" for metric in CATALOG for end in ("_sum", "_count", "_bucket")}
    groups = {"horovod_train_recordings", "horovod_train_alerts"}
    assert asked - known - suffixes - groups == set()
