"""Decides whether ranks have memory for comparisons.

The plain model with which the first steps are compared has whole weights, gradients and optimizer state. A
job that shards its model because it does not fit on one device must not fail because of a comparison.
"""

from __future__ import annotations

import logging
import resource
from collections import Counter

import psutil
import torch

from horovod_train.collectives.base import Communicator, allgather_json, any_rank
from horovod_train.frameworks.torch.strategies.base import Strategy
from horovod_train.system.machine import usable_memory_bytes

log = logging.getLogger(__name__)

COPIES = 4
"""Memory of the plain model in multiples of its weights: gradients, and two tensors of Adam's state."""


def has_room(model: torch.nn.Module, strategy: Strategy, device: torch.device, world: Communicator) -> bool:
    """Return whether all ranks have memory for the plain model; if not, log why. Collective.

    The job itself has not allocated its gradients, optimizer state and activations yet. They are taken to
    need as much as its part of the plain model, and once its weights for activations and gathered layers.
    """
    weights_bytes = _weights_bytes(model, strategy)
    needed_bytes = COPIES * weights_bytes * (1 + 1 / world.size) + weights_bytes
    least = least_free_bytes(device, world)
    if least < needed_bytes and world.rank == 0:
        log.warning(
            "the first steps are not compared with the plain model: a rank would need about %.1f GiB for it "
            "and for the job, and %.1f GiB are free",
            needed_bytes / 2**30,
            least / 2**30,
        )
    return least >= needed_bytes


def has_room_for_samples(factor: float, device: torch.device, world: Communicator) -> bool:
    """Return whether all ranks have memory for ``factor`` times what steps have needed so far. Collective.

    Args:
        factor: Number of samples, in multiples of a micro-batch.
        device: Device of the model.
        world: All ranks.
    """
    if device.type == "cuda":
        of_steps = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    else:
        largest_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        of_steps = max(0, largest_bytes - psutil.Process().memory_info().rss)
    least = least_free_bytes(device, world)
    return not any_rank(world, flag=factor * of_steps > least)


def least_free_bytes(device: torch.device, world: Communicator) -> float:
    """Return the memory that each rank can still allocate on its device. Collective."""
    everyone = allgather_json(world, [world.host, free_bytes(device), usable_memory_bytes()])
    num_on_host = Counter(host for host, _, _ in everyone)
    is_on_host = device.type == "cpu"
    return min(
        min(own, of_host / num_on_host[host]) if is_on_host else own for host, own, of_host in everyone
    )


def free_bytes(device: torch.device) -> float:
    """Return the memory that this process can still allocate on its device, within its own limits."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + unused)
    used = psutil.Process().memory_info()
    limits = [
        resource.getrlimit(kind)[0] - now
        for kind, now in ((resource.RLIMIT_DATA, used.data), (resource.RLIMIT_AS, used.vms))
        if resource.getrlimit(kind)[0] != resource.RLIM_INFINITY
    ]
    return float(min(limits, default=usable_memory_bytes()))


def _weights_bytes(model: torch.nn.Module, strategy: Strategy) -> int:
    """Return the size of the whole model; DeepSpeed's parameters may be empty on a rank."""
    parameters = list(model.parameters())
    largest = max((each.element_size() for each in parameters), default=4)
    return max(
        sum(each.numel() * each.element_size() for each in parameters), strategy.num_parameters() * largest
    )
