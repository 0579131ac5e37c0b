"""Comparisons of ranks, and the check that results are finite.

    check_replicas_identical   weights, buffers and optimizer state are bitwise equal on all ranks
    check_same_files, check_same_data
                               all ranks have the same samples in the same order
    check_world                before training: the number of ranks is correct, and all ranks run the same
                               job and code
    SkipPolicy, FiniteGuard    handling of a loss or gradient that is not finite

If the model is sharded, copies of the same shard are compared.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import numpy as np

from horovod_train.checkpoint.arrays import ArrayBlob, ReplicaState
from horovod_train.checkpoint.manager import Holders, find_holders, keyed
from horovod_train.checks.hosts import CLOCK_HINT, clock_mismatch, fingerprint_mismatch
from horovod_train.collectives.base import Communicator, allgather_json
from horovod_train.config.schema import Health, Job
from horovod_train.errors import DesyncError, NumericError, UserError, WorldError, describe_ranks, result_of

MAX_GROUPS = 4
SETTINGS = "optimizer settings"
_WEIGHTS = np.random.RandomState(0).randint(0, 2**63, 4096, np.uint64) * np.uint64(2) + np.uint64(1)


def fingerprints(state: ReplicaState) -> dict[str, str]:
    """Return hashes of the arrays, by key, and the optimizer settings, for bitwise comparison of ranks."""
    return {**{key: _hash_of(blob) for key, blob in keyed(state)}, SETTINGS: _settings(state)}


def digest(arrays: Iterable[tuple[str, ArrayBlob]]) -> str:
    """Return a short, non-cryptographic digest of arrays, at memory bandwidth.

    Each row of 64-bit words is multiplied by the same odd random numbers and summed modulo 2^64. Arrays that
    differ by accident have equal digests with a probability of about 2^-64.
    """
    hasher = hashlib.blake2b(digest_size=16)
    for key, blob in arrays:
        words = np.frombuffer(blob.data, np.uint64, count=len(blob.data) // 8)
        num_rows = len(words) // len(_WEIGHTS)
        rows = words[: num_rows * len(_WEIGHTS)].reshape(num_rows, len(_WEIGHTS)) @ _WEIGHTS
        hasher.update(f"{key} {blob.dtype} {blob.shape}\0".encode())
        hasher.update(rows.tobytes())
        hasher.update(bytes(blob.data[num_rows * len(_WEIGHTS) * 8 :]))
    return hasher.hexdigest()


def check_before_saving(world: Communicator, state: ReplicaState, step: int) -> Holders:
    """Raise ``DesyncError`` if copies of a state differ between ranks; return its holders. Collective."""
    holders = find_holders(world, state)
    arrays = dict(keyed(state))
    groups = holders.groups(arrays)
    mine = {
        describe_ranks(ranks): digest((key, arrays[key]) for key in keys) for ranks, keys in groups.items()
    }
    if _differing(allgather_json(world, {**mine, SETTINGS: _settings(state)}), is_sharded=True):
        _compare_each(world, state, holders, f"after step {step}, which is therefore not saved")
    return holders


def check_replicas_identical(world: Communicator, state: ReplicaState, when: str) -> None:
    """Raise ``DesyncError`` with the first array that differs and its ranks, if copies differ. Collective.

    Args:
        world: The communicator.
        state: This rank's state.
        when: Adverbial phrase for the error message, such as "after step 100".
    """
    _compare_each(world, state, find_holders(world, state), when)


def _compare_each(world: Communicator, state: ReplicaState, holders: Holders, when: str) -> None:
    """Compare one hash per group of ranks; if any differ, compare each array, and raise ``DesyncError``."""
    arrays = dict(keyed(state))
    groups = holders.groups(arrays)
    shared = {SETTINGS: _settings(state)}
    shared |= {key: _hash_of(arrays[key]) for keys in groups.values() for key in keys}
    of_groups = {
        describe_ranks(ranks): [(key, shared[key]) for key in sorted(keys)] for ranks, keys in groups.items()
    }
    whole = {SETTINGS: shared[SETTINGS], **{name: repr(found) for name, found in of_groups.items()}}
    wholes = allgather_json(world, {name: _hash(text.encode()) for name, text in whole.items()})
    wrong = _differing(wholes, is_sharded=True)
    if not wrong:
        return
    everyone = allgather_json(world, shared)
    differing = _differing(everyone, is_sharded=state.is_sharded)
    raise DesyncError(
        f"ranks differ {when}: {_who_differs([found.get(wrong[0]) for found in wholes])}, in "
        f"{len(differing)} of {len(set().union(*everyone))} arrays, first {differing[0]}",
        hint="look for code that changes weights on some ranks only; resume from the last checkpoint",
    )


def _settings(state: ReplicaState) -> str:
    """Return the state other than arrays as JSON, without the optimizer's state if that is sharded."""
    return json.dumps([None if state.is_sharded else state.optimizer_tree, dict(state.scaler)])


