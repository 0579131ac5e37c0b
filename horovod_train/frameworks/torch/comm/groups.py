"""Process groups of ``torch.distributed``, and the collectives that ranks enter in them.

init_process_group   the process group of all ranks, which any launcher may have started
CollectiveWatch      reports ranks that are missing from a collective
PathAgreement        agreement of ranks on the order of the collectives in their passes
explain_distributed  this package's error for a failed collective of PyTorch
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import socket
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from threading import Event, Thread
from time import monotonic, sleep, time
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from horovod_train.collectives.base import Collective, Communicator, allgather_json, broadcast_json
from horovod_train.collectives.horovod import HorovodCommunicator
from horovod_train.config.schema import Health
from horovod_train.errors import EngineError, HorovodTrainError, PeerError, UserError, describe_ranks
from horovod_train.events.types import Stalled
from horovod_train.events.wire import stalled_text

PREFIX = "horovod_train.path"
ALARM = f"{PREFIX}/alarm"
SPIN_S = 0.002
MAX_POLL_S = 0.1
PEER_CHECK_INTERVAL_S = 0.5
"""Interval at which a waiting rank checks the positions of other ranks."""
END = "the end of the pass"
HINT = (
    "let all ranks use the same modules in each pass, name a module that holds the alternatives in "
    "strategy.args.units (fsdp), or use strategy: allreduce or zero"
)


class PathAgreement:
    """Comparison of the path of this rank's passes with the paths of all other ranks.

    Passes may contain collectives: ``fully_shard`` gathers a unit when it is called, and DeepSpeed reduces
    gradients when they are complete. If ranks call different modules, their collectives do not match:
    weights are wrong if sizes are equal; otherwise, a process is aborted or hangs.

    Each rank records an event before each collective of a pass, and compares it with the previous pass of
    the same kind. If the path is unchanged, this costs one comparison of names. A rank whose path changes
    checks, through the store of the process group, that the paths of all ranks change identically. If they
    do not, the rank ends training before it enters the wrong collective.

    Args:
        store: Store of the process group; no other thread may use this object.
        rank: This rank.
        num_ranks: Number of ranks in the collectives.
        timeout_s: Longest wait for other ranks to reach the same event.
    """

    def __init__(self, store: Any, rank: int, num_ranks: int, timeout_s: float) -> None:
        self._store, self._rank, self._num_ranks, self._timeout_s = store, rank, num_ranks, timeout_s
        self._known: dict[str, list[str]] = {}
        self._expected: list[str] = []
        self._seen: list[str] = []
        self._kind = ""
        self._num_passes = 0
        self._is_open = False

    @property
    def position(self) -> tuple[int, int, str]:
        """Number of this rank's current pass, number of the last event in it, and name of the event."""
        return self._num_passes, len(self._seen), self._seen[-1] if self._seen else ""

    def begin_pass(self, kind: str) -> None:
        """End the previous pass and begin a pass, which is compared with the last pass of the same kind."""
        self.end_pass()
        self._is_open = True
        self._kind = kind
        self._num_passes += 1
        self._expected = self._known.get(kind, [])
        self._seen = []

    def end_pass(self) -> None:
        """End a pass; the next pass of its kind is compared with it. Safe to call twice."""
        if not self._is_open:
            return
        self.event(END)
        self._is_open = False
        self._known[self._kind] = self._seen

    def event(self, name: str) -> None:
        """Record that this rank is about to enter a collective.

        Raises:
            UserError: Another rank enters a different collective.
            PeerError: Another rank does not reach this event in time.
        """
        if not self._is_open:
            self.begin_pass("other")
        seen, expected = self._seen, self._expected
        seen.append(name)
        at = len(seen)
        if at > len(expected) or expected[at - 1] != name:
            self._agree(name, expected[at - 1] if at <= len(expected) else END)

    def _agree(self, name: str, expected: str) -> None:
        """Wait until all ranks have reached the same event."""
        if self._num_ranks == 1:
            return
        store, key = self._store, f"{PREFIX}/{self._num_passes}/{len(self._seen)}"
        store.set(f"{key}/{self._rank}", name)
        num_arrived = store.add(f"{key}/{name}", 1)
        begun = last_poll = monotonic()
        while num_arrived < self._num_ranks:
            now = monotonic()
            # Other ranks arrive at about the same time. If they do not, sleep: they may need this core.
            sleep(0 if now - begun < SPIN_S else min(now - begun, MAX_POLL_S))
            num_arrived = store.add(f"{key}/{name}", 0)
            if now - last_poll > PEER_CHECK_INTERVAL_S:
                last_poll = now
                self._check_peers(key, name, expected)
            if now - begun > self._timeout_s:
                raise PeerError(f"timeout after {self._timeout_s:g} s: another rank has not reached {name}")

    def _check_peers(self, key: str, name: str, expected: str) -> None:
        """Raise an error if a rank has announced another event, or has entered the expected collective."""
        store = self._store
        for rank in range(self._num_ranks):
            if rank == self._rank:
                continue
            if store.check([f"{key}/{rank}"]):
                other = store.get(f"{key}/{rank}").decode()
                if other != name:
                    raise differ(self._rank, name, rank, other)
        store.set(ALARM, "on")
        mine = [self._num_passes, len(self._seen)]
        for rank in range(self._num_ranks):
            if rank == self._rank or not store.check([place_of(rank)]) or store.check([f"{key}/{rank}"]):
                continue
            *place, _ = json.loads(store.get(place_of(rank)))
            if place >= mine and not store.check([f"{key}/{rank}"]):
                raise differ(self._rank, name, rank, expected)


