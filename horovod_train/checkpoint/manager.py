"""Writing of checkpoints, removal of old ones, and selection of the one to resume from.

    CheckpointManager         the checkpoints of one run
    LoadedCheckpoint          content of a checkpoint that a rank loads to resume
    find_holders, Holders     which ranks have an array, and the first of these, which writes it
    document_changes, job_changes
                              changes of the job and the environment since a checkpoint was written, which
                              are reported, and no error

If replicas are identical, rank 0 writes. If the model is sharded, the first rank that has an array writes
it. Every rank itself reads and verifies the state that it loads; no state is broadcast.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from time import perf_counter, time
from typing import Any

from pydantic import ValidationError

from horovod_train.checkpoint import store
from horovod_train.checkpoint.arrays import ArrayBlob, ReplicaState, merge_trees
from horovod_train.checkpoint.store import StateDocument, checked, newest_valid
from horovod_train.checkpoint.writing import Content, WriteReport, Writing, begin, temporary_name
from horovod_train.collectives.base import Communicator, allgather_json, broadcast_json, gather_to_rank_0
from horovod_train.config.optimization import Checkpoint
from horovod_train.config.schema import Job
from horovod_train.errors import CheckpointError, OperationalError, describe_ranks

Key = str


def keyed(state: ReplicaState) -> Iterator[tuple[Key, ArrayBlob]]:
    """Yield the arrays of a rank, or parts of arrays, with keys that identify them across ranks."""
    for section, arrays in (("model", state.model), ("optimizer", state.optimizer)):
        for name, blob in arrays.items():
            yield key_of(section, name, blob), blob


def key_of(section: str, name: str, blob: ArrayBlob) -> Key:
    """Return a key that identifies an array, or a part of one.

    >>> key_of("model", "weight", ArrayBlob("float32", (2,), bytes(8)))
    'model.weight'
    """
    if blob.part is None:
        return f"{section}.{name}"
    return f"{section}.{name} {list(blob.part.start)} {list(blob.shape)}"


@dataclass(frozen=True)
class Holders:
    """The ranks that have each array.

    Attributes:
        rank: This rank.
        of: Ranks that have an array or part, in ascending order, by its key; for the arrays of all ranks.
        optimizer_tree: Structure of the optimizer's state, merged over all ranks.
    """

    rank: int
    of: Mapping[Key, tuple[int, ...]]
    optimizer_tree: Any

    @cached_property
    def writers(self) -> tuple[int, ...]:
        """Ranks that write to a checkpoint: rank 0, and the first rank that has each array."""
        return tuple(sorted({0, *(ranks[0] for ranks in self.of.values())}))

    def arrays_to_write(self, section: str, arrays: Mapping[str, ArrayBlob]) -> dict[str, ArrayBlob]:
        """Return the arrays that this rank must write: those of which it is the first holder."""
        return {
            name: blob
            for name, blob in arrays.items()
            if self.of[key_of(section, name, blob)][0] == self.rank
        }

    def groups(self, keys: Iterable[Key]) -> dict[tuple[int, ...], list[Key]]:
        """Return the keys that several ranks have, grouped by these ranks."""
        groups: dict[tuple[int, ...], list[Key]] = {}
        for key in keys:
            if len(self.of[key]) > 1:
                groups.setdefault(self.of[key], []).append(key)
        return groups


def find_holders(world: Communicator, state: ReplicaState) -> Holders:
    """Return the holders of each array. Every rank must call it: it communicates if the state is sharded.

    Raises:
        CheckpointError: Ranks have optimizer states that contradict each other.
    """
    mine = [key for key, _ in keyed(state)]
    if not state.is_sharded:
        everyone = tuple(range(world.size))
        return Holders(world.rank, dict.fromkeys(mine, everyone), state.optimizer_tree)
    of_ranks = allgather_json(world, [mine, state.optimizer_tree])
    found: dict[Key, list[int]] = {}
    for rank, (keys, _) in enumerate(of_ranks):
        for key in keys:
            found.setdefault(key, []).append(rank)
    tree = merge_trees([tree for _, tree in of_ranks])
    return Holders(world.rank, {key: tuple(ranks) for key, ranks in found.items()}, tree)


# Fields of a job that do not determine results: names, and how ranks are launched and supervised. Another
# strategy trains the same weights.
NOT_COMPARED = {
    *("name", "run_dir", "run_dir_access"),
    *("strategy", "checkpoint", "metrics", "health", "launch"),
}
MAX_SHOWN_CHARS = 120


def document_changes(before: object, now: object, path: str = "") -> Iterator[str]:
    """Yield a line for each value that differs between two JSON documents.

    >>> list(document_changes({"lr": {"base": 1}, "seed": 0}, {"lr": {"base": 2}, "seed": 0}))
    ['lr.base: 1 -> 2']
    """
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(before.keys() | now.keys()):
            yield from document_changes(before.get(key), now.get(key), f"{path}.{key}" if path else key)
    elif before != now:
        yield f"{path}: {_shown(before)} -> {_shown(now)}"


def job_changes(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """Return a line for each difference between two resolved jobs that affects results."""
    old = _migrated(before)
    names = [name for name in Job.model_fields if name not in NOT_COMPARED]
    return [line for name in names for line in document_changes(old.get(name), now.get(name), name)]


def _migrated(job: Mapping[str, object]) -> Mapping[str, object]:
    """Return a stored job with defaults for fields that were added later."""
    try:
        return Job.model_validate(dict(job)).model_dump(mode="json")
    except ValidationError:
        return job


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 3] + "..."


log = logging.getLogger(__name__)

MAX_HISTORY = 100
MAX_WAIT_AT_THE_END_S = 60.0
"""Time for which a rank that ends waits for other writers of a checkpoint."""


@dataclass(frozen=True)
class LoadedCheckpoint:
    """Content of a checkpoint that a rank loads to resume.

    Attributes:
        state: State of the replica; arrays are read and verified on demand.
        progress: Progress of training, plain JSON.
        rng: This rank's random generators; None: the checkpoint was written with another number of ranks.
        own: Per-rank state by rank, empty bytes for a rank without one; an empty tuple if no rank has one.
        changes: Changes of job and environment since the checkpoint was written, except the order of samples.
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
        directory: Folder that every rank can read. Rank 0 must be able to write to it; if the model is
            sharded, every rank must.
        section: The job's ``checkpoint`` section.
        world: Communicator of all ranks. Every rank must call the methods, except ``close``.
        job: The resolved job, stored with each checkpoint.
        on_written: Called on rank 0 after each attempt to write, possibly from another thread.
        environment: Versions and digests of code of this run, stored with each checkpoint.

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
        self._writer = ThreadPoolExecutor(max_workers=1, initializer=_lower_priority)
        self._pending: Future[str] | None = None
        self._writing: Writing | None = None
        self._last_report: WriteReport | None = None
        self._saved: Mapping[str, object] | None = None
        self._lock: int | None = None
        self.last_write_s: float | None = None
        """Duration of the last successful write on rank 0, in seconds; None: there was none."""
        self._take_lock()

    def save(
        self,
        step: int,
        *,
        take_state: Callable[[bool], ReplicaState],
        rng: bytes,
        progress: Mapping[str, object],
        summary: Mapping[str, object],
        holders: Holders | None = None,
        own: bytes = b"",
        wait: bool = False,
    ) -> None:
        """Save a checkpoint, in the background if the job enables it and ``wait`` is False.

        A failed write is reported, and training continues, because the next write may succeed. With ``wait``,
        it is an error, because no other write follows.

        Args:
            step: Number of optimizer steps performed.
            take_state: Returns this rank's part of the replica's state; copies it if called with True.
            rng: This rank's random generators.
            progress: Progress of training, plain JSON.
            summary: Values that lists of checkpoints show.
            holders: Ranks that have each array; None: rank 0 has all arrays.
            own: Per-rank state of this rank.
            wait: Return when the checkpoint is on disk.

        Raises:
            CheckpointError: ``wait`` is True, and the checkpoint could not be written.
        """
        generators = self._world.allgather(rng)
        if self._saved != progress or (wait and self._last_error()):
            owns = gather_to_rank_0(self._world, own)
            self._join_pending_write()
            in_background = self._section.background and not wait
            writing = self._begin(step, (0,) if holders is None else holders.writers)
            self._writing = writing
            if writing is not None and self._world.rank in writing.writers:
                content = self._content(
                    take_state(in_background), holders, generators, owns, progress, summary
                )
                self._pending = self._writer.submit(self._write, writing, content)
            if not in_background:
                self._join_pending_write()
        self._saved = dict(progress)
        if wait and (error := self._last_error()):
            raise CheckpointError(f"the last checkpoint was not written: {error}")

    def latest(self) -> LoadedCheckpoint | None:
        """Return the newest valid checkpoint; None: there is none, or ``checkpoint.resume`` is ``never``.

        With ``never``, rank 0 renames existing checkpoints, so that they are no longer listed.

        Raises:
            CheckpointError: All checkpoints are damaged, a rank cannot read the newest valid one, or the job
                requires a checkpoint and there is none.
        """
        if self._section.resume == "never":
            if self._world.rank == 0:
                self._quarantine_all()
            return None
        name, problem = newest_valid(self.directory, self._world)
        if problem:
            raise CheckpointError(
                problem,
                hint="restore one from a copy; or start from the beginning with checkpoint.resume: never, or "
                f"after `horovod-train checkpoint discard {self.directory}`",
            )
        if name is None:
            if self._section.resume == "required":
                raise CheckpointError(
                    f"checkpoint.resume is required, but {self.directory} holds no valid checkpoint"
                )
            return None
        resumed, self._history = self._read_on_all_ranks(name)
        return resumed

    def steps(self) -> list[int]:
        """Return the steps that have a complete checkpoint. Not a collective."""
        return [stored.step for stored in store.list_checkpoints(self.directory)]

    def at(self, step: int, *, discards_later: bool = False) -> LoadedCheckpoint:
        """Return the checkpoint of a step, after a write in progress has completed.

        Args:
            step: The step.
            discards_later: Rename later checkpoints to ``undone-*``: training takes another course from here.

        Raises:
            CheckpointError: The step has no checkpoint, or a rank cannot read it.
        """
        problem = ""
        name = f"step-{step:012d}"
        self._join_pending_write()
        if self._world.rank == 0:
            found = store.list_checkpoints(self.directory)
            if step not in [stored.step for stored in found]:
                problem = f"{self.directory} has no {name}"
            elif discards_later:
                for later in [stored for stored in found if stored.step > step]:
                    store.quarantine(later.path, "undone")
        problem = broadcast_json(self._world, problem)
        if problem:
            raise CheckpointError(problem)
        resumed, _ = self._read_on_all_ranks(name)
        self._saved = resumed.progress
        return resumed

    def _read_on_all_ranks(self, name: str) -> tuple[LoadedCheckpoint, list[dict[str, object]]]:
        resumed, history, problem = self._read(name)
        problems = allgather_json(self._world, problem)
        failed = [rank for rank, found in enumerate(problems) if found]
        if failed or resumed is None:
            raise CheckpointError(
                f"{describe_ranks(failed)} cannot read {name}: {problems[failed[0]]}",
                hint="checkpoint.dir must be a folder that every host shares",
            )
        return resumed, history

    def mark_resumed(self, name: str, changes: Sequence[str]) -> None:
        """Record a resume and its changes in the history that later checkpoints store."""
        entry = {
            "checkpoint": name,
            "unix_time_s": time(),
            "world_size": self._world.size,
            "changes": list(changes),
        }
        self._history = [*self._history, entry][-MAX_HISTORY:]

    def close(self) -> None:
        """Complete writes in progress and release the folder's lock. May be called more than once."""
        if self._writing is not None:
            self._writing.give_up_after(MAX_WAIT_AT_THE_END_S)
        self._collect()
        self._writer.shutdown()
        self._release_lock()

    # -- writing

    def _begin(self, step: int, writers: Sequence[int]) -> Writing | None:
        """Create the temporary folder of a checkpoint; None: rank 0 cannot create it."""
        folder, problem = self.directory / temporary_name(step), ""
        writing = Writing(step, folder, writers)
        if self._world.rank == 0:
            try:
                begin(folder)
            except CheckpointError as error:
                problem = str(error)
                self._report(writing, perf_counter(), 0, problem)
        if len(writers) == 1:
            return None if problem else writing
        name, problem = broadcast_json(self._world, [folder.name, problem])
        return None if problem else Writing(step, self.directory / name, writers)

    def _content(
        self,
        state: ReplicaState,
        holders: Holders | None,
        generators: list[bytes],
        owns: list[bytes],
        progress: Mapping[str, object],
        summary: Mapping[str, object],
    ) -> Content:
        """Return the files that this rank writes."""
        arrays: dict[str, Mapping[str, ArrayBlob]] = {"model": state.model, "optimizer": state.optimizer}
        if holders is not None:
            arrays = {section: holders.arrays_to_write(section, found) for section, found in arrays.items()}
        if self._world.rank != 0:
            return Content(arrays, {}, {})
        arrays["rng"] = _by_rank(generators)
        return Content(
            arrays={**arrays, "own": _by_rank(owns)} if any(owns) else arrays,
            documents={
                "state": {
                    "progress": dict(progress),
                    "optimizer_tree": state.optimizer_tree if holders is None else holders.optimizer_tree,
                    "scaler": dict(state.scaler),
                    "environment": self._environment,
                    "history": self._history,
                },
                "config": self._job,
            },
            summary={**summary, "world_size": self._world.size},
        )

    def _write(self, writing: Writing, content: Content) -> str:
        """Write this rank's files; rank 0 also commits the checkpoint. Return the error, empty if none."""
        started = perf_counter()
        size_bytes, error = 0, ""
        try:
            if self._world.rank == 0:
                size_bytes = writing.complete(content).size_bytes
                self.last_write_s = perf_counter() - started
            else:
                writing.write_part(self._world.rank, content)
        except (CheckpointError, OSError, ValueError) as problem:  # ValueError: damaged note (writing.py)
            error = str(problem)
        if self._world.rank == 0:
            self._report(writing, started, size_bytes, error)
        return error

    def _report(self, writing: Writing, started: float, size_bytes: int, error: str) -> None:
        if error:
            log.warning("checkpoint of step %d was not written: %s", writing.step, error)
        path = str(writing.folder.with_name(f"step-{writing.step:012d}"))
        report = self._last_report = WriteReport(
            writing.step, path, perf_counter() - started, size_bytes, error
        )
        self._on_written(report)
        try:
            self._prune()
        except OSError as problem:
            log.warning("old checkpoints were not removed: %s", problem)

    def _join_pending_write(self) -> None:
        """Wait for the write in progress on all of its writers, so that two writes never overlap."""
        writing = self._writing
        if writing is not None and len(writing.writers) > 1:
            # Rank 0 waits for a file of every writer. A rank with a failed disk may be unable to write it, so
            # its error is also sent to rank 0.
            errors = allgather_json(self._world, self._collect() if self._world.rank != 0 else "")
            for rank, error in enumerate(errors):
                if error:
                    writing.fail(f"{describe_ranks([rank])}: {error}")
            if self._collect():  # other ranks may have written after rank 0 removed the folder
                writing.remove()
        self._collect()

    def _collect(self) -> str:
        """Wait for this rank's part of the write in progress; return its error, or an empty string."""
        pending, self._pending, self._writing = self._pending, None, None
        return "" if pending is None else pending.result()

    def _last_error(self) -> str:
        """Return the error of the last write after it has ended; empty: it succeeded. Collective."""
        self._join_pending_write()
        error: str = broadcast_json(self._world, self._last_report.error if self._last_report else "")
        return error

    def _prune(self) -> None:
        """Remove all checkpoints except the newest ``keep_last`` ones and the best one."""
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

    def _quarantine_all(self) -> None:
        """Rename all checkpoints of earlier runs, because this run starts from the beginning."""
        found = store.list_checkpoints(self.directory)
        for path in [*(checkpoint.path for checkpoint in found), *store.list_damaged(self.directory)]:
            store.quarantine(path, "earlier")
        if found:
            log.warning(
                "starting from the beginning: %d earlier checkpoint(s) were renamed to earlier-*", len(found)
            )

    def _read(self, name: str) -> tuple[LoadedCheckpoint | None, list[dict[str, object]], str]:
        """Return content, history, and error. The error is not raised, because other ranks would block."""
        try:
            content = store.read_checkpoint(self.directory / name)
            document = content.documents["state"]
            known = checked(StateDocument, document, f"{name}/state.json")
            rng = self._rank_generators(content)
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
        return LoadedCheckpoint(name, state, document["progress"], rng, own, changes), history, ""

    def _rank_generators(self, content: store.Stored) -> bytes | None:
        """Return this rank's generators; None: they were saved with another number of ranks."""
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
        """Lock the folder for this run: a second run would remove the first run's checkpoints."""
        problem = hint = ""
        if self._world.rank == 0:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                self._lock = os.open(self.directory / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
                self._lock_file(self._lock)
                store.remove_leftovers(self.directory)
            except BlockingIOError:
                problem = f"another run is writing checkpoints to {self.directory}"
                hint = "wait for it, or give this job another name"
            except OSError as error:
                problem = f"cannot use {self.directory} for checkpoints: {error.strerror}"
                hint = "set checkpoint.dir or run_dir to a writable folder"
        problem, hint = broadcast_json(self._world, [problem, hint])
        if problem:
            self._release_lock()
            raise OperationalError(problem, hint=hint)

    def _release_lock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _lock_file(self, handle: int) -> None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}:
                raise
            log.warning("%s does not support locks: start one run of this name at a time", self.directory)


def _by_rank(pieces: Sequence[bytes]) -> dict[str, ArrayBlob]:
    return {f"rank.{rank}": ArrayBlob("uint8", (len(data),), data) for rank, data in enumerate(pieces)}


def _lower_priority() -> None:
    """Lower the priority of the writer thread: on Linux, each thread has its own priority."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
