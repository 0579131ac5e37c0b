"""Selection of the device of a rank, and initialization of Horovod.

    own_gpu, choose_gpu   the GPU of a rank
    share_over_nccl       NCCL between ranks that share a GPU
    join                  initialization of Horovod in users' own training loops and scripts

Later calls of ``join`` return the same communicator.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence

from horovod_train.collectives.base import Communicator, SingleRank, allgather_json
from horovod_train.collectives.horovod import HorovodCommunicator, connect
from horovod_train.config.schema import Health, Job
from horovod_train.errors import HorovodTrainError, UserError, WorldError, describe_ranks
from horovod_train.health.watches import DeviceWatch, JoinWatch, PeerWatch, heartbeat_dir
from horovod_train.horovod.mpi import require_world, started_as_one_of_many

log = logging.getLogger(__name__)


def gpu_uuid(number: int) -> str:
    """Return the UUID of a GPU, given its index in this process; empty without a driver.

    Processes may use different indices for the same GPU, because of CUDA_VISIBLE_DEVICES and containers.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    device, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), number):
        return ""
    # The older function returns the same UUID for all MIG instances of a GPU.
    get_uuid = getattr(cuda, "cuDeviceGetUuid_v2", None) or cuda.cuDeviceGetUuid
    return "" if get_uuid(ctypes.byref(uuid), device) else bytes(uuid).hex()


