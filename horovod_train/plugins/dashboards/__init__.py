"""Grafana dashboards and the rule file for Prometheus.

    dashboards    the dashboards in this package
    rules_file    the rule file for Prometheus

``python -m horovod_train.plugins.dashboards.generate`` writes the files in ``shipped``.
"""

from __future__ import annotations

from importlib.resources import files

from horovod_train.plugins.dashboards import rules

RULES = "horovod-train-rules.yaml"


def dashboards() -> dict[str, str]:
    """Return the dashboards in Grafana's import format, by file name."""
    folder = files("horovod_train.plugins.dashboards") / "shipped"
    found = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".json"))
    return {name: (folder / name).read_text(encoding="utf-8") for name in found}


def rules_file(runbook: str = rules.RUNBOOK, checkpoint_age_s: float = rules.CHECKPOINT_AGE_S) -> str:
    """Return the text of a Prometheus rule file whose alerts link to sections of a runbook."""
    return rules.as_yaml(rules.document(runbook, checkpoint_age_s))
