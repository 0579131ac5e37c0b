"""Launcher ``mpijob``: renders, validates, dry-runs, creates and monitors MPIJobs.

MpiJobLauncher   the launcher
status_of        status of an MPIJob, from its conditions, its pods and its warning events
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from time import monotonic, sleep
from typing import Literal

import yaml

from horovod_train.errors import LaunchError, UserError
from horovod_train.events.wire import duration
from horovod_train.launch.base import (
    PATIENCE_S,
    JobStatus,
    LaunchPlan,
    LaunchRequest,
    PolledLauncher,
    Submitted,
)
from horovod_train.launch.jobs import record_end, recorded_end
from horovod_train.plugins.kubernetes.cluster import (
    Cluster,
    ExistsError,
    ForbiddenError,
    LogInterruptedError,
    Pod,
    UnreachableError,
    check,
)
from horovod_train.plugins.kubernetes.render import (
    CANCELLED,
    DRAINED,
    JOB_NAME_LABEL,
    MANAGED_BY,
    MANAGER,
    ROLE_LABEL,
    Manifest,
    as_yaml,
    field,
    number,
    render,
    section,
    sections,
    text,
    texts,
)
from horovod_train.plugins.kubernetes.settings import MAX_CONFIG_BYTES, QUEUE_LABEL, Kubernetes

Warned = tuple[str, str]
CANCELLED_MESSAGE = "requested to save and exit, then deleted; checkpoints are in its run_dir"
# Time that the operator may need to record the end of a launcher, in seconds.
UNNOTICED_S = 60.0
# Reasons of warnings of permanent errors.
FATAL_REASONS = {"ValidationError", "FailedCreate", "InvalidImageName", "ErrResourceExists"}
# The operator gives the same reason for all failures to create workers; this matches admission errors.
_IS_REFUSED = re.compile(r"created failed: .* is (forbidden|invalid)", re.DOTALL)
# Transient, hence not fatal: quota may be freed, and a new namespace has no service account at first.
_MAY_PASS = re.compile(
    r"exceeded quota|timed? ?out|connection refused|looking up service account", re.IGNORECASE
)


def status_of(mpi_job: Manifest, cluster: Cluster) -> JobStatus:
    """Return the status of an MPIJob."""
    name = text(mpi_job, "metadata", "name")
    if (going := _termination_status(mpi_job, cluster)) is not None:
        return going
    conditions = {text(each, "type"): text(each, "message") for each in _conditions(mpi_job)}
    if "Succeeded" in conditions:
        return JobStatus("succeeded", 0)
    if "Failed" in conditions:
        code = _exit_code(cluster, name)
        return JobStatus("preempted" if code == 75 else "failed", code or 1, conditions["Failed"])
    if field(mpi_job, "spec", "runPolicy", "suspend"):
        return _suspended(mpi_job, cluster)
    if "Running" in conditions:
        return JobStatus("running", message=_why_waiting(cluster, name, cluster.warnings(mpi_job)))
    return _before_running(mpi_job, cluster, is_accepted="Created" in conditions)


def _conditions(mpi_job: Manifest) -> list[Mapping[str, object]]:
    """Return the conditions of an MPIJob that are true.

    When a pod is evicted, the operator marks the MPIJob as failed and does not remove the mark, although the
    job goes on: only the end of the launcher sets the completion time.
    """
    is_complete = bool(field(mpi_job, "status", "completionTime"))
    return [
        condition
        for condition in sections(mpi_job, "status", "conditions")
        if field(condition, "status") == "True"
        and (is_complete or field(condition, "reason") != "MPIJobEvicted")
    ]


def ended_at(mpi_job: Manifest) -> datetime | None:
    """Return the completion time of an MPIJob by the operator; None: not completed, or unknown."""
    for condition in _conditions(mpi_job):
        has_ended = field(condition, "type") in ("Succeeded", "Failed")
        if has_ended and "lastTransitionTime" in condition:
            return datetime.fromisoformat(text(condition, "lastTransitionTime"))
    return None


def running_pods(cluster: Cluster, name: str) -> list[Pod]:
    """Return the pods of a job that have not ended; ended pods may exist indefinitely."""
    pods = cluster.pods(f"{JOB_NAME_LABEL}={name}")
    return [pod for pod in pods if not pod.has_ended]


def _termination_status(mpi_job: Manifest, cluster: Cluster) -> JobStatus | None:
    """Return the status of a job that was cancelled or deleted; None: it was not."""
    metadata = section(mpi_job, "metadata")
    if CANCELLED in section(metadata, "annotations"):
        if running_pods(cluster, text(metadata, "name")):
            return JobStatus("stopping", message="cancelled: its ranks were requested to save and exit")
        return JobStatus("cancelled", 143, CANCELLED_MESSAGE)
    if "deletionTimestamp" in metadata:
        return JobStatus("stopping", message="it was deleted; its pods are terminating")
    return None


def _suspended(mpi_job: Manifest, cluster: Cluster) -> JobStatus:
    if DRAINED not in section(mpi_job, "metadata", "annotations"):
        return JobStatus(
            "queued", message="suspended by its queue or a user; starts when spec.runPolicy.suspend is false"
        )
    if running_pods(cluster, text(mpi_job, "metadata", "name")):
        return JobStatus("stopping", message="suspended: its ranks were requested to save and exit")
    return JobStatus(
        "preempted",
        75,
        "suspended: its ranks were requested to save, and have exited; run.log in its folder tells "
        "whether they saved (ranks that hang cannot)",
    )


def _before_running(mpi_job: Manifest, cluster: Cluster, *, is_accepted: bool) -> JobStatus:
    warnings = cluster.warnings(mpi_job)
    if fatal := fatal_warning(warnings):
        return JobStatus("failed", 1, fatal)
    why = _why_waiting(cluster, text(mpi_job, "metadata", "name"), warnings)
    if is_accepted or why:  # the operator sets no condition while it cannot create workers
        return JobStatus("starting", message=why)
    return JobStatus(
        "queued",
        message="the MPI operator has not processed it; check that it runs: "
        "`kubectl get pods --all-namespaces | grep mpi-operator`. "
        "If it failed to create workers for an earlier job of this name, it pauses for up to 17 minutes",
    )


def fatal_warning(warnings: Iterable[Warned]) -> str:
    """Return the last warning of a permanent error, as ``reason: message``; empty: there is none."""
    fatal = [
        f"{reason}: {message}"
        for reason, message in warnings
        if (reason in FATAL_REASONS or _IS_REFUSED.search(message)) and not _MAY_PASS.search(message)
    ]
    return fatal[-1] if fatal else ""


def _why_waiting(cluster: Cluster, name: str, warned: Sequence[Warned]) -> str:
    """Return which pods are pending and why, or why no launcher runs; empty: no reason is known."""
    all_pods = cluster.pods(f"{JOB_NAME_LABEL}={name}")
    pods = [pod for pod in all_pods if pod.phase == "Pending"]
    # A probe that failed while a container started does not explain why pods wait now.
    lasting = [(reason, message) for reason, message in warned if reason != "Unhealthy"]
    warnings = [f"{reason}: {message}" for reason, message in lasting[-1:]]
    if not pods:
        is_running = any(pod.phase == "Running" for pod in all_pods)
        return (
            _unobserved_end(all_pods)
            or _between_launchers(all_pods)
            or (warnings[0] if warnings and not is_running else "")
        )
    names = ", ".join(sorted(pod.name for pod in pods)[:3]) + (" ..." if len(pods) > 3 else "")
    return "; ".join([f"{names} pending", *(_container_messages(pods) or warnings)])


def _container_messages(pods: Sequence[Pod]) -> list[str]:
    """Return the kubelet's reason and message (with the image) for a container that does not start."""
    for pod in pods:
        for container in pod.containers:
            if container.waiting is not None:
                return [": ".join(container.waiting)]
    return []