def _hash(data: bytes | memoryview) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _hash_of(blob: ArrayBlob) -> str:
    return f"{blob.dtype} {list(blob.shape)} {_hash(blob.data)}"


def _differing(everyone: Sequence[Mapping[str, str]], *, is_sharded: bool) -> list[str]:
    """Return the keys whose values differ between ranks. If sharded, ranks without the key are ignored."""
    found: dict[str, set[str | None]] = {}
    for key in set().union(*everyone):
        found[key] = {of_rank.get(key) for of_rank in everyone} - ({None} if is_sharded else set())
    return sorted(key for key, values in found.items() if len(values) > 1)


def _who_differs(values: Sequence[str | None]) -> str:
    """Return a text with the ranks that differ from the majority; without a majority, with all groups.

    Args:
        values: Compared value of each rank; None: the rank has no value.

    >>> _who_differs(["a", "a", "b"]), _who_differs(["a", None, "b"])
    ('rank 2 against the others', 'rank 0 against rank 2')
    """
    groups: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        if value is not None:
            groups.setdefault(value, []).append(rank)
    largest = max(groups.values(), key=len)
    if 2 * len(largest) > sum(map(len, groups.values())):
        outliers = [rank for ranks in groups.values() if ranks is not largest for rank in ranks]
        return f"{describe_ranks(outliers)} against the others"
    named = [describe_ranks(ranks) for ranks in list(groups.values())[:MAX_GROUPS]]
    return " against ".join([*named, *(["others"] if len(groups) > MAX_GROUPS else [])])


class SkipPolicy:
    """Decides whether training ends with a step that was skipped because it was not finite.

    Args:
        health: Which steps may be skipped, and how many in a row.
        scaler_skips: Whether a loss scaler is in use, which causes overflows to find the largest scale.
    """

    def __init__(self, health: Health, *, scaler_skips: bool) -> None:
        self._health = health
        self._scaler_skips = scaler_skips
        self.num_skipped_in_a_row = 0
        self.has_ended = False

    def record(self, *, is_used: bool, is_loss_finite: bool) -> None:
        """Record a step, and set ``has_ended``: whether training ends with this step."""
        self.num_skipped_in_a_row = 0 if is_used else self.num_skipped_in_a_row + 1
        may_skip = self._health.non_finite == "skip" or (self._scaler_skips and is_loss_finite)
        is_too_many = self.num_skipped_in_a_row > self._health.max_skipped_steps
        self.has_ended = not is_used and (is_too_many or not may_skip)

    def reset(self) -> None:
        """Reset the count of skipped steps when training continues, possibly from another state."""
        self.num_skipped_in_a_row, self.has_ended = 0, False


NOTHING_COUNTED_HINT = (
    "leave out samples without anything to count, use larger batches, or skip such steps with "
    "health.non_finite: skip"
)