def gpu_name(number: int) -> str:
    """Return the model name of a GPU, given its index in this process; empty without a driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    device, name = ctypes.c_int(), ctypes.create_string_buffer(100)
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), number):
        return ""
    return "" if cuda.cuDeviceGetName(name, len(name), device) else name.value.decode()


def own_gpu(
    job: Job,
    world: Communicator,
    num_gpus: int,
    uuid_of: Callable[[int], str] = gpu_uuid,
    name_of: Callable[[int], str] = gpu_name,
    *,
    why_none: str = "",
) -> int | None:
    """Return the index of this rank's GPU in this process; None: the rank computes on the CPU. Collective.

    If every rank of a host sees all GPUs of the host, each rank uses the GPU with its local rank as index. If
    the launcher shows each rank a different GPU, as Slurm does, each rank uses that GPU. ``num_gpus`` is the
    number of GPUs that the framework has found in this process; ``why_none`` is the hint if there are none.

    Raises:
        UserError: A host has fewer GPUs than ranks.
        WorldError: A GPU is required and not found, or only some ranks have found GPUs.
    """
    if job.train.device == "cpu":
        return None
    mine = [
        world.host,
        world.local_rank,
        [uuid_of(number) or str(number) for number in range(num_gpus)],
        sorted({name_of(number) for number in range(num_gpus)}),
    ]
    known: list[tuple[str, int, list[str], list[str]]] = allgather_json(world, mine)
    without = [rank for rank, (_, _, gpus, _) in enumerate(known) if not gpus]
    if job.train.device == "auto" and len(without) == world.size:
        return None
    if without:
        hosts = ", ".join(sorted({known[rank][0] for rank in without}))
        everyone = len(without) == world.size
        raise WorldError(
            f"no GPU was found, and train.device is {job.train.device}"
            if everyone
            else f"{describe_ranks(without)} on {hosts} found no GPU, the others did",
            hint=why_none or "see `nvidia-smi` and `horovod-train doctor` there, or set train.device: cpu",
        )
    seen = [gpus for host, _, gpus, _ in known if host == world.host]
    _report_mixed_models(world, [names for *_, names in known])
    chosen = choose_gpu(world, seen, num_gpus, share=job.launch.share_gpus)
    if job.launch.share_gpus:
        share_over_nccl(world, known[world.rank][2][chosen], os.environ)
    return chosen


def _report_mixed_models(world: Communicator, models: Sequence[Sequence[str]]) -> None:
    """Log a warning if ranks have different GPU models, because their kernels may round differently."""
    if world.rank == 0 and any(names != models[0] for names in models):
        shown = [", ".join(name or "an unknown one" for name in names) for names in models]
        found = "; ".join(
            f"{name} on {describe_ranks([rank for rank, other in enumerate(shown) if other == name])}"
            for name in dict.fromkeys(shown)
        )
        log.warning(
            "ranks have different GPUs (%s): weights of ranks may diverge by rounding, which "
            "health.sync_check_every_steps detects",
            found,
        )


def share_over_nccl(world: Communicator, gpu: str, environ: MutableMapping[str, str]) -> None:
    """Set different NCCL host IDs for ranks that share a GPU, given the UUID of this rank's GPU. Collective.

    NCCL refuses two ranks of one host on the same GPU. With different host IDs, it sends their data through
    sockets: results are equal, but communication is slow. NCCL reads ``environ`` when it is initialized.
    """
    taken = allgather_json(world, [world.host, gpu])
    sharing = [rank for rank, place in enumerate(taken) if place == taken[world.rank]]
    if len(sharing) == 1:
        return
    environ.setdefault("NCCL_HOSTID", f"{world.host}-{world.local_rank}")
    if all(host == world.host for host, _ in taken):
        environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    if world.rank == min(sharing):
        log.warning(
            "%s share one GPU of %s (launch.share_gpus): results are right, and it is slower than one rank",
            describe_ranks(sharing),
            world.host,
        )


def choose_gpu(world: Communicator, seen: Sequence[Sequence[str]], num_gpus: int, *, share: bool) -> int:
    """Return the index of this rank's GPU, given the GPUs that each rank of its host sees.

    Raises:
        UserError: The host has fewer GPUs than ranks.
    """
    everyone_sees_all = all(set(gpus) == set(seen[0]) for gpus in seen)
    if not everyone_sees_all and sum(map(len, seen)) == len({gpu for gpus in seen for gpu in gpus}):
        return 0
    if share:
        return world.local_rank % num_gpus
    if world.local_rank >= num_gpus:
        raise UserError(
            f"local rank {world.local_rank} on {world.host} has no GPU: {num_gpus} found",
            hint="start at most one rank per GPU, set train.device: cpu, or (slow) launch.share_gpus: true",
        )
    return world.local_rank


_joined: dict[type[HorovodCommunicator], HorovodCommunicator] = {}


def join(
    communicator_class: type[HorovodCommunicator],
    job: Job | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Communicator:
    """Initialize Horovod, and return the communicator. Later calls return the same communicator.

    If no agent of this package monitors the ranks, they monitor each other: they report a rank whose
    heartbeat is missing, and exit if it is missing for too long. The job's ``health`` section specifies the
    times; the other settings of the job are used as by ``connect``.

    Raises:
        EngineError: The process is one of several ranks, and Horovod is missing or cannot start.
        UserError: A launcher that Horovod does not support has started several processes.
    """
    if not started_as_one_of_many(environ):
        require_world(environ, 1)
        return SingleRank()
    if (joined := _joined.get(communicator_class)) is not None:
        if joined.hvd.is_initialized():
            return joined
        joined.at_close.close()  # the script has called ``hvd.shutdown``
    health = job.health if job is not None else Health()
    with JoinWatch(health, log.warning, _end):
        world = connect(communicator_class, job, environ)
    assert isinstance(world, HorovodCommunicator)
    _joined[communicator_class] = world
    world.at_close.callback(_joined.pop, communicator_class)
    if world.size > 1 and heartbeat_dir(environ) is None:
        world.at_close.callback(PeerWatch(world, health, log.warning, _end).close)
        atexit.register(world.at_close.close)  # reports a normal exit to other ranks; few scripts call it
    if world.size > 1 and gpu_uuid(0):
        world.at_close.callback(DeviceWatch(world, health, log.warning, _end).close)
    return world


def _end(error: HorovodTrainError) -> None:
    """Log an error, and exit this rank, which would hang otherwise."""
    log.error("%s", error)
    os._exit(error.exit_code)  # the main thread is blocked in a collective
