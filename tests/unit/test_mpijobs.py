"""MPIJobs: rendered as written down, valid for Kubernetes, and refused when they would not run."""

from __future__ import annotations

import copy
import json
import math
import re

import kubernetes_validate
import pytest
import yaml
from support.mpijobs import FOLDER, JOBS, described, manifests, text

from horovod_train.config.load import load_job
from horovod_train.config.schema import Job
from horovod_train.errors import ConfigError
from horovod_train.plugins.kubernetes.cluster import amount, check, silent_problems
from horovod_train.plugins.kubernetes.render import inner_job, merge, times

KUBERNETES = "1.32"


@pytest.fixture(params=JOBS)
def name(request):
    return request.param


def kind(documents, wanted):
    (found,) = [document for document in documents if document["kind"] == wanted]
    return found


def pods(job):
    for role, replica in kind(manifests(job), "MPIJob")["spec"]["mpiReplicaSpecs"].items():
        yield role, replica["template"]


class TestRendering:
    def test_is_as_it_was(self, name):
        """`python tests/support/mpijobs.py` writes the files anew."""
        assert text(name) == (FOLDER / f"{name}.yaml").read_text()

    def test_is_valid_for_the_operators_schema_and_rules(self, name):
        check(kind(manifests(name), "MPIJob"))

    def test_is_valid_for_kubernetes(self, name):
        for document in manifests(name):
            if document["kind"] in ("ConfigMap", "NetworkPolicy"):
                kubernetes_validate.validate(document, KUBERNETES, strict=True)
        for role, template in pods(name):
            metadata = {"name": role.lower(), **template["metadata"]}
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
            kubernetes_validate.validate(pod, KUBERNETES, strict=True)

    def test_gives_no_more_rights_than_needed(self, name):
        for role, template in pods(name):
            spec = template["spec"]
            assert spec["automountServiceAccountToken"] is False
            assert spec["securityContext"]["runAsNonRoot"] is True
            assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            (container,) = spec["containers"]
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            capabilities = container["securityContext"]["capabilities"]
            assert capabilities["drop"] == ["ALL"]
            assert capabilities.get("add", []) == (["IPC_LOCK"] if (name, role) == ("rdma", "Worker") else [])

    def test_leaves_time_to_save(self, name):
        grace_s = described(name)["launch"].get("grace_s", 30)
        for _, template in pods(name):
            assert template["spec"]["terminationGracePeriodSeconds"] > grace_s

    def test_gives_the_launcher_a_job_that_a_worker_can_read(self, name, tmp_path):
        data = kind(manifests(name), "ConfigMap")["data"]
        (tmp_path / "job.json").write_text(data["job.json"])

        job = load_job(tmp_path / "job.json", environ={})

        assert job.launch.launcher == "horovodrun"
        assert job.metrics.host == "0.0.0.0"  # noqa: S104

    def test_keeps_the_launcher_off_spot_nodes(self):
        found = dict(pods("spot"))

        assert "tolerations" not in found["Launcher"]["spec"]
        assert {t["key"] for t in found["Worker"]["spec"]["tolerations"]} >= {"cloud.google.com/gke-spot"}

    def test_names_a_port_for_each_local_rank(self):
        worker = dict(pods("monitoring"))["Worker"]["spec"]["containers"][0]
        monitor = kind(manifests("monitoring"), "PodMonitor")

        ports = {port["name"]: port["containerPort"] for port in worker["ports"]}
        assert ports == {"ssh": 2222, "metrics-0": 9500, "metrics-1": 9501}
        assert [e["port"] for e in monitor["spec"]["podMetricsEndpoints"]] == ["metrics-0", "metrics-1"]

    def test_holds_no_secret_but_its_place(self):
        *_, variable = dict(pods("secrets"))["Launcher"]["spec"]["containers"][0]["env"]
        document = text("secrets")

        assert variable["valueFrom"] == {"secretKeyRef": {"name": "tracking", "key": "api-key"}}
        assert "kubernetes:tracking" not in document

    def test_lets_an_elastic_job_find_its_workers_by_itself(self):
        job = json.loads(kind(manifests("elastic"), "ConfigMap")["data"]["job.json"])
        spec = kind(manifests("elastic"), "MPIJob")["spec"]
        command = dict(pods("elastic"))["Launcher"]["spec"]["containers"][0]["command"]

        assert job["launch"]["elastic"]["discover"] == "sh /etc/mpi/discover_hosts.sh"
        assert job["launch"]["elastic"]["ranks_per_host"] == 2
        assert spec["launcherCreationPolicy"] == "AtStartup"
        assert spec["runPolicy"]["schedulingPolicy"]["minAvailable"] == 1 + 1  # the launcher starts, too
        assert "--hostfile" not in command

    def test_never_waits_for_the_launcher_to_start_the_workers(self):
        policy = kind(manifests("volcano"), "MPIJob")["spec"]["runPolicy"]["schedulingPolicy"]

        assert policy["minAvailable"] == 8

    def test_brings_a_task_of_the_users_own_along(self):
        job = Job.model_validate({**described("cpu"), "task": "/home/me/mine.py:Mine"})

        assert inner_job(job, has_source=True).task == "/etc/horovod_train/mine.py:Mine"

    @pytest.mark.parametrize(
        ("quantity", "factor", "expected"), [("1500m", 2, "3000m"), ("2.5Gi", 4, "10Gi"), ("3", 1, "3")]
    )
    def test_multiplies_amounts(self, quantity, factor, expected):
        assert times(quantity, factor) == expected
        assert amount(expected) == pytest.approx(amount(quantity) * factor)

    def test_merges_as_rfc_7386_says(self):
        assert merge({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": None, "e": 4}, "d": [5]}) == {
            "a": {"c": 2, "e": 4},
            "d": [5],
        }


K = "launch.kubernetes"
VOLUME = {"mount_path": "/data", "claim": "training"}
# What is wrong -> the field that the error names.
BROKEN = {
    "no image": ({"image": None}, f"{K}.image"),
    "an image without a version": ({"image": "registry.example/train"}, f"{K}.image"),
    "the latest image": ({"image": "registry.example:5000/train:latest"}, f"{K}.image"),
    "an image that is none": ({"image": "Registry Example"}, f"{K}.image"),
    "a pull policy that is none": ({"image_pull_policy": "Sometimes"}, f"{K}.image_pull_policy"),
    "a namespace that is none": ({"namespace": "My_Namespace"}, f"{K}.namespace"),
    "no ranks in a worker": ({"ranks_per_worker": 0}, f"{K}.ranks_per_worker"),
    "fewer than no ranks": ({"ranks_per_worker": -1}, f"{K}.ranks_per_worker"),
    "ranks that do not fill workers": ({"ranks_per_worker": 3}, "launch.num_ranks"),
    "an amount that is none": ({"memory_per_rank": "4 GB"}, f"{K}.memory_per_rank"),
    "cores that are no amount": ({"cpus_per_rank": "two"}, f"{K}.cpus_per_rank"),
    "two gpus for a rank": ({"gpus_per_rank": 2}, f"{K}.gpus_per_rank"),
    "a resource that is none": ({"extra_resources": {"rdma hca": 1}}, f"{K}.extra_resources.rdma hca"),
    "shared memory that is no amount": ({"shm_size": "big"}, f"{K}.shm_size"),
    "a privileged port": ({"ssh_port": 22}, f"{K}.ssh_port"),
    "a port beyond the last": ({"ssh_port": 99999}, f"{K}.ssh_port"),
    "a port that other jobs use": ({"host_network": True}, f"{K}.ssh_port"),
    "root": ({"run_as_user": 0}, f"{K}.run_as_user"),
    "a volume of no kind": ({"volumes": [{"mount_path": "/data"}]}, f"{K}.volumes.0"),
    "a volume of two kinds": ({"volumes": [{**VOLUME, "empty_dir": True}]}, f"{K}.volumes.0"),
    "a volume in a place of ours": (
        {"volumes": [VOLUME, {**VOLUME, "mount_path": "/etc/mpi/x"}]},
        f"{K}.volumes.1.mount_path",
    ),
    "a place mounted twice": ({"volumes": [VOLUME, VOLUME]}, f"{K}.volumes.0.mount_path"),
    "a relative place": ({"volumes": [{**VOLUME, "mount_path": "data"}]}, f"{K}.volumes.0.mount_path"),
    "checkpoints that go with the pod": ({"volumes": []}, "run_dir"),
    "checkpoints on scratch space": ({"volumes": [{"mount_path": "/data", "empty_dir": True}]}, "run_dir"),
    "checkpoints that cannot be written": ({"volumes": [{**VOLUME, "read_only": True}]}, "run_dir"),
    "a volume of nothing": ({"volumes": [{"mount_path": "/data"}]}, f"{K}.volumes.0"),
    "a volume of two other kinds": (
        {"volumes": [VOLUME, {"mount_path": "/b", "claim": "b", "empty_dir": True}]},
        f"{K}.volumes.1",
    ),
    "a claim that is none": ({"volumes": [{**VOLUME, "claim": "My Claim"}]}, f"{K}.volumes.0.claim"),
    "a label that is none": ({"labels": {"team": "vision & speech"}}, f"{K}.labels.team"),
    "a label of the operator": (
        {"labels": {"training.kubeflow.org/job-name": "x"}},
        f"{K}.labels.training.kubeflow.org/job-name",
    ),
    "a toleration without a key": ({"tolerations": [{"value": "x"}]}, f"{K}.tolerations.0.key"),
    "an effect that is none": (
        {"tolerations": [{"key": "a", "effect": "Never"}]},
        f"{K}.tolerations.0.effect",
    ),
    "a clean-up that is none": ({"clean_pods": "Sometimes"}, f"{K}.clean_pods"),
    "a negative back-off": ({"backoff_limit": -1}, f"{K}.backoff_limit"),
    "a negative time to live": ({"keep_finished_s": -5}, f"{K}.keep_finished_s"),
    "a deadline before the grace": ({"deadline_s": 20}, f"{K}.deadline_s"),
    "a launcher that is made some other time": ({"launcher_creation": "Later"}, f"{K}.launcher_creation"),
    "a manager that nobody is": ({"managed_by": "kueue.x-k8s.io/multi-kueue"}, f"{K}.managed_by"),
    "a gang of nobody": ({"gang": "coscheduling"}, f"{K}.gang"),
    "a queue without a gang": ({"gang_queue": "a"}, f"{K}.gang_queue"),
    "two that decide": ({"gang": "volcano", "queue": "a"}, f"{K}.queue"),
    "a field that is none": ({"replicas": 3}, f"{K}.replicas"),
    "cores as a further device": ({"extra_resources": {"cpu": 1}}, f"{K}.extra_resources.cpu"),
    "a device of a quota": ({"extra_resources": {"requests.a/b": 1}}, f"{K}.extra_resources.requests.a/b"),
    "a gpu of no maker": ({"gpus_per_rank": 1, "gpu_resource": "gpu"}, f"{K}.gpu_resource"),
    "two dots in a name": ({"priority_class": "very..high"}, f"{K}.priority_class"),
    "a driver whose name is too long": (
        {"volumes": [VOLUME, {"mount_path": "/b", "csi_driver": "a" * 64}]},
        f"{K}.volumes.1.csi_driver",
    ),
    "a label with too long a prefix": (
        {"labels": {f"{'a' * 254}/b": "c"}},
        f"{K}.labels.{'a' * 254}/b",
    ),
    "annotations that are a book": ({"annotations": {"book": "a" * 300_000}}, f"{K}.annotations"),
    "a gang that waits for centuries": (
        {"gang": "volcano", "gang_timeout_s": 2**31},
        f"{K}.gang_timeout_s",
    ),
}
BROKEN_ELSEWHERE = {
    "a name with capitals": ({"name": "Digits"}, "name"),
    "a name with dots": ({"name": "my.job"}, "name"),
    "a name that begins with a digit": ({"name": "1job"}, "name"),
    "a name too long for its pods": ({"name": "a" * 55}, "name"),
    "a name too long for as many pods as it may have": (
        {"name": "a" * 54, "launch": {"elastic": {"min_ranks": 1, "max_ranks": 11}}},
        "name",
    ),
    "hosts": ({"launch": {"hosts": ["a:2"]}}, "launch.hosts"),
    "a way of its own to find pods": (
        {"launch": {"elastic": {"min_ranks": 1, "discover": "cat hosts"}}},
        "launch.elastic.discover",
    ),
    "a maximum that does not fill workers": (
        {"launch": {"elastic": {"min_ranks": 1, "max_ranks": 3}, "kubernetes": {"ranks_per_worker": 2}}},
        "launch.elastic.max_ranks",
    ),
    "a secret whose name is no name": (
        {"launch": {"secrets": {"A": "kubernetes:-a/b"}}},
        "launch.secrets.A",
    ),
    "a secret whose name is too long": (
        {"launch": {"secrets": {"A": f"kubernetes:{'a' * 254}/b"}}},
        "launch.secrets.A",
    ),
    "a secret of this machine": ({"launch": {"secrets": {"A": "env:A"}}}, "launch.secrets.A"),
    "a variable of the operator": (
        {"launch": {"env": {"OMPI_MCA_orte_default_hostfile": "x"}}},
        "launch.env.OMPI_MCA_orte_default_hostfile",
    ),
    "metrics on the port of sshd": (
        {"metrics": {"port": 2221}, "launch": {"kubernetes": {"ranks_per_worker": 2}}},
        "metrics.port",
    ),
    "a checkpoint folder of its own that is lost": ({"checkpoint": {"dir": "/home/me"}}, "checkpoint.dir"),
}


def problems(tmp_path, document):
    (tmp_path / "job.json").write_text(json.dumps(document))
    with pytest.raises(ConfigError) as caught:
        load_job(tmp_path / "job.json", environ={})
    return [problem.path for problem in caught.value.problems]


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_job_is_refused_with_the_path_of_the_field(tmp_path, case):
    change, path = BROKEN[case]
    document = copy.deepcopy(described("cpu"))
    document["launch"]["kubernetes"] |= change

    assert path in problems(tmp_path, document)


@pytest.mark.parametrize("case", BROKEN_ELSEWHERE)
def test_so_is_one_that_is_broken_elsewhere(tmp_path, case):
    change, path = BROKEN_ELSEWHERE[case]

    assert path in problems(tmp_path, merge(described("cpu"), change))


def test_the_same_jobs_are_not_refused_for_other_launchers(tmp_path):
    document = merge(described("cpu"), {"name": "My.Job", "launch": {"launcher": "horovodrun"}})
    (tmp_path / "job.json").write_text(json.dumps(document))

    assert load_job(tmp_path / "job.json", environ={}).name == "My.Job"


SPEC = ("spec",)
ROLES = ("spec", "mpiReplicaSpecs")
POD = (*ROLES, "Worker", "template", "spec")
CONTAINER = (*POD, "containers", 0)
# Of a whole MPIJob: what the API server refuses, what the operator only mentions, what nobody notices.
BROKEN_MANIFESTS = {
    "an unknown field": (SPEC, "slotPerWorker", 2, "spec.slotPerWorker"),
    "an unknown field of a pod": (
        POD,
        "nodeSelectors",
        {},
        "spec.mpiReplicaSpecs.Worker.template.spec.nodeSelectors",
    ),
    "an MPI that is none": (SPEC, "mpiImplementation", "MVAPICH", "spec.mpiImplementation"),
    "a number that no 32 bits hold": (SPEC, "slotsPerWorker", 2**31, "spec.slotsPerWorker"),
    "text for a number": (SPEC, "slotsPerWorker", "two", "spec.slotsPerWorker"),
    "an amount that is none": (
        CONTAINER,
        "resources",
        {"limits": {"memory": "lots"}},
        "spec.mpiReplicaSpecs.Worker.template.spec.containers.0.resources.limits.memory",
    ),
    "no containers": (POD, "containers", None, "spec.mpiReplicaSpecs.Worker.template.spec.containers"),
    "a list of no containers": (
        POD,
        "containers",
        [],
        "spec.mpiReplicaSpecs.Worker.template.spec.containers",
    ),
    "no pod": (
        (*ROLES, "Launcher", "template"),
        "spec",
        None,
        "spec.mpiReplicaSpecs.Launcher.template.spec.containers",
    ),
    "no role of workers": (ROLES, "Worker", None, "spec.mpiReplicaSpecs.Worker"),
    "no launcher": (ROLES, "Launcher", None, "spec.mpiReplicaSpecs.Launcher"),
    "two launchers": ((*ROLES, "Launcher"), "replicas", 2, "spec.mpiReplicaSpecs.Launcher.replicas"),
    "no workers": ((*ROLES, "Worker"), "replicas", 0, "spec.mpiReplicaSpecs.Worker.replicas"),
    "a restart policy of pods": (
        (*ROLES, "Worker"),
        "restartPolicy",
        "Always",
        "spec.mpiReplicaSpecs.Worker.restartPolicy",
    ),
    "a restart policy of other operators": (
        (*ROLES, "Launcher"),
        "restartPolicy",
        "ExitCode",
        "spec.mpiReplicaSpecs.Launcher.restartPolicy",
    ),
    "a clean-up that is none": (
        (*SPEC, "runPolicy"),
        "cleanPodPolicy",
        "Succeeded",
        "spec.runPolicy.cleanPodPolicy",
    ),
    "fewer than no slots": (SPEC, "slotsPerWorker", -1, "spec.slotsPerWorker"),
    "a negative time to live": (
        (*SPEC, "runPolicy"),
        "ttlSecondsAfterFinished",
        -5,
        "spec.runPolicy.ttlSecondsAfterFinished",
    ),
    "a name that begins with a digit": (("metadata",), "name", "1job", "metadata.name"),
    "a name with dots": (("metadata",), "name", "my.job", "metadata.name"),
    "a name too long for its pods": (("metadata",), "name", "a" * 60, "metadata.name"),
    "a manager that nobody is": (
        (*SPEC, "runPolicy"),
        "managedBy",
        "kubeflow.org/mpioperator",
        "spec.runPolicy.managedBy",
    ),
    "a creation policy with a typing error": (
        SPEC,
        "launcherCreationPolicy",
        "WaitForWorkerReady",
        "spec.launcherCreationPolicy",
    ),
    "a role with a typing error": (ROLES, "Wroker", {"template": {}}, "spec.mpiReplicaSpecs.Wroker"),
    "a container without an image": (
        CONTAINER,
        "image",
        None,
        "spec.mpiReplicaSpecs.Worker.template.spec.containers.0.image",
    ),
    "a port that is none": (
        CONTAINER,
        "ports",
        [{"containerPort": 99999}],
        "spec.mpiReplicaSpecs.Worker.template.spec.containers.0.ports.0.containerPort",
    ),
    "a mount of no volume": (
        CONTAINER,
        "volumeMounts",
        [{"name": "dat", "mountPath": "/d"}],
        "spec.mpiReplicaSpecs.Worker.template.spec.containers.0.volumeMounts.0.name",
    ),
    "more asked for than allowed": (
        CONTAINER,
        "resources",
        {"requests": {"memory": "4Gi"}, "limits": {"memory": "2Gi"}},
        "spec.mpiReplicaSpecs.Worker.template.spec.containers.0.resources.requests.memory",
    ),
    "a gang that waits for itself": (
        (*SPEC, "runPolicy"),
        "schedulingPolicy",
        {"minAvailable": 3},
        "spec.runPolicy.schedulingPolicy.minAvailable",
    ),
}


@pytest.mark.parametrize("case", BROKEN_MANIFESTS)
def test_a_patch_that_breaks_the_mpijob_is_refused_with_the_path_of_the_field(case):
    place, field, value, path = BROKEN_MANIFESTS[case]
    manifest = kind(manifests("cpu"), "MPIJob")
    node = manifest
    for part in place:
        node = node[part]
    node.pop(field, None)
    if value is not None:
        node[field] = value

    with pytest.raises(ConfigError) as caught:
        check(manifest)

    assert path in [problem.path for problem in caught.value.problems]


# What is just allowed.
FITTING_MANIFESTS = {
    "the largest number that 32 bits hold": (SPEC, "slotsPerWorker", 2**31 - 1),
    "one worker": ((*ROLES, "Worker"), "replicas", 1),
    "one slot": (SPEC, "slotsPerWorker", 1),
    "a time to live of nothing": ((*SPEC, "runPolicy"), "ttlSecondsAfterFinished", 0),
    "the smallest port": (CONTAINER, "ports", [{"containerPort": 1}]),
    "the largest port": (CONTAINER, "ports", [{"containerPort": 65535}]),
    "a port with the longest name": (CONTAINER, "ports", [{"containerPort": 1, "name": "a" * 15}]),
    "as much asked for as allowed": (
        CONTAINER,
        "resources",
        {"requests": {"memory": "2048Mi"}, "limits": {"memory": "2Gi"}},
    ),
    "a gang of the workers": ((*SPEC, "runPolicy"), "schedulingPolicy", {"minAvailable": 2}),
    "a restart on failure": ((*ROLES, "Worker"), "restartPolicy", "OnFailure"),
}


def changed_manifest(place, field, value):
    manifest = kind(manifests("cpu"), "MPIJob")
    node = manifest
    for part in place:
        node = node[part]
    node[field] = value
    return manifest


@pytest.mark.parametrize("case", FITTING_MANIFESTS)
def test_a_patch_that_just_fits_is_taken(case):
    manifest = changed_manifest(*FITTING_MANIFESTS[case])
    # Replicas are asked for by a default.
    manifest["spec"]["mpiReplicaSpecs"]["Worker"].setdefault("replicas", 2)

    check(manifest)


@pytest.mark.parametrize(
    ("place", "field", "value", "said"),
    [
        (CONTAINER, "ports", [{"containerPort": 1, "name": "a" * 16}], "at most 15 characters"),
        (CONTAINER, "ports", [{"containerPort": n, "name": "same"} for n in (1, 2)], "must be unique"),
        (CONTAINER, "ports", [{"containerPort": 0}], "must be 1 to 65535"),
        (CONTAINER, "ports", [{"containerPort": 65536}], "must be 1 to 65535"),
        (SPEC, "slotsPerWorker", 0, "must be at least 1"),
        (SPEC, "slotsPerWorker", -(2**31) - 1, "less than the minimum of -2147483648"),
    ],
)
def test_a_patch_that_just_does_not_fit_is_refused(place, field, value, said):
    with pytest.raises(ConfigError) as caught:
        check(changed_manifest(place, field, value))

    assert any(said in problem.message for problem in caught.value.problems)


@pytest.mark.parametrize(("min_available", "is_refused"), [(1, False), (2, True), (None, True)])
def test_a_gang_of_the_one_worker_that_is_meant_without_a_number(min_available, is_refused):
    manifest = kind(manifests("cpu"), "MPIJob")
    manifest["spec"]["mpiReplicaSpecs"]["Worker"].pop("replicas", None)
    manifest["spec"]["launcherCreationPolicy"] = "WaitForWorkersReady"
    gang = {"queue": "q"} if min_available is None else {"minAvailable": min_available}
    manifest["spec"]["runPolicy"]["schedulingPolicy"] = gang

    found = list(silent_problems(manifest))

    assert [problem.found for problem in found] == [str(min_available or "unset")] * is_refused


def test_a_path_that_is_mounted_twice_is_refused():
    manifest = kind(manifests("cpu"), "MPIJob")
    pod = manifest["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]
    pod["volumes"] = [{"name": name, "emptyDir": {}} for name in ("a", "b")]
    mounts = [{"name": name, "mountPath": path} for name, path in (("a", "/x"), ("a", "/y"), ("b", "/x"))]
    pod["containers"][0]["volumeMounts"] = mounts

    with pytest.raises(ConfigError) as caught:
        check(manifest)

    places = [problem.path.rpartition("volumeMounts.")[2] for problem in caught.value.problems]
    assert places == ["0.mountPath", "2.mountPath"]


@pytest.mark.parametrize(
    ("quantity", "expected"),
    [
        ("3", 3.0),
        ("1.5", 1.5),
        ("1500m", 1.5),
        ("2k", 2e3),
        ("2Ki", 2048.0),
        ("1G", 1e9),
        ("1Ei", 2.0**60),
        ("1E", 1e18),
        ("2e3", 2e3),
    ],
)
def test_amounts_are_numbers(quantity, expected):
    assert amount(quantity) == expected
    assert math.isnan(amount(f"x{quantity}"))


def test_there_is_a_broken_job_for_every_mistake_that_was_seen():
    assert len(BROKEN) + len(BROKEN_ELSEWHERE) + len(BROKEN_MANIFESTS) >= 40


def test_files_are_plain_yaml(name):
    documents = list(yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text()))

    assert documents == manifests(name)
    assert not re.search(r"[&*]id\d", (FOLDER / f"{name}.yaml").read_text())
