"""docker/compose.monitoring.yaml: nothing runs it here, so that what can be checked without Docker is."""

from __future__ import annotations

import re
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from support.prometheus import needs_prometheus, promtool

from horovod_train.config.load import job_file, load_job
from horovod_train.plugins.dashboards import dashboards

DOCKER = Path(__file__).parents[2] / "docker"
SERVICES = yaml.safe_load((DOCKER / "compose.monitoring.yaml").read_text())["services"]
BASE = yaml.safe_load((DOCKER / "compose.yaml").read_text())


@pytest.mark.parametrize("name", SERVICES)
def test_what_is_mounted_is_there(name):
    for volume in SERVICES[name].get("volumes", []):
        source, target, mode = volume.split(":")
        assert mode == "ro"
        assert target.startswith("/")
        assert source in BASE["volumes"] or (DOCKER / source).exists()


@pytest.mark.parametrize("name", [name for name in SERVICES if "image" in SERVICES[name]])
def test_images_are_pinned_have_no_rights_and_are_reached_from_here_only(name):
    service = SERVICES[name]

    assert re.fullmatch(r"[\w/]+:(v?\d+\.\d+\.\d+|cpu)", service["image"])
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


def test_the_job_is_one_that_can_be_trained():
    command = SERVICES["train"]["command"]
    settings = [after for before, after in pairwise(command) if before == "--set"]
    job = load_job(job_file("digits"), settings, {})

    assert job.metrics.host == "0.0.0.0"  # noqa: S104  (it is what Prometheus' container needs)
    assert command[: command.index("digits")] == ["launcher", "horovod-train", "run"]
    assert set(BASE["services"]["train"]["depends_on"]) == {"worker-0", "worker-1"}


def test_grafana_finds_the_dashboards_and_the_datasource():
    (provider,) = yaml.safe_load((DOCKER / "monitoring" / "dashboards.yaml").read_text())["providers"]
    (source,) = yaml.safe_load((DOCKER / "monitoring" / "datasource.yaml").read_text())["datasources"]
    folders = [volume for volume in SERVICES["grafana"]["volumes"] if provider["options"]["path"] in volume]

    (folder,) = (DOCKER / volume.partition(":")[0] for volume in folders)
    assert {path.name for path in folder.glob("*.json")} == dashboards().keys()
    assert source["type"] == "prometheus"


@needs_prometheus
def test_prometheus_is_content_with_its_configuration(tmp_path):
    shutil.copy(DOCKER / "monitoring" / "prometheus.yaml", tmp_path / "prometheus.yml")
    for volume in SERVICES["prometheus"]["volumes"]:
        source, target, _ = volume.split(":")
        shutil.copy(DOCKER / source, tmp_path / Path(target).name)

    promtool("check", "config", str(tmp_path / "prometheus.yml"))