def place_of(rank: int) -> str:
    """Return the store key of a rank's position."""
    return f"{PREFIX}/position/{rank}"


def publish_position(store: Any, rank: int, position: tuple[int, int, str]) -> None:
    """Store this rank's position if another rank requests it; called periodically by a background thread."""
    if store.check([ALARM]):
        store.set(place_of(rank), json.dumps(position))


def differ(rank: int, name: str, other_rank: int, other: str) -> UserError:
    """Return the error for ranks that take different paths.

    >>> print(differ(0, "the gradient of a", 1, "the gradient of b").message)
    ranks take different paths: rank 0 reaches the gradient of a, and rank 1 the gradient of b
    """
    return UserError(
        f"ranks take different paths: {describe_ranks([rank])} reaches {name}, and "
        f"{describe_ranks([other_rank])} {other}",
        hint=HINT,
    )


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

    Horovod's stall inspector sees only Horovod's collectives. PyTorch's collectives block in a backward
    pass until they time out, but PyTorch records them (its flight recorder). The thread reads the
    collectives in flight, records the oldest one as the collective that this rank waits in, and sets a key
    in the store of the process group. Ranks without a key have not entered the collective.

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


_watches: list[CollectiveWatch] = []  # one while the process group exists, else empty
LOOPBACK = "127.0.0.1"
# Texts in the RuntimeErrors of Gloo and PyTorch: a peer has closed its connection; a collective timed out.
GONE = ("Connection closed by peer", "Connection reset by peer", "Application timeout caused pair closure")
TIMED_OUT = ("Timed out waiting", "Watchdog caught collective operation timeout")


def init_process_group(ranks: Communicator, device: torch.device, health: Health) -> None:
    """Initialize the process group of all ranks. Collective; safe to call twice.

    This requires neither torchrun nor its environment variables: the ranks are those of Horovod. Rank 0
    binds a free port, and broadcasts it through Horovod. GPUs use NCCL, and CPUs use Gloo, on the interface
    that the launch has chosen. If it has chosen none, ranks on a single host use only the loopback
    interface.

    It uses NCCL if ``device`` is a GPU. The timeout of its collectives is ``health.stall_shutdown_s``.

    Raises:
        EngineError: The process group cannot be initialized.
    """
    if dist.is_initialized():
        return
    interface, address = choose_address(allgather_json(ranks, ranks.host), os.environ)
    export_interface(interface, os.environ)
    # Capacity of PyTorch's flight recorder, read when the first group is created.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(RECORDED))
    timeout = timedelta(seconds=health.stall_shutdown_s)
    try:
        store = _common_store(ranks, address, timeout)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=ranks.rank,
            world_size=ranks.size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise EngineError(
            f"torch.distributed cannot start on {ranks.host}, at {address} of {interface}: {error}",
            hint="check that hosts are connected through this interface, or set launch.network_interface",
        ) from error
    if isinstance(ranks, HorovodCommunicator):
        clone: Any = store
        _watches.append(CollectiveWatch(ranks, clone.clone(), health))
    atexit.register(_end)


def _common_store(ranks: Communicator, address: str, timeout: timedelta) -> Store:
    """Return the store of all ranks, which rank 0 serves on a free port."""
    if ranks.size == 1:
        return HashStore()
    port, server = 0, None
    if ranks.rank == 0:
        listening = socket.socket()
        listening.bind((address, 0))
        listening.listen(ranks.size)
        port = listening.getsockname()[1]
        # With this socket, the store listens on one address only; it would otherwise listen on all.
        server = TCPStore(
            address,
            port,
            ranks.size,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listening.detach(),
        )
    host, port = broadcast_json(ranks, [address, port])
    return server or TCPStore(
        host, port, ranks.size, is_master=False, wait_for_workers=False, timeout=timeout
    )