class FiniteGuard:
    """Raises an error if a step was not finite and the job does not allow it to be skipped.

    The weights were not updated in such a step. All ranks have the same loss and gradients, so they decide
    identically. ``health`` and ``scaler_skips`` are the arguments of ``SkipPolicy``.
    """

    def __init__(self, health: Health, world: Communicator, *, scaler_skips: bool) -> None:
        self._world = world
        self._policy = SkipPolicy(health, scaler_skips=scaler_skips)

    def check(self, step: int, *, is_finite: bool, loss: float, local_loss: float) -> None:
        """Raise ``NumericError`` if a step was not finite and must not be skipped. Collective."""
        self._policy.record(is_used=is_finite, is_loss_finite=math.isfinite(loss))
        if not self._policy.has_ended:
            return
        bad = self._ranks_without_loss(loss, local_loss)
        is_uncounted = math.isnan(loss) and not bad  # 0 / 0; an overflow of finite numbers is infinite
        error = NumericError(
            _describe(step, loss, bad), hint=NOTHING_COUNTED_HINT if is_uncounted else self._hint()
        )
        self.reset()  # for a user's loop that continues after this error
        raise error

    def reset(self) -> None:
        """Reset the count of skipped steps when training continues from another state."""
        self._policy.reset()

    def _ranks_without_loss(self, loss: float, local_loss: float) -> list[int]:
        """Return the ranks whose part of the loss is not finite. Collective if the loss is not finite."""
        if math.isfinite(loss):
            return []
        flags = self._world.allgather(b"\0" if math.isfinite(local_loss) else b"\1")
        return [rank for rank, flag in enumerate(flags) if flag == b"\1"]

    def _hint(self) -> str:
        skipped = self._policy.num_skipped_in_a_row
        if skipped > 1:
            return f"{skipped} steps in a row could not be used: lower base_lr or set clip_grad_norm"
        return "lower base_lr, set clip_grad_norm, or skip such steps with health.non_finite: skip"


def _describe(step: int, loss: float, bad: list[int]) -> str:
    if math.isfinite(loss):
        return f"step {step}: the loss is {loss:g}, but a gradient is not finite"
    cause = describe_ranks(bad) if bad else "an overflow in the sum over ranks"
    if math.isnan(loss) and not bad:
        cause = "a count of 0: the loss is a sum and a count, and no sample of this step is counted"
    return f"step {step}: the loss is {loss} because of {cause}"


MAX_NAMED = 4
SEVERAL_MODELS = (
    "hosts whose GPUs are of several models need one engine for all: HOROVOD_BUILD_CUDA_CC_LIST=80,90 (say) "
    "at `horovod-train engine build` on each"
)


def check_world(job: Job, world: Communicator, environment: Mapping[str, str]) -> None:
    """Raise ``WorldError`` if the number of ranks is not the job's, or if ranks differ. Collective.

    Without this check, a difference may cause a hang or diverging weights.

    Job, environment (``environment_fingerprint``: code, versions, engine) and clocks are compared.
    """
    wanted = job.launch.num_ranks
    if wanted is not None and wanted != world.size:
        raise WorldError(
            f"the job asks for {wanted} ranks, but this world has {world.size}",
            hint="start as many ranks as launch.num_ranks says, or leave it out",
        )
    if world.size == 1:
        return
    mine = {"job": _digest_of_job(job.model_dump_json()), **environment}
    known = allgather_json(world, [world.host, mine])
    hosts = [host for host, _ in known]
    check_fingerprints(hosts, [fingerprint for _, fingerprint in known])
    # The all-gather above has synchronized the ranks, so a difference in time is a difference of clocks.
    check_clocks(hosts, allgather_json(world, time.time()), job.health.max_clock_offset_s)


def check_fingerprints(hosts: Sequence[str], fingerprints: Sequence[Mapping[str, str]]) -> None:
    """Raise ``WorldError`` with ranks, hosts and values if the fingerprints of ranks differ."""

    def named(ranks: Sequence[str]) -> str:
        numbers = [int(rank) for rank in ranks]
        where = ", ".join(sorted({hosts[rank] for rank in numbers}))
        return f"{describe_ranks(numbers)} ({where})"

    found = fingerprint_mismatch({str(rank): each for rank, each in enumerate(fingerprints)}, named)
    if found is not None:
        more = f"; and {len(found.lines) - MAX_NAMED} more" if len(found.lines) > MAX_NAMED else ""
        raise WorldError(
            "job, code or environment differ between ranks. " + " | ".join(found.lines[:MAX_NAMED]) + more,
            hint="install the same job, code, packages and engine on all hosts"
            + (f"; {SEVERAL_MODELS}" if any("horovod build" in line for line in found.lines) else ""),
        )


def check_clocks(hosts: Sequence[str], times_s: Sequence[float], max_offset_s: float) -> None:
    """Raise ``WorldError`` if clocks differ, because logs and metrics of ranks could not be ordered.

    The clocks of all ranks must be read at the same moment.
    """
    by_rank = {str(rank): time_s for rank, time_s in enumerate(times_s)}
    found = clock_mismatch(by_rank, max_offset_s, named=lambda rank: f"{hosts[int(rank)]} (rank {rank})")
    if found is not None:
        raise WorldError(found.lines[0], hint=CLOCK_HINT)


