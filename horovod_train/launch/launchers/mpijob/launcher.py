"""Jobs on Kubernetes: rendered, checked, tried on the server, created, watched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import monotonic, sleep
from typing import Literal

import yaml

from horovod_train.config.kubernetes_rules import MAX_CONFIG_BYTES
from horovod_train.errors import LaunchError, UserError
from horovod_train.launch.base import (
    PATIENCE_S,
    JobStatus,
    LaunchPlan,
    LaunchRequest,
    PolledLauncher,
    Submitted,
)
from horovod_train.launch.jobs import end_of, record_end
from horovod_train.launch.launchers.mpijob.cluster import Cluster, LogInterruptedError, Pod, UnreachableError
from horovod_train.launch.launchers.mpijob.document import (
    Manifest,
    as_yaml,
    field,
    number,
    section,
    sections,
    text,
    texts,
)
from horovod_train.launch.launchers.mpijob.render import (
    CANCELLED,
    DRAINED,
    MANAGED_BY,
    MANAGER,
    render,
)
from horovod_train.launch.launchers.mpijob.status import (
    CANCELLED_MESSAGE,
    ended_at,
    fatal_warning,
    launcher_pods,
    running_pods,
    status_of,
)
from horovod_train.launch.launchers.mpijob.validate import check

POLL_S = 1.0
ACCEPT_S = 5.0
API_TIMEOUT_S = 30.0
# What a job does not come back from; one that was drained may be submitted, or released, again.
FINAL = {"succeeded", "failed", "cancelled"}


class MpiJobLauncher(PolledLauncher):
    """Submits an MPIJob to the cluster of the current context."""

    has_local_files = False

    def plan(self, request: LaunchRequest, verb: tuple[str, ...] = ("run",)) -> LaunchPlan:
        """Return the plan: manifests, and how a person would apply them.

        Args:
            request: What to start.
            verb: What its launcher does with the job: a verb of ours, and options.

        Raises:
            ConfigError: The MPIJob, with the job's patch, would not run; it lists every problem.
            UserError: The task's file is too large.
        """
        file = Path(request.job.task.rpartition(":")[0])
        # A file that is not here is one of the image.
        source = file.read_text(encoding="utf-8") if file.suffix == ".py" and file.is_file() else ""
        if len(source) > MAX_CONFIG_BYTES:
            raise UserError(
                f"task: {file} is too large for a ConfigMap", hint="put it into the image, as module:Class"
            )
        manifests = render(request.job, request.run_id, source, verb)
        check(manifests[1], f"MPIJob {request.job.name}")
        path = Path(f"{request.job_id}.yaml")
        apply = ("kubectl", "apply", "--server-side", "--filename", str(path))
        return LaunchPlan(apply, files={path: as_yaml(manifests)}, is_by_hand=True)

    def submit(self, request: LaunchRequest, plan: LaunchPlan) -> str:
        """Create the job; return ``namespace/name/uid``.

        The objects are validated by a server-side dry run first. All created objects are owned by the
        MPIJob, and goes with it. A job of this name that has ended, or was drained, makes room.

        Raises:
            LaunchError: The server or the operator refuses; in their own words.
        """
        (documents,) = plan.files.values()
        manifests: list[Manifest] = list(yaml.safe_load_all(documents))
        settings = request.job.launch.kubernetes
        config, mpi_job, *others = manifests
        name = request.job.name
        with closing(Cluster(settings.namespace, settings.api_timeout_s)) as cluster:
            _make_room(cluster, name)
            _remove_expired(cluster)
            for manifest in manifests:
                cluster.create(manifest, dry_run=True)
            made = cluster.create(mpi_job)
            uid = text(made, "metadata", "uid")
            owner = {"apiVersion": mpi_job["apiVersion"], "kind": "MPIJob", "name": name, "uid": uid}
            try:
                for manifest in (config, *others):
                    metadata = {**section(manifest, "metadata"), "ownerReferences": [owner]}
                    cluster.create({**manifest, "metadata": metadata})
                _wait_for_acceptance(cluster, made)
            except LaunchError:
                cluster.delete_mpi_job(name)
                raise
        return f"{settings.namespace}/{name}/{uid}"

    def status(self, job: Submitted) -> JobStatus:
        """Return how a job stands.

        Raises:
            LaunchError: The API server does not answer.
        """
        known = end_of(job.job_id)
        if known is not None and known.state in FINAL:
            return known  # whatever has become of the MPIJob since
        with closing(Cluster(_Place(job).namespace, API_TIMEOUT_S)) as cluster:
            return _status(job, cluster)

    def logs(self, job: Submitted, *, follow: bool) -> Iterator[str]:
        """Yield the launcher's log, which has the output of all ranks, and those of its retries.

        Following, also what the job waits for. A connection that breaks is made again.
        """
        reader, last_message = _Reader(), ""
        known_s = monotonic()
        with closing(Cluster(_Place(job).namespace, API_TIMEOUT_S)) as cluster:
            while True:
                try:
                    status = _status(job, cluster)
                    pods = launcher_pods(cluster, _Place(job).name)
                except UnreachableError:
                    if not follow or monotonic() - known_s > PATIENCE_S:
                        raise
                    sleep(POLL_S)
                    continue
                known_s = monotonic()
                has_ended = not follow or status.has_ended
                if status.message not in ("", last_message) and not has_ended:
                    last_message = status.message
                    yield f"{status}"
                for pod in pods:
                    try:
                        yield from reader.lines(cluster, pod, follow=follow)
                    except (LogInterruptedError, UnreachableError):
                        has_ended = False  # ask again for what is missing
                if has_ended:
                    if not pods:
                        raise LaunchError(
                            f"{job.job_id}: its pods are gone, and their logs with them; it is {status}",
                            hint="run.log is in its run_dir, in the folder of this run",
                        )
                    return
                sleep(POLL_S)

    def cancel(self, job: Submitted, how: Literal["drain", "stop", "kill"]) -> None:
        """End a job.

        Suspending it takes its pods away; the signal that they get lets the ranks save and leave. A
        job that is to stop is deleted afterwards; one that is drained stays, suspended. Of one that has
        ended, what is left is deleted; how it ended is remembered.

        Raises:
            LaunchError: The server refuses.
        """
        place = _Place(job)
        with closing(Cluster(place.namespace, API_TIMEOUT_S)) as cluster:
            found = place.find(cluster)
            if found is None:
                return
            status = _status(job, cluster)
            has_ended = status.state in ("succeeded", "failed")
            if how != "kill" and not has_ended:
                mark = {"metadata": {"annotations": {DRAINED if how == "drain" else CANCELLED: "true"}}}
                cluster.patch_mpi_job(place.name, {**mark, "spec": {"runPolicy": {"suspend": True}}})
                _wait_for_pods_to_go(cluster, found)
            if how == "drain":
                return
            if not has_ended:
                message = "killed, then deleted" if how == "kill" else CANCELLED_MESSAGE
                record_end(job.job_id, JobStatus("cancelled", 143, message))
            # With it goes what it owns: pods, ConfigMaps, the ssh key, the Service, the NetworkPolicy.
            cluster.delete_mpi_job(place.name)

    def remove(self, job: Submitted) -> None:
        """Delete a job with all it has, at once, also when it has ended.

        Raises:
            LaunchError: The server refuses.
        """
        with closing(Cluster(_Place(job).namespace, API_TIMEOUT_S)) as cluster:
            cluster.delete_mpi_job(_Place(job).name)


class _Place:
    """Where a submitted job is."""

    def __init__(self, job: Submitted) -> None:
        self.namespace, self.name, self._uid = job.native_id.split("/")

    def find(self, cluster: Cluster) -> Manifest | None:
        """Return the MPIJob; None: it is gone, though there may be another of its name."""
        found = cluster.read("MPIJob", self.name)
        return found if found is not None and text(found, "metadata", "uid") == self._uid else None


class _Reader:
    """Reads logs of pods piece by piece, each line once."""

    def __init__(self) -> None:
        self._shown: Counter[str] = Counter()
        self._finished: set[str] = set()

    def lines(self, cluster: Cluster, pod: Pod, *, follow: bool) -> Iterator[str]:
        """Yield what is new in a pod's log."""
        name, phase = pod.name, pod.phase
        if phase == "Pending" or name in self._finished:
            return
        for line in cluster.log(name, self._shown[name], follow=follow):
            self._shown[name] += 1
            yield line
        if phase in ("Succeeded", "Failed"):
            self._finished.add(name)


