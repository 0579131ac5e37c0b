"""Resolve, plan, submit and record jobs."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from horovod_train.config.launch import AUTO, Launch
from horovod_train.config.load import dump_job
from horovod_train.config.schema import Job
from horovod_train.errors import KeyUsedError, LaunchError, LauncherTimeoutError
from horovod_train.events.types import Progress
from horovod_train.events.wire import parse_line
from horovod_train.launch.base import Launcher, LaunchPlan, LaunchRequest, Submitted
from horovod_train.launch.hosts.hostlist import interface_towards
from horovod_train.launch.jobs import (
    delete_record,
    find_job,
    known_job,
    locked_key,
    recorded_end,
    save_record,
    submitted_job,
)
from horovod_train.launch.supervise.signals import TerminationRequested, interrupted_by_signals
from horovod_train.registry import LAUNCHERS

if TYPE_CHECKING:
    from horovod_train.launch.console import JobConsole


def resolve(job: Job, run_id: str | None = None) -> LaunchRequest:
    """Resolve values of a job that depend on this machine: paths, launcher, hosts, ranks and interface."""
    launch = job.launch
    name = automatic_launcher(launch) if launch.launcher == AUTO else launch.launcher
    hosts = launch.hosts or launcher_named(name).hosts(os.environ)
    base = Path(job.run_dir).expanduser().resolve()
    launch = launch.model_copy(update={"launcher": name, "hosts": hosts})
    num_ranks = launch.num_ranks or min(launch.slots or launch.most_ranks, launch.most_ranks)
    launch = launch.model_copy(update={"num_ranks": num_ranks})
    changed = job.model_copy(
        update={
            "run_dir": str(base),
            "launch": launch,
            "checkpoint": job.checkpoint.model_copy(update={"dir": _absolute(job.checkpoint.dir)}),
            "metrics": job.metrics.model_copy(update={"targets_dir": _absolute(job.metrics.targets_dir)}),
        }
    )
    return LaunchRequest(
        changed, run_id or new_run_id(), base / job.name, Path.cwd(), own_interface=interface_towards(launch)
    )


def automatic_launcher(launch: Launch) -> str:
    """Return the first launcher of this package that suits a job."""
    return next(name for name in LAUNCHERS.builtin if LAUNCHERS.load(name)().suits(launch))


def _absolute(folder: str | None) -> str | None:
    return None if folder is None else str(Path(folder).expanduser().resolve())


def new_run_id() -> str:
    """Return a name for a run: the time, and random digits for runs of the same second."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(4).hex()}"


def launcher_named(name: str) -> Launcher:
    """Return a launcher by its name.

    Raises:
        UnknownNameError: No launcher has this name.
    """
    launcher: Launcher = LAUNCHERS.load(name)()
    return launcher


def has_local_files(job: Job) -> bool:
    """Return whether this machine can read the runs of a job: an MPIJob writes them to a volume."""
    name = job.launch.launcher
    return name == AUTO or launcher_named(name).has_local_files


def submitted(job_id: str) -> tuple[Launcher, Submitted]:
    """Return the launcher and the record of a submitted job.

    Raises:
        UserError: The job does not exist.
    """
    job = find_job(job_id)
    return launcher_named(job.launcher), job


def make_plan(request: LaunchRequest) -> LaunchPlan:
    """Return the plan of a launch.

    Raises:
        UnknownNameError: The launcher does not exist.
        LaunchError: The launcher cannot start the job on this machine.
    """
    launcher = launcher_named(request.job.launch.launcher)
    plan = launcher.plan(request)
    own = {request.log_dir / "job.json": dump_job(request.job)} if launcher.has_local_files else {}
    elastic = request.job.launch.elastic
    note = plan.note
    if elastic is not None and elastic.discover is not None and launcher.has_local_files:
        note = f"hosts: the output of `{elastic.discover}`, which is called repeatedly during the run"
    return replace(plan, files={**own, **plan.files}, note=note)


