"""Generate the files in shipped/. Usage: ``python -m horovod_train.monitor.grafana.generate``."""

from __future__ import annotations

from pathlib import Path

from horovod_train.monitor.grafana import fleet_page, hosts_page, job_page, ranks_page
from horovod_train.monitor.grafana.panels import rendered
from horovod_train.monitor.rules import as_yaml, document

PAGES = (job_page.PAGE, ranks_page.PAGE, hosts_page.PAGE, fleet_page.PAGE)
FOLDER = Path(__file__).parent / "shipped"


def generated() -> dict[str, str]:
    """Return the contents of the files by name."""
    dashboards = {f"{page.uid}.json": rendered(page) for page in PAGES}
    return {**dashboards, "horovod-train-rules.yaml": as_yaml(document())}


if __name__ == "__main__":
    for name, text in generated().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
