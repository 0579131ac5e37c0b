"""`horovod-train doctor --kubernetes` against an API server in this process."""

from __future__ import annotations

import json
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from support.api import served
from support.launching import BIN, environment, write_job
from support.mpijobs import described

from horovod_train.config.schema import Job
from horovod_train.launch.submit import resolve
from horovod_train.plugins.kubernetes.cluster import _namespace_of_context, _time_of
from horovod_train.plugins.kubernetes.doctor import NEEDED, examine_cluster, examine_pods

WISHES = {
    "launch": {
        "num_ranks": 16,
        "secrets": {"A": "kubernetes:tracking/key"},
        "kubernetes": {
            "ranks_per_worker": 8,
            "gpus_per_rank": 1,
            "pod_monitor": True,
            "queue": "team-a",
            "image_pull_secrets": ["registry"],
        },
    }
}
CLAIM = ("persistentvolumeclaims", "training")


@pytest.fixture
def api(tmp_path, monkeypatch):
    with served(tmp_path, monkeypatch) as api:
        furnish(api)
        yield api


def furnish(api):
    """Let there be what the job wishes for."""
    api.objects[CLAIM] = claim("ReadWriteMany")
    api.objects["secrets", "tracking"] = {"metadata": {"name": "tracking"}, "data": {"key": "eA=="}}
    api.objects["secrets", "registry"] = {"metadata": {"name": "r"}, "data": {".dockerconfigjson": ""}}
    api.objects["localqueues", "team-a"] = {"metadata": {"name": "team-a"}}
    for number in range(2):
        status = {"allocatable": {"nvidia.com/gpu": "8"}}
        api.objects["nodes", f"node-{number}"] = {"metadata": {"name": f"node-{number}"}, "status": status}


def claim(mode):
    return {"metadata": {"name": "training"}, "spec": {"accessModes": [mode]}, "status": {"phase": "Bound"}}


def examined(**changes):
    job = resolve(Job.model_validate(described("cpu", **{**WISHES, **changes}))).job
    return {finding.what: finding for finding in examine_cluster(job, job.launch.kubernetes)}


def test_workers_that_ask_for_nothing_are_told_to(api):
    del api  # what the cluster has does not matter
    job = described("cpu")
    del job["launch"]["kubernetes"]["cpus_per_rank"], job["launch"]["kubernetes"]["memory_per_rank"]
    job = resolve(Job.model_validate(job)).job

    found = {finding.what: finding for finding in examine_cluster(job, job.launch.kubernetes)}

    assert found["requests"].level == "warn"
    assert "cpus_per_rank" in found["requests"].fix


def test_a_cluster_that_has_everything(api):
    found = examined()

    assert {finding.level for finding in found.values()} == {"ok"}, list(map(str, found.values()))
    assert found["api server"].found == "v1.37.1"
    assert found["gpus"].found == "nodes have 16 nvidia.com/gpu, room for 2 workers with 8"
    assert any("/apis/kueue.x-k8s.io/v1beta2/" in request for request in api.requests)
    assert found.keys() >= {"mpi operator", "permissions", "claim", "secret", "queue", "pod monitor"}


def test_without_a_job_it_looks_where_kubectl_would(tmp_path, api, monkeypatch):
    def looked_in(**kubernetes):
        launch = {"kubernetes": kubernetes}
        settings = Job.model_validate({"name": "j", "task": "digits", "launch": launch}).launch.kubernetes
        found = {finding.what: finding for finding in examine_cluster(None, settings)}
        warnings.append(found["namespace"].fix if "namespace" in found else "")
        return found["permissions"].found.rpartition(" in ")[2]

    warnings = []
    config = tmp_path / "config"
    assert looked_in() == "default"
    document = yaml.safe_load(config.read_text())
    document["contexts"][0]["context"]["namespace"] = "team"
    config.write_text(yaml.safe_dump(document))
    assert looked_in() == "team"
    assert looked_in(namespace="mine") == "mine"
    assert warnings == ["", "set launch.kubernetes.namespace: team in jobs", ""], "jobs go to default"

    from kubernetes import config as configuration  # reads KUBECONFIG when it is imported

    monkeypatch.setattr("horovod_train.plugins.kubernetes.cluster.OF_THIS_POD", tmp_path / "namespace")
    config.write_text("")
    assert _namespace_of_context(configuration) == "default"
    (tmp_path / "namespace").write_text("of-the-pod\n")
    assert _namespace_of_context(configuration) == "of-the-pod"