def run_job(request: LaunchRequest, plan: LaunchPlan, console: JobConsole, *, is_new: bool) -> int:
    """Start a job, record it, wait for its end, and return its exit code.

    Args:
        request: Job and run.
        plan: Plan of the launch.
        console: Shows the output of the job.
        is_new: The job is not recorded yet. Only for launchers that start ranks.

    Raises:
        HorovodTrainError: The job failed, was preempted or cancelled.
    """
    launcher = launcher_named(request.job.launch.launcher)
    if launcher.starts_ranks:
        if is_new:
            record_job(request, str(os.getpid()), console.print)
        return launcher.run(request, plan, console)
    return follow(launcher, submit_job(request, plan, console.print), console)


def follow(launcher: Launcher, job: Submitted, console: JobConsole) -> int:
    """Show a submitted job's log until it ends; return its exit code. A signal ends the job."""
    console.print(f"{job.job_id}: submitted to {job.launcher} with ID {job.native_id}")
    try:
        with interrupted_by_signals(TerminationRequested):
            for line in launcher.logs(job, follow=True):
                parsed = parse_line(line)
                if isinstance(parsed.event, Progress) or not (parsed.event is None or parsed.has_text):
                    console.show(parsed.event, parsed.rank or 0)
                elif (text := parsed.readable()) is not None:
                    console.print(text)
            status = launcher.wait(job)
    except TerminationRequested as termination:
        console.print(f"{job.job_id}: {'drain' if termination.is_drain else 'cancel'} requested")
        launcher.cancel(job, "drain" if termination.is_drain else "stop")
        status = launcher.wait(job)
    finally:
        console.close()
    console.print(f"{job.job_id}: {status}")
    return 1 if status.exit_code is None else status.exit_code


def submit_job(request: LaunchRequest, plan: LaunchPlan, warn: Callable[[str], None]) -> Submitted:
    """Start a job, and return its record without waiting for its end.

    Raises:
        LaunchError: The launcher rejects the job. ``LauncherTimeoutError``: the job may have been started.
    """
    launcher = launcher_named(request.job.launch.launcher)
    with suppress(OSError):  # reported below
        # So that the job is known even if this process is killed now.
        save_record(request, launcher.early_id(request))
    try:
        native_id = launcher.submit(request, plan)
    except LauncherTimeoutError as error:
        raise LauncherTimeoutError(
            f"{error.message}; {request.job_id} may have been started",
            hint=f"`horovod-train status {request.job_id}` tells; a repeated submission with the same key "
            "starts no second job",
        ) from error
    except LaunchError:
        delete_record(request.job_id)
        raise
    except OSError as error:
        delete_record(request.job_id)
        raise LaunchError(f"the job could not be started: {error}") from error
    return record_job(request, native_id, warn)


def submit_once(job: Job, key: str, warn: Callable[[str], None]) -> tuple[Submitted, bool]:
    """Start a job, unless it was started with this key; return its record, and whether this call started it.

    If the process that started it was killed in the meantime, the start is completed.

    Args:
        job: The job.
        key: Any text that identifies this start of the job in this account.
        warn: Called with messages for the user.

    Raises:
        LaunchError: The launcher rejects the job. The next call with this key tries again.
        KeyUsedError: The key was used for a job with another description.
    """
    with locked_key(key) as used:
        # Without defaults, which may change with the version of this package.
        described = json.dumps(job.model_dump(mode="json", exclude_unset=True), sort_keys=True)
        fingerprint = sha256(described.encode()).hexdigest()
        known = known_job(used.job_id)
        if known is not None and used.fingerprint != fingerprint:
            raise KeyUsedError(
                f"the key {key!r} was used for {known.job_id}, whose description differs",
                hint="use another key for another job",
            )
        if known is not None and (known.is_started or recorded_end(known.job_id) is not None):
            return known, False
        completes_start = used.job_id and used.fingerprint == fingerprint
        request = resolve(job, used.job_id.removeprefix(f"{job.name}-") if completes_start else None)
        plan = make_plan(request)
        used.write(request.job_id, fingerprint)
        return submit_job(request, plan, warn), True


def record_job(request: LaunchRequest, native_id: str, warn: Callable[[str], None]) -> Submitted:
    """Store a started job. If that fails, warn with its native ID and run folder."""
    try:
        return save_record(request, native_id)
    except OSError as error:
        warn(
            f"warning: {error.filename}: {error.strerror}: `horovod-train status` will not find "
            f"{request.job_id}; its ID in {request.job.launch.launcher} is {native_id}, and its folder is "
            f"{request.log_dir}"
        )
        return submitted_job(request, native_id)
