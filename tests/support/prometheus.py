"""The real Prometheus, and promtool, as Debian packages them (`make servers`)."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.launching import free_port

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is missing: run `make servers`"
)
STARTS_S = 30.0


class Prometheus:
    """A Prometheus that runs."""

    def __init__(self, port: int) -> None:
        self.address = f"http://127.0.0.1:{port}"

    def get(self, path: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.address}{path}?{query}", timeout=10) as answer:  # noqa: S310
            return json.loads(answer.read())["data"]

    def check_ready(self) -> None:
        """Raise `OSError` as long as it cannot be asked."""
        with urllib.request.urlopen(f"{self.address}/-/ready", timeout=10):  # noqa: S310
            pass

    def query(self, expr: str) -> list[dict[str, Any]]:
        """Evaluate a query now; an error of Prometheus is an error here, with its words."""
        try:
            found: list[dict[str, Any]] = self.get("/api/v1/query", query=expr)["result"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{expr}\n{error.read().decode()}") from error
        return found

    def value(self, expr: str) -> float:
        (found,) = self.query(expr)
        return float(found["value"][1])

    def targets(self) -> list[tuple[str, str]]:
        """Address and health of each target."""
        found = self.get("/api/v1/targets")["activeTargets"]
        return [(each["discoveredLabels"]["__address__"], each["health"]) for each in found]

    def alerts(self) -> set[str]:
        """Names of the alerts that are pending or fire."""
        return {each["labels"]["alertname"] for each in self.get("/api/v1/alerts")["alerts"]}

    def have_fired(self) -> set[str]:
        """Names of the alerts that have fired at any time."""
        found = self.query('max_over_time(ALERTS{alertstate="firing"}[1d])')
        return {each["metric"]["alertname"] for each in found}


@contextmanager
def prometheus(folder: Path, scrape_configs: list[Any], rules: str = "") -> Iterator[Prometheus]:
    """Run Prometheus on a configuration; nothing of it is left afterwards but the folder."""
    folder.mkdir(exist_ok=True)
    port = free_port()
    (folder / "rules.yaml").write_text(rules)
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "scrape_configs": scrape_configs,
        "rule_files": [str(folder / "rules.yaml")] if rules else [],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            ["prometheus", f"--config.file={folder / 'prometheus.yaml'}",
             f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}",
             "--log.level=warn"],
            stdout=log, stderr=log,
        )  # fmt: skip
    try:
        server = Prometheus(port)
        deadline = time.monotonic() + STARTS_S
        while True:
            assert process.poll() is None, (folder / "log").read_text()
            try:
                server.check_ready()
                break
            except OSError:  # nobody listens yet, or it answers 503 for its data is being opened
                assert time.monotonic() < deadline, (folder / "log").read_text()
                time.sleep(0.1)
        yield server
    finally:
        process.terminate()
        process.wait(20)


def promtool(*arguments: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run promtool; it has to be content."""
    done = subprocess.run(
        ["promtool", *arguments], input=given, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done
