"""Reports ranks that are missing from a collective of ``torch.distributed``.

Horovod's stall inspector sees only Horovod's collectives. PyTorch's collectives block in a backward pass
until they time out, but PyTorch records them (its flight recorder). A thread of each rank reads the
collectives in flight, records the oldest one as the collective that this rank waits in, and sets a key in the
store of the process group. Ranks without a key have not entered the collective.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event, Thread
from time import monotonic, time
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from horovod_train.collectives.horovod import HorovodCommunicator
from horovod_train.collectives.log import Collective
from horovod_train.config.schema import Health
from horovod_train.errors import describe_ranks
from horovod_train.events.text import stalled_text
from horovod_train.events.types import Stalled
from horovod_train.frameworks.torch.comm.paths import PathAgreement, publish_position

log = logging.getLogger(__name__)

RECORDED = 128
"""Capacity of the flight recorder; fewer collectives are in flight at any time."""
POLL_INTERVAL_S = 1.0


@dataclass(frozen=True)
class InFlight:
    """A collective that this rank has started and that has not completed.

    Attributes:
        name: Name of the operation, such as ``gloo:all_reduce``.
        group: Name of the process group, and the collective's number in it.
        ranks: Ranks of the group.
        size_bytes: Bytes that this rank passes to it.
        age_s: Time since its start.
    """

    name: str
    group: tuple[str, int]
    ranks: tuple[int, ...]
    size_bytes: int
    age_s: float

    def arrival_key(self, rank: int) -> str:
        """Return the store key that a rank sets when it has entered this collective."""
        return f"horovod_train.under_way/{self.group[0]}/{self.group[1]}/{rank}"


def log_stalled(event: Stalled) -> None:
    """Log an event as a warning, with the event as an attribute of the log record."""
    log.warning("%s", stalled_text(event), extra={"event": event})


class CollectiveWatch:
    """Background thread that watches the collectives of this rank.

    ``report`` receives the ranks that have not entered a collective within ``health.stall_warning_s``. No
    other thread may use ``store``, the store of the process group.

    Attributes:
        missing: Text that names the missing ranks and the collective; empty: no rank is missing.
        paths: Contains this rank's position, which is published; None: its passes have no collectives.
    """

    def __init__(
        self,
        ranks: HorovodCommunicator,
        store: Any,
        health: Health,
        report: Callable[[Stalled], object] = log_stalled,
    ) -> None:
        self.missing = ""
        self._ranks, self.store, self._report = ranks, store, report
        self.paths: PathAgreement | None = None
        self._warning_s = max(health.stall_warning_s, 2 * POLL_INTERVAL_S)
        self._shown: Collective | None = None
        self._announced: tuple[str, int] | None = None
        self._reported_s = 0.0
        self._over = Event()
        self._thread = Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching. Safe to call twice."""
        self._over.set()
        self._thread.join(timeout=2 * POLL_INTERVAL_S)

    def _watch(self) -> None:
        while not self._over.wait(POLL_INTERVAL_S):
            try:
                if self.paths is not None:
                    publish_position(self.store, self._ranks.rank, self.paths.position)
                oldest = oldest_in_flight()
                self._show(oldest)
                if oldest is None or oldest.age_s < self._warning_s / 2:
                    self.missing = ""
                else:
                    self._compare(oldest)
            except RuntimeError:
                return  # rank 0 has exited, and with it the store: collectives raise the error

    def _show(self, oldest: InFlight | None) -> None:
        """Record the collective that this rank waits in."""
        if oldest is not None and oldest.name.startswith("nccl"):
            return  # the host runs ahead of the device, and need not wait for this collective
        if oldest is not None and oldest.age_s >= POLL_INTERVAL_S:
            if self._ranks.waiting_since_s is None:
                since_s = monotonic() - oldest.age_s
                self._shown = Collective(f"torch.distributed {oldest.name}", oldest.size_bytes, since_s)
                self._ranks.waiting_in, self._ranks.waiting_since_s = self._shown, since_s
        elif self._shown is not None and self._ranks.waiting_in is self._shown:
            self._ranks.waiting_since_s = self._ranks.waiting_in = self._shown = None

    def _compare(self, oldest: InFlight) -> None:
        """Set this rank's key of the collective; at the next call, determine the ranks without a key."""
        if self._announced != oldest.group:
            self.store.set(oldest.arrival_key(self._ranks.rank), "here")
            self._announced = oldest.group
            return  # other ranks set theirs at about the same time
        present = [rank for rank in oldest.ranks if self.store.check([oldest.arrival_key(rank)])]
        absent = [rank for rank in oldest.ranks if rank not in present]
        if not absent:
            return  # all ranks have entered it: it is slow
        name = f"torch.distributed {oldest.name}"
        self.missing = f"{describe_ranks(absent)} did not join {name}"
        is_due = oldest.age_s >= self._warning_s and monotonic() - self._reported_s >= self._warning_s
        if is_due and self._ranks.rank == min(present):
            self._reported_s = monotonic()
            self._report(Stalled(collective=name, absent_ranks=absent, seconds=oldest.age_s))


def oldest_in_flight() -> InFlight | None:
    """Return the oldest collective in flight whose ranks are known."""
    now_ns = time() * 1e9
    for entry in recorded():
        if entry["retired"] or entry["is_p2p"] or not (ranks := ranks_of(entry["process_group"][0])):
            continue
        return InFlight(
            entry["profiling_name"],
            (entry["process_group"][0], entry["collective_seq_id"]),
            ranks,
            size_bytes_of(entry),
            (now_ns - entry["time_created_ns"]) / 1e9,
        )
    return None


def recorded() -> list[dict[str, Any]]:
    """Return the flight recorder's entries for Gloo and NCCL, the oldest first."""
    recorder: Any = _distributed_c10d
    dumps = [recorder._dump_fr_trace_json(True, False)]  # noqa: SLF001  (no stacks)
    if dist.is_nccl_available():
        dumps.append(recorder._dump_nccl_trace_json(True, False))  # noqa: SLF001
    entries = [entry for dump in dumps for entry in json.loads(dump).get("entries", [])]
    return sorted(entries, key=lambda entry: int(entry["time_created_ns"]))


def ranks_of(group_name: str) -> tuple[int, ...]:
    """Return the ranks of a process group; empty: the group is unknown."""
    known = dist.distributed_c10d._world  # noqa: SLF001  (no public API)
    for group, name in list(known.pg_names.items()):
        if name == group_name:
            return tuple(sorted(known.pg_group_ranks[group]))
    return ()


def size_bytes_of(entry: dict[str, Any]) -> int:
    """Return the number of bytes that a rank passes to a collective."""
    total = 0
    for shape, dtype in zip(entry["input_sizes"], entry["input_dtypes"], strict=True):
        total += int(torch.Size(shape).numel()) * ITEM_SIZES.get(dtype, 4)
    return total


ITEM_SIZES = {"Double": 8, "Long": 8, "Half": 2, "BFloat16": 2, "Short": 2, "Byte": 1, "Char": 1, "Bool": 1}
"""Size in bytes of data types whose size is not 4, by the flight recorder's names."""