@pytest.mark.parametrize(
    ("change", "what", "level", "says"),
    [
        (lambda api: api.unknown.add("kubeflow.org"), "mpi operator", "fail", "is not known"),
        (lambda api: api.unknown.add("monitoring.coreos.com"), "pod monitor", "fail", "is not known"),
        (lambda api: api.forbidden.add("create mpijobs"), "permissions", "fail", "may not create mpijobs"),
        (lambda api: api.forbidden.add("get pods/log"), "permissions", "fail", "may not get pods/log"),
        (lambda api: api.objects.pop(CLAIM), "claim", "fail", "no training"),
        (lambda api: api.objects.update({CLAIM: claim("ReadWriteOnce")}), "claim", "warn", "ReadWriteOnce"),
        (lambda api: api.objects["secrets", "tracking"]["data"].clear(), "secret", "fail", "has no key"),
        (lambda api: api.forbidden.add("get secrets"), "secret", "warn", "secrets is forbidden"),
        (lambda api: api.objects.pop(("localqueues", "team-a")), "queue", "fail", "there is no team-a"),
        (lambda api: api.unknown.add("kueue.x-k8s.io"), "queue", "fail", "Kueue is not installed"),
        (lambda api: api.objects.pop(("nodes", "node-1")), "gpus", "warn", "room for 1 workers"),
        (lambda api: api.forbidden.add("list nodes"), "gpus", "warn", "nodes is forbidden"),
    ],
)
def test_what_is_missing_is_named_with_what_to_do(api, change, what, level, says):
    change(api)

    finding = examined()[what]

    assert (finding.level, bool(finding.fix)) == (level, True)
    assert says in finding.found


def test_a_server_that_is_not_there(tmp_path, api, monkeypatch):
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))

    found = examined()

    assert found["api server"].level == "fail"
    assert "no Kubernetes cluster is configured" in found["api server"].found


def examines(api, job):
    """What the pods would do: the launcher's command, here."""
    command = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]["command"]
    assert command[2:4] == ["horovod-train", "doctor"]
    here = [str(BIN / "horovod-train"), "doctor", "--json", "--no-sweep"]
    done = subprocess.run(here, env=environment(), capture_output=True, text=True, check=False)
    api.add_condition(job, "Created")
    api.add_condition(job, "Succeeded")
    api.add_launcher(job, "Warning: a line before\n" + done.stdout, 0)


def pods(**changes):
    return examine_pods(resolve(Job.model_validate(described("cpu", **changes)), "run-1"), print)


def test_pods_examine_themselves_and_are_removed(api):
    api.operator = examines

    findings, _ = pods()

    assert {"python", "engine"} <= {finding.what for finding in findings}
    assert api.objects["mpijobs", "digits-doctor"]["metadata"]["deletionTimestamp"]


def test_pods_that_say_nothing_are_a_failure(api):
    def ends(api, job):
        api.add_condition(job, "Failed", "back-off")
        api.add_launcher(job, "error: node is on fire", 1)

    api.operator = ends

    (finding,), _ = pods()

    assert finding.level == "fail"
    assert "node is on fire" in finding.found


def test_what_the_server_refuses_is_a_finding(api):
    api.refuses = {"MPIJob": (422, "spec: Invalid value")}

    (finding,), _ = pods()

    assert "spec: Invalid value" in finding.found


def test_the_command_line_ends_with_1_and_json(tmp_path, api):
    api.unknown.add("kubeflow.org")
    path = write_job(tmp_path / "job.yaml", **described("cpu"))

    done = subprocess.run(
        [str(BIN / "horovod-train"), "doctor", "--kubernetes", "--json", str(path)],
        env=environment(KUBECONFIG=str(tmp_path / "config")),
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 1
    assert [f["level"] for f in json.loads(done.stdout)["findings"] if f["what"] == "mpi operator"] == [
        "fail"
    ]


def test_the_documented_role_is_what_the_doctor_asks_for():
    page = (Path(__file__).parents[2] / "docs" / "kubernetes.md").read_text()
    blocks = [
        yaml.safe_load(text) for text in re.findall(r"```yaml\n(apiVersion: rbac.*?)```", page, re.DOTALL)
    ]
    (rules,) = [role["rules"] for role in blocks]
    allowed = {
        (verb, group, resource)
        for rule in rules
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }

    assert allowed == {*NEEDED, ("create", "networking.k8s.io", "networkpolicies")}


@pytest.mark.parametrize("given", ["last_timestamp", "event_time", "creation_timestamp"])
def test_the_time_of_an_event_is_the_latest_that_it_says(given):
    """Events of newer kinds have an event_time only, and some have nothing but their creation."""
    order = ["last_timestamp", "event_time", "creation_timestamp"]
    times = {name: datetime(2026, 1, 9 - place, tzinfo=UTC) for place, name in enumerate(order)}
    known = {name: times[name] if order.index(name) >= order.index(given) else None for name in order}
    metadata = SimpleNamespace(creation_timestamp=known.pop("creation_timestamp"))

    assert _time_of(SimpleNamespace(metadata=metadata, **known)) == times[given]
