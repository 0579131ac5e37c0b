"""Process group of ``torch.distributed`` for ranks that any launcher has started.

It requires neither torchrun nor its environment variables: the ranks are those of Horovod. Rank 0 binds a
free port, and broadcasts it through Horovod. GPUs use NCCL, and CPUs use Gloo, on the interface that the
launch has chosen. If it has chosen none, ranks on a single host use only the loopback interface.
"""

from __future__ import annotations

import atexit
import os
import socket
from collections.abc import Mapping, MutableMapping, Sequence
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from horovod_train.collectives.base import Communicator, allgather_json, broadcast_json
from horovod_train.collectives.horovod import HorovodCommunicator
from horovod_train.config.schema import Health
from horovod_train.errors import EngineError, HorovodTrainError, PeerError, UserError
from horovod_train.frameworks.torch.comm.paths import PathAgreement
from horovod_train.frameworks.torch.comm.watch import RECORDED, CollectiveWatch

_watches: list[CollectiveWatch] = []  # one while the process group exists, else empty
LOOPBACK = "127.0.0.1"
# Texts in the RuntimeErrors of Gloo and PyTorch: a peer has closed its connection; a collective timed out.
GONE = ("Connection closed by peer", "Connection reset by peer", "Application timeout caused pair closure")
TIMED_OUT = ("Timed out waiting", "Watchdog caught collective operation timeout")


def init_process_group(ranks: Communicator, device: torch.device, health: Health) -> None:
    """Initialize the process group of all ranks. Collective; safe to call twice.

    It uses NCCL if ``device`` is a GPU. The timeout of its collectives is ``health.stall_shutdown_s``.

    Raises:
        EngineError: The process group cannot be initialized.
    """
    if dist.is_initialized():
        return
    interface, address = choose_address(allgather_json(ranks, ranks.host), os.environ)
    export_interface(interface, os.environ)
    # Capacity of PyTorch's flight recorder (see watch.py), read when the first group is created.
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