def _unobserved_end(pods: Sequence[Pod]) -> str:
    """Return a message if a launcher has succeeded and the operator has not recorded it; else empty."""
    for pod in _launchers_of(pods):
        ended = [container for container in pod.containers if container.exit_code is not None]
        ends = [container.finished for container in ended if container.finished is not None]
        if pod.phase != "Succeeded" or not ends or len(ends) < len(ended):
            continue
        since_s = (datetime.now(UTC) - max(ends)).total_seconds()
        if since_s > UNNOTICED_S:
            return (
                f"its launcher succeeded {duration(since_s)} ago, and the MPI operator has not taken "
                "note; is it running? `kubectl get pods --all-namespaces | grep mpi-operator`"
            )
    return ""


def _launchers_of(pods: Sequence[Pod]) -> list[Pod]:
    return [pod for pod in pods if pod.labels.get(ROLE_LABEL) == "launcher"]


def _between_launchers(pods: Sequence[Pod]) -> str:
    """Return a message if the launcher has failed and its retry does not exist yet; else empty."""
    launchers = _launchers_of(pods)
    failed = [pod for pod in launchers if pod.phase == "Failed"]
    if not failed or len(failed) < len(launchers):
        return ""
    return (
        f"its launcher has failed {len(failed)} time(s); Kubernetes starts the next one after a pause that "
        "doubles each time, up to ten minutes"
    )


