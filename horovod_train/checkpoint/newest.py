"""Selection of the checkpoint to resume from: the newest with valid checksums. Every rank must call it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from horovod_train.checkpoint import store
from horovod_train.collectives.base import Communicator, allgather_json, broadcast_json
from horovod_train.errors import CheckpointError

log = logging.getLogger(__name__)

Damaged = tuple[store.StoredCheckpoint, list[str]]


def newest_valid(directory: Path, world: Communicator) -> tuple[str | None, str]:
    """Return the name of the newest valid checkpoint, or None; and the problem that prevents a start, if any.

    Newer damaged checkpoints are quarantined, because they would count as the newest ones when old ones are
    removed. If all are damaged, nothing is renamed and a problem is returned, at every start of the job: only
    the user may decide to train from the beginning.
    """
    found, problem = _listed(directory, world)
    damaged: list[Damaged] = []
    for checkpoint in found:
        problems, problem = _problems_of(checkpoint.path, world)
        if problem:
            break
        if not problems:
            if world.rank == 0:
                _quarantine(damaged)
                if checkpoint.name != (own_name := f"step-{checkpoint.step:012d}"):
                    log.warning("%s is %s, by its manifest", checkpoint.name, own_name)
            return checkpoint.name, ""
        damaged.append((checkpoint, problems))
    if problem:
        return None, f"{directory} cannot be read: {problem}"
    return None, str(broadcast_json(world, _why_none(directory, damaged) if world.rank == 0 else ""))


def _listed(directory: Path, world: Communicator) -> tuple[list[store.StoredCheckpoint], str]:
    """Return the checkpoints that rank 0 lists, and the error if it cannot list them."""
    found: list[store.StoredCheckpoint] = []
    problem = ""
    if world.rank == 0:
        try:
            found = store.list_checkpoints(directory)
        except OSError as error:
            problem = error.strerror or str(error)
    listed, problem = broadcast_json(world, [[[each.name, each.step] for each in found], problem])
    return [store.StoredCheckpoint(directory / name, step) for name, step in listed], problem


def _why_none(directory: Path, damaged: Sequence[Damaged]) -> str:
    quarantined = store.list_damaged(directory)
    if not damaged and not quarantined:
        return ""
    count = len(damaged) + len(quarantined)
    first = damaged[0][1][0] if damaged else f"{quarantined[-1].name} was quarantined before"
    return f"all {count} checkpoints in {directory} are damaged, the newest: {first}"


def _problems_of(path: Path, world: Communicator) -> tuple[list[str], str]:
    """Return damage of a checkpoint, and the error if rank 0 cannot read a file; each rank verifies a part.

    If another rank finds damage, rank 0 verifies that rank's files again: hosts may have different folders
    under this path, which is not damage.
    """
    files: list[str] = []
    problems: list[str] = []
    unreadable = ""
    if world.rank == 0:
        try:
            files = list(store.read_manifest(path).files)
        except CheckpointError as error:
            problems = [error.message]
        except OSError as error:
            unreadable = error.strerror or str(error)
    files, problems, unreadable = broadcast_json(world, [files, problems, unreadable])
    if problems or unreadable:
        return problems, unreadable
    mine = files[world.rank :: world.size]
    problems, unreadable = _verified(path, mine)
    suspicious = allgather_json(world, mine if (problems or unreadable) and world.rank else [])
    if world.rank == 0 and any(suspicious) and not unreadable:
        of_others, unreadable = _verified(path, [file for found in suspicious for file in found])
        problems += of_others
    problems, unreadable = broadcast_json(world, [problems, unreadable])
    return problems, unreadable


def _verified(path: Path, files: Sequence[str]) -> tuple[list[str], str]:
    try:
        return store.verify(path, files), ""
    except OSError as error:
        return [], error.strerror or str(error)


def _quarantine(damaged: Sequence[Damaged]) -> None:
    for checkpoint, problems in damaged:
        quarantined = store.quarantine(checkpoint.path, store.DAMAGED)
        log.warning("skipping %s (kept as %s): %s", checkpoint.name, quarantined.name, "; ".join(problems))