def _status(job: Submitted, cluster: Cluster) -> JobStatus:
    """Return how a job stands; once it has ended, that is remembered, for MPIJobs are removed some day."""
    found = _Place(job).find(cluster)
    known = end_of(job.job_id)
    if found is None or (known is not None and known.state == "cancelled"):
        gone = JobStatus(
            "unknown", 1, "the MPIJob does not exist any more; run.log and checkpoints are in its run_dir"
        )
        return known or gone
    status = status_of(found, cluster)
    if status.has_ended:
        record_end(job.job_id, status)
    return status


def _make_room(cluster: Cluster, name: str) -> None:
    """Remove an MPIJob of ours that has ended: the new one resumes from its checkpoints.

    Raises:
        LaunchError: There is one that has not ended, or is not ours; or it was deleted and does not go.
    """
    found = cluster.read("MPIJob", name)
    if found is None:
        return
    status = status_of(found, cluster)
    if field(found, "metadata", "labels", MANAGED_BY) != MANAGER or not status.has_ended:
        raise LaunchError(
            f"MPIJob {name}: there is one already: {status}",
            hint="wait for its end, or `horovod-train drain` it and submit again to go on; "
            "another name starts from the beginning",
        )
    cluster.delete_mpi_job(name)
    deadline_s = monotonic() + API_TIMEOUT_S
    # It goes when all that it owns is gone.
    while (left := cluster.read("MPIJob", name)) or cluster.read("ConfigMap", f"{name}-job"):
        if monotonic() > deadline_s:
            pods = ", ".join(pod.name for pod in running_pods(cluster, name))
            finalizers = ", ".join(texts(left, "metadata", "finalizers"))
            raise LaunchError(
                f"MPIJob {name} has ended and was deleted {API_TIMEOUT_S:g} s ago, but does not go"
                f" (pods: {pods or 'none'}; finalizers: {finalizers or 'none'})",
                hint="a pod on a node that is gone stays until `kubectl delete pod --force`; "
                "submit again when it is gone, or under another name to start from the beginning",
            )
        sleep(POLL_S / 4)