def launcher_pods(cluster: Cluster, name: str) -> list[Pod]:
    """Return the pods of a job's launcher, including retries, oldest first."""
    pods = cluster.pods(f"{JOB_NAME_LABEL}={name},{ROLE_LABEL}=launcher")
    return sorted(pods, key=lambda pod: pod.created)


def _exit_code(cluster: Cluster, name: str) -> int | None:
    for pod in reversed(launcher_pods(cluster, name)):
        for container in pod.containers:
            if container.exit_code is not None:
                return container.exit_code
    return None


POLL_S = 1.0
ACCEPT_S = 5.0
API_TIMEOUT_S = 30.0
# Permanent states; a drained job can be submitted again, or unsuspended.
FINAL = {"succeeded", "failed", "cancelled"}


class MpiJobLauncher(PolledLauncher):
    """Launcher that submits an MPIJob to the cluster of the current context."""

    has_local_files = False
    queries_a_server = True

    def plan(self, request: LaunchRequest, verb: tuple[str, ...] = ("run",)) -> LaunchPlan:
        """Return the plan: manifests, and the kubectl command that applies them; see ``render`` for ``verb``.

        Raises:
            ConfigError: The patched MPIJob is invalid; all problems are listed.
            UserError: The task's file is too large.
        """
        file = Path(request.job.task.rpartition(":")[0])
        # A file that does not exist on this machine is expected in the image.
        source = file.read_text(encoding="utf-8") if file.suffix == ".py" and file.is_file() else ""
        if len(source) > MAX_CONFIG_BYTES:
            raise UserError(
                f"task: {file} is too large for a ConfigMap", hint="put it into the image, as module:Class"
            )
        manifests = render(request.job, request.run_id, source, verb)
        check(manifests[1], f"MPIJob {request.job.name}")
        path = Path(f"{request.job_id}.yaml")
        apply = ("kubectl", "apply", "--server-side", "--filename", str(path))
        return LaunchPlan(apply, files={path: as_yaml(manifests)}, is_display_only=True)

    def submit(self, request: LaunchRequest, plan: LaunchPlan) -> str:
        """Create the job; return ``namespace/name/uid``.

        A finished or drained MPIJob of this name, and expired ones, are deleted first; then the server
        validates the objects in a dry run. The MPIJob becomes the owner of all other objects. If an earlier
        call for this run was interrupted, the missing objects are created.

        Raises:
            LaunchError: The API server or the operator rejects the job; contains their message.
        """
        (documents,) = plan.files.values()
        manifests: list[Manifest] = list(yaml.safe_load_all(documents))
        settings = request.job.launch.settings(Kubernetes)
        config, mpi_job, *others = manifests
        name = request.job.name
        with closing(Cluster(settings.namespace, settings.api_timeout_s)) as cluster:
            made = _of_run(cluster, name, request.run_id)
            is_new = made is None
            if made is None:
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
                    with suppress(ExistsError):  # created by an interrupted call for this run
                        cluster.create({**manifest, "metadata": metadata})
                _wait_for_acceptance(cluster, made)
            except UnreachableError:
                raise  # the MPIJob may be running
            except LaunchError:
                if is_new:
                    cluster.delete_mpi_job(name)
                raise
        return f"{settings.namespace}/{name}/{uid}"

    def early_id(self, request: LaunchRequest) -> str:
        """Return the native ID without the UID, which the API server assigns."""
        return f"{request.job.launch.settings(Kubernetes).namespace}/{request.job.name}/"

    def status(self, job: Submitted) -> JobStatus:
        known = recorded_end(job.job_id)
        if known is not None and known.state in FINAL:
            return known  # even if the MPIJob was deleted since
        with closing(Cluster(_Place(job).namespace, API_TIMEOUT_S)) as cluster:
            return _status(job, cluster)

    def logs(self, job: Submitted, *, follow: bool) -> Iterator[str]:
        """Yield the logs of the launcher pod and of its retries, which contain the output of all ranks.

        With ``follow``, also yields changes of the job's status. Broken connections are re-established.
        """
        reader, last_message = _Reader(), ""
        known_s = monotonic()
        passing: tuple[type[LaunchError], ...] = (UnreachableError,)
        with closing(Cluster(_Place(job).namespace, API_TIMEOUT_S)) as cluster:
            while True:
                try:
                    status = _status(job, cluster)
                    pods = launcher_pods(cluster, _Place(job).name)
                except passing:
                    if not follow or monotonic() - known_s > PATIENCE_S:
                        raise
                    sleep(POLL_S)
                    continue
                known_s, passing = monotonic(), (UnreachableError, ForbiddenError)
                has_ended = not follow or status.has_ended
                if status.message not in ("", last_message) and not has_ended:
                    last_message = status.message
                    yield f"{status}"
                yield from reader.lines_of(pods, cluster, follow=follow)
                if has_ended and reader.is_complete:
                    if status.has_ended and not pods and not reader.has_read:
                        raise LaunchError(
                            f"{job.job_id}: its pods are gone, and their logs with them; it is {status}",
                            hint="run.log is in its run_dir, in the folder of this run",
                        )
                    return
                sleep(POLL_S)

    def cancel(self, job: Submitted, how: Literal["drain", "stop", "kill"]) -> None:
        """End a job.

        ``drain`` and ``stop`` suspend the MPIJob: its pods are terminated, and SIGTERM makes the ranks save
        and exit. ``stop`` then deletes the MPIJob; ``drain`` leaves it suspended. ``kill``, or ``stop`` of a
        finished job, deletes it immediately. The final status is recorded on this machine.
        """
        place = _Place(job)
        with closing(Cluster(place.namespace, API_TIMEOUT_S)) as cluster:
            found = place.find(cluster)
            if found is None:
                return
            status = _status(job, cluster)
            has_ended = status.state in ("succeeded", "failed")
            if how == "drain" and not has_ended and field(found, "metadata", "labels", QUEUE_LABEL):
                raise LaunchError(
                    f"{job.job_id} is in a queue of Kueue, which starts a suspended job again",
                    hint=f"deactivate its Workload: kubectl -n {place.namespace} get workloads, then kubectl "
                    'patch workload NAME --type=merge -p \'{"spec": {"active": false}}\'',
                )
            if how != "kill" and not has_ended:
                mark = {"metadata": {"annotations": {DRAINED if how == "drain" else CANCELLED: "true"}}}
                cluster.patch_mpi_job(place.name, {**mark, "spec": {"runPolicy": {"suspend": True}}})
                _wait_for_pods_to_go(cluster, found)
            if how == "drain":
                return
            if not has_ended:
                message = "killed, then deleted" if how == "kill" else CANCELLED_MESSAGE
                record_end(job.job_id, JobStatus("cancelled", 143, message))
            # Also deletes owned objects: pods, ConfigMaps, the ssh key, the Service, the NetworkPolicy.
            cluster.delete_mpi_job(place.name)

    def remove(self, job: Submitted) -> None:
        """Delete an MPIJob and its objects immediately, also if it is finished."""
        with closing(Cluster(_Place(job).namespace, API_TIMEOUT_S)) as cluster:
            cluster.delete_mpi_job(_Place(job).name)


