"""The files that ship with this package: Grafana's dashboards, and rules for Prometheus."""

from __future__ import annotations

from importlib.resources import files

from horovod_train.monitor import rules

RULES = "horovod-train-rules.yaml"


def dashboards() -> dict[str, str]:
    """Return the dashboards as Grafana imports them, by the names of their files."""
    folder = files("horovod_train.monitor.grafana") / "shipped"
    found = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".json"))
    return {name: (folder / name).read_text(encoding="utf-8") for name in found}


def rules_file(runbook: str = rules.RUNBOOK, checkpoint_age_s: float = rules.CHECKPOINT_AGE_S) -> str:
    """Return the rules as Prometheus reads them; each alert links to its section of a runbook."""
    return rules.as_yaml(rules.document(runbook, checkpoint_age_s))