def agree_on_paths(ranks: Communicator, health: Health) -> PathAgreement:
    """Return the comparison of the passes of all ranks; call it after ``init_process_group``."""
    watch = _watches[-1] if _watches else None
    store = None if watch is None else watch.store.clone()
    paths = PathAgreement(store, ranks.rank, ranks.size if watch else 1, health.stall_shutdown_s)
    if watch is not None:
        watch.paths = paths
    return paths


def _end() -> None:
    """Destroy the process group: a process that exits without doing so may be aborted."""
    while _watches:
        _watches.pop().close()
    if dist.is_initialized():
        dist.destroy_process_group()


def new_subgroup(groups: Sequence[Sequence[int]], health: Health) -> Any:
    """Create a process group for each list of ranks; return this rank's group. Every rank must call it."""
    if len(groups) == 1:
        return dist.group.WORLD
    made = [new_group(ranks, health) for ranks in groups]
    return next(group for ranks, group in zip(groups, made, strict=True) if dist.get_rank() in ranks)


def new_group(ranks: Sequence[int], health: Health) -> Any:
    """Return a process group of some ranks, with the timeout of all collectives. Every rank must call it."""
    return dist.new_group(list(ranks), timeout=timedelta(seconds=health.stall_shutdown_s))


def set_timeout(group: dist.ProcessGroup, health: Health) -> None:
    """Set the timeout of a mesh's group, which does not inherit the timeout of the group of all ranks."""
    timeout = timedelta(seconds=health.stall_shutdown_s)
    dist.distributed_c10d._set_pg_timeout(timeout, group)  # noqa: SLF001  (no public API)


def choose_address(hosts: Sequence[str], environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the interface and IPv4 address of this rank, given the host of each rank.

    Raises:
        EngineError: No address is found.
    """
    addresses = {
        name: [each.address for each in found if each.family == socket.AF_INET]
        for name, found in psutil.net_if_addrs().items()
    }
    wanted = environ.get("GLOO_SOCKET_IFNAME") or environ.get("HOROVOD_GLOO_IFACE")
    if wanted is None and len(set(hosts)) == 1:
        wanted = next((name for name, found in addresses.items() if LOOPBACK in found), None)
    if wanted is not None:
        if not addresses.get(wanted):
            raise EngineError(f"the interface {wanted} has no IPv4 address here")
        return wanted, addresses[wanted][0]
    own = _address_of_the_host()
    for name, found in addresses.items():
        for address in found:
            if address == own or (own is None and not address.startswith("127.")):
                return name, address
    raise EngineError("no network interface with an IPv4 address was found")


def _address_of_the_host() -> str | None:
    """Return the IPv4 address of this host's name; None: it has none, or a loopback address."""
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        return None
    return None if address.startswith("127.") else address


def export_interface(interface: str, environ: MutableMapping[str, str]) -> None:
    """Set the interface of Gloo and NCCL in the environment, unless it is set."""
    environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def explain_distributed(error: Exception, health: Health) -> HorovodTrainError | None:
    """Return this package's error for a failed collective of PyTorch; None: it is another error."""
    if not isinstance(error, RuntimeError):
        return None
    text = str(error)
    if any(sign in text for sign in TIMED_OUT):
        who = next((watch.missing for watch in _watches if watch.missing), "another rank is missing")
        return PeerError(
            f"a collective of torch.distributed timed out after {health.stall_shutdown_s:.0f} s: {who}; "
            "ended after health.stall_shutdown_s"
        )
    if any(sign in text for sign in GONE):
        return PeerError(f"a collective failed because another rank exited: {text[:200]}")
    return None


def explain_second_derivative(error: Exception) -> HorovodTrainError | None:
    """Return the error for a second derivative of batch normalization; None: it is another error."""
    if not isinstance(error, RuntimeError) or "once_differentiable" not in str(error):
        return None
    return UserError(
        "the task computes a second derivative, which train.sync_batch_norm does not support",
        hint="leave train.sync_batch_norm out, or take the penalty of a part without batch normalization",
    )


def explain_unused(error: Exception) -> HorovodTrainError | None:
    """Return the error for parameters without a gradient under DDP; None: it is another error."""
    if not isinstance(error, RuntimeError) or "Expected to have finished reduction" not in str(error):
        return None
    return UserError(
        "strategy ddp: some parameters have had no gradient in a step",
        hint="set strategy.args.find_unused_parameters: true, or use strategy: allreduce",
    )