def _digest_of_job(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


log = logging.getLogger(__name__)

NUM_SAMPLES = 8
NUM_MORE_READS = 5
"""Repeated reads of samples that differ between ranks: random augmentation differs between reads, too."""
MAX_DEPTH = 10
HINT = (
    "all ranks need the same samples in the same order: sort the result of os.listdir and glob, seed what is "
    "shuffled, and do not select samples by rank, because samples are split over ranks later"
)
Digests = dict[str, list[str]]
"""Digest of each part of a batch, by sample if the part has a row for each, or else one digest. The name of a
part begins with its kind: text or data."""


def compared_samples(length: int, most: int = NUM_SAMPLES) -> list[int]:
    """Return the numbers of the samples that ranks compare: the first, the last, and some between them.

    >>> compared_samples(3), compared_samples(1000, 4)
    ([0, 1, 2], [0, 333, 666, 999])
    """
    num = min(most, length)
    return sorted({round(at * (length - 1) / max(1, num - 1)) for at in range(num)})


def check_same_data(
    world: Communicator,
    what: str,
    length: int,
    read: Callable[[Sequence[int]], object],
    most: int = NUM_SAMPLES,
) -> None:
    """Raise ``UserError`` on all ranks if lengths or samples of a data set differ between ranks. Collective.

    Ranks split samples by their numbers. If a list of files has another order on one rank, for example
    because ``os.listdir`` is not sorted, some samples are read twice and others never, without an error.

    Parts of a batch that differ between reads of the same rank (random augmentation with a generator that is
    not seeded) are not compared. If only texts differ, which may be paths on a host, a warning is logged.

    Args:
        world: All ranks.
        what: Name of the data set in the message, a plural.
        length: Number of samples on this rank.
        read: Returns a batch of the samples with some numbers.
        most: Number of samples to read.
    """
    if world.size == 1:
        return
    numbers = compared_samples(length, most)

    def digests_of_read() -> Digests:
        return digests(read(numbers), len(numbers))

    mine, problem = result_of(digests_of_read)
    everyone = allgather_json(world, [length, None if mine is None else _digest(repr(mine).encode())])
    lengths = [of_rank[0] for of_rank in everyone]
    if other := _other(lengths):
        raise UserError(
            f"{what} differ between ranks: {lengths[other]} samples on {describe_ranks([other])}, "
            f"{lengths[0]} on rank 0",
            hint=HINT,
        )
    if any(of_rank[1] is None for of_rank in everyone) or mine is None:
        if problem is not None:
            log.warning("%s are not compared between ranks: %s: %s", what, type(problem).__name__, problem)
        return
    if _other([of_rank[1] for of_rank in everyone]):
        reads = [result_of(digests_of_read)[0] or {} for _ in range(NUM_MORE_READS)]
        unstable = [name for name, rows in mine.items() if any(again.get(name) != rows for again in reads)]
        _compare(what, numbers, allgather_json(world, [unstable, mine]), is_first=world.rank == 0)


def check_same_files(world: Communicator, what: str, dataset: object) -> None:
    """Raise ``UserError`` on all ranks if digests of a data set differ between ranks. Collective.

    A data set of files, which has ``file_lines()``, is compared line by line, to name the first file that
    differs.

    Args:
        world: All ranks.
        what: Name of the data set in the message, a plural.
        dataset: The data set; without ``digest()``, it is not compared.
    """
    everyone = allgather_json(world, dataset.digest() if hasattr(dataset, "digest") else "")
    other = _other(everyone)
    if not other:
        return
    message = f"{what} differ between ranks: the digest of {describe_ranks([other])} is not that of rank 0"
    lines = list(dataset.file_lines()) if hasattr(dataset, "file_lines") else []
    sums, found = [b""], hashlib.sha256()
    for line in lines:
        found.update(line.encode())
        sums.append(found.digest())
    same, most = 0, min(allgather_json(world, len(lines)))
    while same < most:
        middle = (same + most + 1) // 2
        is_same = len(set(allgather_json(world, sums[middle].hex()))) == 1
        same, most = (middle, most) if is_same else (same, middle - 1)
    first = allgather_json(world, lines[same] if same < len(lines) else "")
    if other := _other(first):
        message = (
            f"{what} differ between ranks: file {same} is {first[0] or 'absent'} on rank 0, and "
            f"{first[other] or 'absent'} on {describe_ranks([other])}"
        )
    elif lines:
        message += ": the files are the same, and functions that choose their samples are not"
    is_of_files = other > 0 and bool(lines)
    raise UserError(message, hint="copy the same files to all hosts" if is_of_files else HINT)


def _compare(what: str, numbers: Sequence[int], everyone: Sequence[Any], *, is_first: bool) -> None:
    """Raise ``UserError`` if data differ, log a warning if only texts do."""
    ignored = {name for unstable, _ in everyone for name in unstable}
    first: Digests = everyone[0][1]
    found = [
        (name, rank)
        for name, rows in first.items()
        for rank, (_, of_rank) in enumerate(everyone)
        if name not in ignored and of_rank.get(name, rows) != rows
    ]
    if not found:
        return
    name, rank = min(found)  # data before text
    rows, others = first[name], everyone[rank][1][name]
    which = f"a batch of samples {list(numbers)}"
    if len(rows) == len(others) == len(numbers):
        which = f"sample {numbers[next(at for at, row in enumerate(rows) if row != others[at])]}"
    message = (
        f"{what} differ between ranks: {which} on {describe_ranks([rank])} is not that of rank 0, and the "
        "lengths are equal"
    )
    if name.startswith("data"):
        raise UserError(message, hint=HINT)
    if is_first:
        log.warning("%s; only texts differ, such as paths. If they are not paths: %s", message, HINT)


def digests(batch: object, num_samples: int) -> Digests:
    """Return the digests of the parts of a batch of ``num_samples``."""
    found: Digests = {}
    for place, leaf in enumerate(_leaves(batch, MAX_DEPTH)):
        is_text = isinstance(leaf, str | bytes)
        rows, _ = result_of(partial(_rows, leaf, num_samples))
        rows = [type(leaf).__name__.encode()] if rows is None else rows
        found[f"{'text' if is_text else 'data'} {place}"] = [_digest(row) for row in rows]
    return found


def _leaves(value: object, depth: int) -> Iterator[object]:
    """Yield the parts of a batch that are not containers."""
    inner: Iterator[object] | None = None
    if depth == 0:
        return
    if isinstance(value, Mapping):
        inner = (each for pair in list(value.items()) for each in pair)
    elif isinstance(value, list | tuple):
        inner = iter([len(value), *value])
    elif isinstance(value, np.ndarray) and value.dtype == object:
        inner = iter([list(value.shape), *value.reshape(-1).tolist()])
    elif is_dataclass(value) and not isinstance(value, type):
        inner = (getattr(value, field.name, None) for field in fields(value))
    if inner is None:
        yield value
        return
    for each in inner:
        yield from _leaves(each, depth - 1)


def _rows(leaf: Any, num_samples: int) -> list[bytes]:
    """Return the content of a part, for each sample if its first dimension has their number."""
    if isinstance(leaf, str | bytes | int | float | complex | bool | type(None)):
        text = leaf if isinstance(leaf, bytes) else str(leaf).encode(errors="surrogateescape")
        return [type(leaf).__name__.encode() + text]
    if hasattr(leaf, "tobytes") and hasattr(leaf, "mode"):  # an image of PIL
        return [f"{leaf.mode} {leaf.size}".encode() + leaf.tobytes()]
    if hasattr(leaf, "detach"):  # a tensor; NumPy lacks bfloat16
        leaf = leaf.detach().cpu()
        leaf = leaf.float() if "bfloat16" in str(leaf.dtype) else leaf
        leaf = leaf.numpy()
    if not hasattr(leaf, "__array__"):
        return [type(leaf).__name__.encode()]
    array = np.asarray(leaf)
    head = f"{array.shape[1:]} {array.dtype} ".encode()
    if array.ndim and len(array) == num_samples:
        return [head + row.tobytes() for row in array]
    return [head + array.tobytes()]


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _other(values: Sequence[object]) -> int:
    """Return the first rank whose value is not that of rank 0; 0: all are equal."""
    return next((rank for rank, value in enumerate(values) if value != values[0]), 0)
