"""``torch.distributed`` inside of ranks that any launcher has started.

No torchrun and no variables are needed: the ranks are Horovod's, rank 0 opens a port that no other process
can have taken, and tells the others through Horovod. GPUs talk over NCCL, CPUs over Gloo, on the interface
that the launch has chosen; ranks of one machine listen on loopback alone.
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

_watches: list[CollectiveWatch] = []  # of the process group, while there is one
LOOPBACK = "127.0.0.1"
# What Gloo raises, in a RuntimeError, when a peer has gone; and when it has not come in time.
GONE = ("Connection closed by peer", "Connection reset by peer", "Application timeout caused pair closure")
TIMED_OUT = ("Timed out waiting", "Watchdog caught collective operation timeout")


def start_process_group(ranks: Communicator, device: torch.device, health: Health) -> None:
    """Bring up the process group of all ranks; every rank calls it. Safe to call twice.

    Args:
        ranks: All ranks of the job.
        device: Where tensors will be.
        health: How long a collective may take.

    Raises:
        EngineError: It cannot be brought up.
    """
    if dist.is_initialized():
        return
    interface, address = choose_address(allgather_json(ranks, ranks.host), os.environ)
    share_interface(interface, os.environ)
    # Read when the first group is made: so many collectives are remembered, to tell what a rank waits for.
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
            hint="do ranks reach each other there? launch.network_interface names another one",
        ) from error
    if isinstance(ranks, HorovodCommunicator):
        clone: Any = store
        _watches.append(CollectiveWatch(ranks, clone.clone(), health))
    atexit.register(_end)


def _common_store(ranks: Communicator, address: str, timeout: timedelta) -> Store:
    """Return the store through which ranks find each other: rank 0 has it, on a port that was free."""
    if ranks.size == 1:
        return HashStore()
    port, server = 0, None
    if ranks.rank == 0:
        listening = socket.socket()
        listening.bind((address, 0))
        listening.listen(ranks.size)
        port = listening.getsockname()[1]
        # Given the socket, it listens there; by itself it would on all addresses.
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
    """Return what compares the passes of all ranks, once the process group is up."""
    watch = _watches[-1] if _watches else None
    store = None if watch is None else watch.store.clone()
    paths = PathAgreement(store, ranks.rank, ranks.size if watch else 1, health.stall_shutdown_s)
    if watch is not None:
        watch.paths = paths
    return paths


def _end() -> None:
    """Leave the group: a process that ends without may be aborted."""
    while _watches:
        _watches.pop().close()
    if dist.is_initialized():
        dist.destroy_process_group()


def group_among(groups: Sequence[Sequence[int]], health: Health) -> Any:
    """Return the one of several groups that this rank is in; every rank calls it.

    Args:
        groups: Ranks of each, which together are all ranks.
        health: How long a collective may take.
    """
    if len(groups) == 1:
        return dist.group.WORLD
    made = [new_group(ranks, health) for ranks in groups]
    return next(group for ranks, group in zip(groups, made, strict=True) if dist.get_rank() in ranks)


def new_group(ranks: Sequence[int], health: Health) -> Any:
    """Return a group of some ranks; all ranks call it. Collectives in it may take as long as any."""
    return dist.new_group(list(ranks), timeout=timedelta(seconds=health.stall_shutdown_s))


def set_timeout(group: dist.ProcessGroup, health: Health) -> None:
    """Give a group of a mesh the time that a collective may take: it does not have that of all ranks."""
    timeout = timedelta(seconds=health.stall_shutdown_s)
    dist.distributed_c10d._set_pg_timeout(timeout, group)  # noqa: SLF001  (no public API)


def choose_address(hosts: Sequence[str], environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the interface and the address of this rank through which others reach it.

    Args:
        hosts: Of each rank.
        environ: Says which interface a launch has chosen.

    Raises:
        EngineError: No address is to be found.
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
    """Return the address that this host's name stands for, if others could use it."""
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        return None
    return None if address.startswith("127.") else address


def share_interface(interface: str, environ: MutableMapping[str, str]) -> None:
    """Set the interface of Gloo and NCCL, unless a variable sets it."""
    environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def explain_distributed(error: Exception, health: Health) -> HorovodTrainError | None:
    """Return our error for one that a collective of ``torch.distributed`` raised; None: it is another one."""
    if not isinstance(error, RuntimeError):
        return None
    text = str(error)
    if any(sign in text for sign in TIMED_OUT):
        who = next((watch.missing for watch in _watches if watch.missing), "another rank did not come")
        return PeerError(
            f"a collective of torch.distributed has waited {health.stall_shutdown_s:.0f} s: {who}; "
            "ended after health.stall_shutdown_s"
        )
    if any(sign in text for sign in GONE):
        return PeerError(f"a collective was ended because another rank left: {text[:200]}")
    return None


def explain_second_derivative(error: Exception) -> HorovodTrainError | None:
    """Return what to do about a gradient of a gradient; None: the error is another one."""
    if not isinstance(error, RuntimeError) or "once_differentiable" not in str(error):
        return None
    return UserError(
        "the task takes the gradient of a gradient, which batch normalization over ranks does not have",
        hint="leave train.sync_batch_norm out, or take the penalty of a part without batch normalization",
    )


def explain_unused(error: Exception) -> HorovodTrainError | None:
    """Return what to do about parameters that DDP has waited for in vain; None: the error is another one."""
    if not isinstance(error, RuntimeError) or "Expected to have finished reduction" not in str(error):
        return None
    return UserError(
        "strategy ddp: some parameters have had no gradient in a step",
        hint="set strategy.args.find_unused_parameters: true, or use strategy: allreduce",
    )