def _remove_expired(cluster: Cluster) -> None:
    """Remove MPIJobs of ours, with what they own, that have ended longer ago than they are to be kept.

    The operator hands that time to the launcher's Job, and removes nothing else. Accounts that may not list
    MPIJobs leaves them there; the doctor says so.
    """
    with suppress(LaunchError):
        for mpi_job in cluster.mpi_jobs(f"{MANAGED_BY}={MANAGER}"):
            keep_s = number(mpi_job, "spec", "runPolicy", "ttlSecondsAfterFinished", default=-1)
            ended = ended_at(mpi_job)
            if keep_s >= 0 and ended is not None and datetime.now(UTC) - ended > timedelta(seconds=keep_s):
                cluster.delete_mpi_job(text(mpi_job, "metadata", "name"))


def _wait_for_pods_to_go(cluster: Cluster, mpi_job: Manifest) -> None:
    template = section(mpi_job, "spec", "mpiReplicaSpecs", "Worker", "template")
    grace_s = number(template, "spec", "terminationGracePeriodSeconds", default=30)
    deadline_s = monotonic() + grace_s + API_TIMEOUT_S
    while running_pods(cluster, text(mpi_job, "metadata", "name")) and monotonic() < deadline_s:
        sleep(POLL_S)


def _wait_for_acceptance(cluster: Cluster, mpi_job: Manifest) -> None:
    """Return when the operator has accepted a job, or the job is not to start yet (suspended, queued).

    Raises:
        LaunchError: The operator refuses it.
    """
    name = text(mpi_job, "metadata", "name")
    deadline_s = monotonic() + ACCEPT_S
    while monotonic() < deadline_s:
        if fatal := fatal_warning(cluster.warnings(mpi_job)):
            raise LaunchError(f"MPIJob {name}: {fatal}")
        found = cluster.read("MPIJob", name)
        if found is not None and sections(found, "status", "conditions"):
            return
        sleep(POLL_S / 4)
