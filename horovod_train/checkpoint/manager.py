"""When to write which checkpoint, what to keep, and which one to resume from.

Rank 0 writes, because replicas hold the same state; each rank adds its random generators. Reading
is different: every rank reads and checks for itself, so that nothing has to be believed.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, time

from horovod_train.checkpoint import store
from horovod_train.checkpoint.arrays import ArrayBlob, ReplicaState
from horovod_train.checkpoint.changes import document_changes, job_changes
from horovod_train.checkpoint.schema import StateDocument, checked
from horovod_train.checkpoint.write_report import WriteReport
from horovod_train.collectives.base import Communicator, allgather_json, broadcast_json, gather_to_rank_0
from horovod_train.config.schema import Checkpoint
from horovod_train.errors import CheckpointError, OperationalError, describe_ranks

log = logging.getLogger(__name__)

MAX_HISTORY = 100


@dataclass(frozen=True)
class Resumed:
    """What a rank takes over from a checkpoint.

    Attributes:
        name: Its name.
        state: Of the replica.
        progress: Where training stands, plain JSON.
        rng: This rank's random generators; None: those of another world.
        own: What else each rank alone had, by rank; empty where there was nothing.
        changes: What is not as it was when it was written, a line each; the order of samples aside.
    """

    name: str
    state: ReplicaState
    progress: Mapping[str, object]
    rng: bytes | None
    own: tuple[bytes, ...] = ()
    changes: tuple[str, ...] = ()


class CheckpointManager:
    """The checkpoints of one run.

    Args:
        directory: Folder that every rank can read and rank 0 can write.
        section: The job's ``checkpoint`` section.
        world: The ranks; every method but ``close`` is called by all of them.
        job: The resolved job, kept with each checkpoint.
        environment: Versions and code that this run trains with, kept as well.
        on_written: Called on rank 0 after each attempt to write, possibly from another thread.

    Raises:
        OperationalError: Another run writes to the folder.
    """

    def __init__(
        self,
        directory: Path,
        section: Checkpoint,
        world: Communicator,
        job: Mapping[str, object],
        on_written: Callable[[WriteReport], None] = lambda _: None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.directory = directory
        self._section = section
        self._world = world
        self._job = job
        self._on_written = on_written
        self._environment = dict(environment or {})
        self._history: list[dict[str, object]] = []
        self._writer = ThreadPoolExecutor(max_workers=1, initializer=_give_way)
        self._pending: Future[WriteReport] | None = None
        self._last_report: WriteReport | None = None
        self._saved: Mapping[str, object] | None = None
        self._lock: int | None = None
        self.last_write_s: float | None = None
        """Time the last write took, in seconds; None: nothing was written yet."""
        self._take_lock()

    def save(
        self,
        step: int,
        *,
        take_state: Callable[[bool], ReplicaState],
        rng: bytes,
        progress: Mapping[str, object],
        summary: Mapping[str, object],
        own: bytes = b"",
        wait: bool = False,
    ) -> None:
        """Save a checkpoint; in the background unless the job or ``wait`` says otherwise.

        A write that fails is reported and training goes on: the next one may succeed. Only with
        ``wait`` it is an error, because no next one follows.

        Args:
            step: Optimizer steps made.
            take_state: Returns the replica's state, copied when called with True.
            rng: This rank's random generators.
            progress: Where training stands, plain JSON.
            summary: What lists show.
            own: What else this rank alone has.
            wait: Return only when the checkpoint is on disk.

        Raises:
            CheckpointError: With ``wait``: it could not be written.
        """
        generators = self._world.allgather(rng)
        owns = gather_to_rank_0(self._world, own) if self._saved != progress else []
        if self._saved != progress and self._world.rank == 0:
            self._collect()
            in_background = self._section.background and not wait
            content = self._content(take_state(in_background), generators, owns, progress, summary)
            self._pending = self._writer.submit(self._write, step, content)
            if not in_background:
                self._collect()
        self._saved = dict(progress)
        if wait:
            self._raise_if_last_failed()

    def latest(self) -> Resumed | None:
        """Return the newest valid checkpoint, read and checked by this rank; None if there is none.

        Raises:
            CheckpointError: The job requires one and there is none, or a rank cannot read it.
        """
        if self._section.resume == "never":
            if self._world.rank == 0:
                self._quarantine_all()
            return None
        found = self._newest_valid() if self._world.rank == 0 else None
        name, problem = broadcast_json(self._world, found)
        if problem:
            raise CheckpointError(
                problem,
                hint="bring one back from a copy; or start anew with checkpoint.resume: never, or after "
                f"`horovod-train checkpoint discard {self.directory}`",
            )
        if name is None:
            if self._section.resume == "required":
                raise CheckpointError(
                    f"checkpoint.resume is required, but {self.directory} holds no valid checkpoint"
                )
            return None
        resumed, self._history = self._read_on_all_ranks(name)
        return resumed

    def at(self, step: int) -> Resumed:
        """Return the checkpoint of a step, read and checked by this rank. Waits for a write under way.

        Raises:
            CheckpointError: There is none, or a rank cannot read it.
        """
        problem = ""
        name = f"step-{step:012d}"
        if self._world.rank == 0:
            self._collect()
            found = [stored.name for stored in store.list_checkpoints(self.directory)]
            problem = "" if name in found else f"{self.directory} has no {name}"
        problem = broadcast_json(self._world, problem)
        if problem:
            raise CheckpointError(problem)
        resumed, _ = self._read_on_all_ranks(name)
        self._saved = resumed.progress
        return resumed

    def _read_on_all_ranks(self, name: str) -> tuple[Resumed, list[dict[str, object]]]:
        resumed, history, problem = self._read(name)
        problems = allgather_json(self._world, problem)
        failed = [rank for rank, found in enumerate(problems) if found]
        if failed or resumed is None:
            raise CheckpointError(
                f"{describe_ranks(failed)} cannot read {name}: {problems[failed[0]]}",
                hint="checkpoint.dir must be a folder that every host shares",
            )
        return resumed, history

    def note_resumed(self, name: str, changes: Sequence[str]) -> None:
        """Write into the checkpoints to come that training has gone on from one, and what was changed."""
        entry = {
            "checkpoint": name,
            "unix_time_s": time(),
            "world_size": self._world.size,
            "changes": list(changes),
        }
        self._history = [*self._history, entry][-MAX_HISTORY:]

    def close(self) -> None:
        """Finish writing and let go of the folder. Safe to call twice."""
        if self._pending is not None:
            self._collect()
        self._writer.shutdown()
        self._let_go()

    # -- writing

    def _content(
        self,
        state: ReplicaState,
        generators: list[bytes],
        owns: list[bytes],
        progress: Mapping[str, object],
        summary: Mapping[str, object],
    ) -> store.Content:
        arrays = {"model": state.model, "optimizer": state.optimizer, "rng": _by_rank(generators)}
        return store.Content(
            arrays={**arrays, "own": _by_rank(owns)} if any(owns) else arrays,
            documents={
                "state": {
                    "progress": dict(progress),
                    "optimizer_tree": state.optimizer_tree,
                    "scaler": dict(state.scaler),
                    "environment": self._environment,
                    "history": self._history,
                },
                "config": self._job,
            },
            summary={**summary, "world_size": self._world.size},
        )

    def _write(self, step: int, content: store.Content) -> WriteReport:
        started = perf_counter()
        path = self.directory / f"step-{step:012d}"
        try:
            manifest = store.write_checkpoint(self.directory, step, content)
            report = WriteReport(step, str(path), perf_counter() - started, manifest.size_bytes)
            self.last_write_s = report.seconds
        except (CheckpointError, OSError) as error:
            log.warning("checkpoint of step %d was not written: %s", step, error)
            report = WriteReport(step, str(path), perf_counter() - started, 0, str(error))
        self._on_written(report)
        try:
            self._prune()
        except OSError as error:
            log.warning("old checkpoints were not removed: %s", error)
        return report

    def _collect(self) -> None:
        """Wait for the write under way; two never overlap."""
        if self._pending is not None:
            self._last_report = self._pending.result()
            self._pending = None

    def _raise_if_last_failed(self) -> None:
        self._collect()
        error = broadcast_json(self._world, self._last_report.error if self._last_report else "")
        if error:
            raise CheckpointError(f"the last checkpoint was not written: {error}")

    def _prune(self) -> None:
        """Remove all but the newest and the best, never what is not known to be older."""
        stored = store.list_checkpoints(self.directory)
        keep = {checkpoint.step for checkpoint in stored[: self._section.keep_last]}
        best = self._best(stored)
        for checkpoint in stored:
            if checkpoint.step not in keep and checkpoint.step != best:
                store.remove(checkpoint)

    def _best(self, stored: list[store.StoredCheckpoint]) -> int | None:
        best = self._section.best
        if best is None:
            return None
        values: dict[int, float] = {}
        for checkpoint in stored:
            try:
                metrics = store.read_manifest(checkpoint.path).summary.get("metrics", {})
            except CheckpointError:
                continue
            if math.isfinite(metrics.get(best.metric, math.nan)):
                values[checkpoint.step] = metrics[best.metric]
        if not values:
            return None
        choose = min if best.mode == "min" else max
        return choose(values, key=lambda step: values[step])

    # -- reading

    def _newest_valid(self) -> tuple[str | None, str]:
        """Return the newest valid checkpoint, or what keeps the job from starting; never raises.

        Damaged ones that are newer are set aside: under their own names they would be taken for the
        newest when old ones are pruned. When none is valid, nothing is moved, and starting from zero is
        for the user to decide, however often the job is started.
        """
        try:
            found = store.list_checkpoints(self.directory)
            damaged: list[tuple[store.StoredCheckpoint, list[str]]] = []
            for checkpoint in found:
                problems = store.verify(checkpoint.path)
                if not problems:
                    self._quarantine(damaged)
                    if checkpoint.name != (name := f"step-{checkpoint.step:012d}"):
                        log.warning("%s is %s, by its manifest", checkpoint.name, name)
                    return checkpoint.name, ""
                damaged.append((checkpoint, problems))
            aside = store.list_damaged(self.directory)
        except OSError as error:
            return None, f"{self.directory} cannot be read: {error.strerror or error}"
        if not damaged and not aside:
            return None, ""
        count = len(damaged) + len(aside)
        first = damaged[0][1][0] if damaged else f"{aside[-1].name} was set aside before"
        return None, f"all {count} checkpoints in {self.directory} are damaged, the newest: {first}"

    def _quarantine(self, damaged: list[tuple[store.StoredCheckpoint, list[str]]]) -> None:
        for checkpoint, problems in damaged:
            aside = store.quarantine(checkpoint.path, store.DAMAGED)
            log.warning("skipping %s (kept as %s): %s", checkpoint.name, aside.name, "; ".join(problems))

    def _quarantine_all(self) -> None:
        """Make room for a run that starts anew where another one has been."""
        found = store.list_checkpoints(self.directory)
        for path in [*(checkpoint.path for checkpoint in found), *store.list_damaged(self.directory)]:
            store.quarantine(path, "earlier")
        if found:
            log.warning("starting anew: %d earlier checkpoint(s) are kept as earlier-*", len(found))

    def _read(self, name: str) -> tuple[Resumed | None, list[dict[str, object]], str]:
        """Return what this rank takes over, its history, and what went wrong; never raises: others wait."""
        try:
            content = store.read_checkpoint(self.directory / name)
            document = content.documents["state"]
            known = checked(StateDocument, document, f"{name}/state.json")
            rng = self._own_generators(content)
        except (CheckpointError, OSError) as error:
            return None, [], str(error)
        state = ReplicaState(
            model=content.arrays["model"],
            optimizer=content.arrays["optimizer"],
            optimizer_tree=known.optimizer_tree,
            scaler=known.scaler,
        )
        history = [entry.model_dump() for entry in known.history]
        changes = tuple(self._changes(content.documents["config"], known.environment))
        own = tuple(bytes(blob.data) for blob in content.arrays.get("own", {}).values())
        return Resumed(name, state, document["progress"], rng, own, changes), history, ""

    def _own_generators(self, content: store.Content) -> bytes | None:
        """Return this rank's generators. They belong to a rank of a world; another world starts fresh."""
        if content.summary["world_size"] != self._world.size:
            return None
        name = f"rank.{self._world.rank}"
        if name not in content.arrays["rng"]:
            raise CheckpointError(f"the random generators of {name} are missing")
        return bytes(content.arrays["rng"][name].data)

    def _changes(self, job: object, environment: Mapping[str, str]) -> Iterator[str]:
        if isinstance(job, dict):
            yield from job_changes(job, self._job)
        if environment and self._environment:
            yield from document_changes(environment, self._environment)

    # -- the folder

    def _take_lock(self) -> None:
        """One run writes to a folder: a second one would prune the first one's checkpoints."""
        problem = ""
        if self._world.rank == 0:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                self._lock = os.open(self.directory / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
                self._lock_file(self._lock)
                store.remove_leftovers(self.directory)
            except BlockingIOError:
                problem = f"another run is writing checkpoints to {self.directory}"
            except OSError as error:
                problem = f"cannot use {self.directory} for checkpoints: {error.strerror}"
        problem = broadcast_json(self._world, problem)
        if problem:
            self._let_go()
            raise OperationalError(problem, hint="wait for it, or give this job another name")

    def _let_go(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _lock_file(self, handle: int) -> None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}:
                raise
            log.warning("%s has no locks: start one run of this name at a time", self.directory)


def _by_rank(pieces: Sequence[bytes]) -> dict[str, ArrayBlob]:
    return {f"rank.{rank}": ArrayBlob("uint8", (len(data),), data) for rank, data in enumerate(pieces)}


def _give_way() -> None:
    """Let training have the processor first: on Linux a thread has a priority of its own."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