class _Place:
    """Namespace, name and UID of a submitted MPIJob."""

    def __init__(self, job: Submitted) -> None:
        try:
            self.namespace, self.name, self._uid = job.native_id.split("/")
        except ValueError:
            raise LaunchError(f"{job.job_id}: {job.native_id!r} is not the ID of an MPIJob") from None
        self._run_id = job.log_dir.name

    def find(self, cluster: Cluster) -> Manifest | None:
        """Return the MPIJob; None if it was deleted, even if another has the same name."""
        if not self._uid:  # the submission was interrupted
            return _of_run(cluster, self.name, self._run_id)
        found = cluster.read("MPIJob", self.name)
        return found if found is not None and text(found, "metadata", "uid") == self._uid else None


class _Reader:
    """Incremental reader of pod logs, which does not repeat lines."""

    def __init__(self) -> None:
        self._shown: Counter[str] = Counter()
        self._finished: set[str] = set()
        self._read_s = monotonic()
        self.is_complete = True

    @property
    def has_read(self) -> bool:
        """Whether a line was read."""
        return bool(self._shown)

    def lines_of(self, pods: Sequence[Pod], cluster: Cluster, *, follow: bool) -> Iterator[str]:
        """Yield new lines of pods; afterwards, ``is_complete`` tells whether all logs could be read."""
        self.is_complete = True
        for pod in pods:
            try:
                yield from self.lines(cluster, pod, follow=follow)
                self._read_s = monotonic()
            except ForbiddenError:
                if not self.has_read or monotonic() - self._read_s > PATIENCE_S:
                    raise
                self.is_complete = False
            except (LogInterruptedError, UnreachableError):
                self.is_complete = False

    def lines(self, cluster: Cluster, pod: Pod, *, follow: bool) -> Iterator[str]:
        """Yield new lines of a pod's log."""
        name, phase = pod.name, pod.phase
        if phase == "Pending" or name in self._finished:
            return
        for line in cluster.log(name, self._shown[name], follow=follow):
            self._shown[name] += 1
            yield line
        if phase in ("Succeeded", "Failed"):
            self._finished.add(name)


def _status(job: Submitted, cluster: Cluster) -> JobStatus:
    """Return the status of a job. The final status is recorded, because MPIJobs are deleted later."""
    found = _Place(job).find(cluster)
    known = recorded_end(job.job_id)
    if found is None or (known is not None and known.state == "cancelled"):
        if not job.is_started:
            return known or JobStatus("queued", message="no MPIJob: its submission was interrupted")
        gone = JobStatus(
            "unknown", 1, "the MPIJob does not exist any more; run.log and checkpoints are in its run_dir"
        )
        return known or gone
    status = status_of(found, cluster)
    if status.has_ended:
        record_end(job.job_id, status)
    return status


def _of_run(cluster: Cluster, name: str, run_id: str) -> Manifest | None:
    """Return the MPIJob of a run; None: it does not exist, or is that of another run."""
    found = cluster.read("MPIJob", name)
    template = section(found, "spec", "mpiReplicaSpecs", "Launcher", "template")
    commands = (texts(each, "command") for each in sections(template, "spec", "containers"))
    is_of_run = any(("--run-id", run_id) in pairwise(command) for command in commands)
    is_ours = field(found, "metadata", "labels", MANAGED_BY) == MANAGER
    return found if is_of_run and is_ours else None


def _make_room(cluster: Cluster, name: str) -> None:
    """Delete a finished MPIJob of this package: the new one resumes from its checkpoints.

    Raises:
        LaunchError: It is not finished, not created by this package, or its deletion does not complete.
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
    # Foreground deletion: the MPIJob exists until its dependents are deleted.
    while (left := cluster.read("MPIJob", name)) or cluster.read("ConfigMap", f"{name}-job"):
        if monotonic() > deadline_s:
            pods = ", ".join(pod.name for pod in running_pods(cluster, name))
            finalizers = ", ".join(texts(left, "metadata", "finalizers"))
            raise LaunchError(
                f"MPIJob {name} has ended and was deleted {API_TIMEOUT_S:g} s ago, but still has objects"
                f" (pods: {pods or 'none'}; finalizers: {finalizers or 'none'})",
                hint="a pod on a node that is gone stays until `kubectl delete pod --force`; "
                "then submit again, or submit under another name to start from the beginning",
            )
        sleep(POLL_S / 4)


def _remove_expired(cluster: Cluster) -> None:
    """Delete MPIJobs of this package that finished more than ``keep_finished_s`` ago.

    The operator applies this TTL only to the launcher's Job. Without permission to list MPIJobs, nothing
    is deleted; ``doctor --kubernetes`` reports the missing permission.
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
    """Wait until the operator sets a condition, or for ``ACCEPT_S`` (the job may be suspended or queued).

    Raises:
        LaunchError: The operator reports an error that is permanent.
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
