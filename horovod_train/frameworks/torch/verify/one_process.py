"""Comparisons of several ranks with each other, and with one process on the joint batch.

Equality      compares tensors of several ranks by a sum of their bits, on any device
has_room      decides whether ranks have memory for the plain model, with which steps are compared
OneProcess    compares the gradient of the ranks with that of one process on the joint batch
"""

from __future__ import annotations

import copy
import logging
import resource
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch
from torch.utils._python_dispatch import _disable_current_modes

from horovod_train.collectives.base import Communicator, Mesh, allgather_json, any_rank
from horovod_train.config.schema import Job
from horovod_train.data.shard import MicroBatch, PlannedStep, StepShare
from horovod_train.errors import UserError, describe_ranks, result_of
from horovod_train.frameworks.torch.comm.sync_batch_norm import SyncBatchNormMixin
from horovod_train.frameworks.torch.state.local import LocalTensor
from horovod_train.frameworks.torch.step.averages import RunningStatistics
from horovod_train.frameworks.torch.step.gathering import active
from horovod_train.frameworks.torch.step.watches import INTEGERS
from horovod_train.frameworks.torch.strategies.base import Strategy
from horovod_train.frameworks.torch.task import TorchReader
from horovod_train.frameworks.torch.verify.untouched import (
    NUM_COMPONENTS,
    Gradient,
    Untouched,
    names_read,
    projected,
    traceless,
    weighted_sum,
)
from horovod_train.frameworks.torch.verify.verification import (
    GPU_LIMIT,
    GRADIENT_LIMITS,
    LOOSEST,
    NUM_ROUNDINGS,
)
from horovod_train.system.machine import usable_memory_bytes


class Equality:
    """Checks that copies of weights and buffers on several ranks are equal.

    Args:
        model: The model.
        strategy: Provides this rank's shard of the model.
        statistics: Running statistics of normalization layers, which differ between ranks in training.
        data_ranks: Communicator of the data-parallel ranks.
        all_ranks: Communicator of all ranks.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        strategy: Strategy,
        statistics: RunningStatistics,
        data_ranks: Communicator,
        all_ranks: Communicator,
    ) -> None:
        self._model, self._strategy, self._statistics = model, strategy, statistics
        self._data_ranks, self._all_ranks = data_ranks, all_ranks

    def _weights(self) -> set[str]:
        return {name for name, _ in self._model.named_parameters(remove_duplicate=False)}

    @torch.no_grad()
    def sync_buffers(self) -> None:
        """Average running statistics over ranks; raise ``UserError`` if other buffers differ. Collective."""
        if self._all_ranks.size == 1:
            return
        for buffer in self._statistics.buffers if self._data_ranks.size > 1 else ():
            mine = (buffer.detach().double().flatten() / self._data_ranks.size).tolist()
            mean = torch.tensor(self._data_ranks.allreduce_sum(mine), dtype=torch.float64)
            buffer.copy_(mean.view(buffer.shape))
        check_buffers(self._all_ranks, self._strategy.local_tensors(), self._weights())

    def check(self) -> None:
        """Raise ``UserError`` if weights or buffers differ after the first step. Collective."""
        if self._all_ranks.size == 1 or not self._strategy.replicas_identical:
            return
        averaged = {id(buffer) for buffer in self._statistics.buffers}
        named = self._model.named_buffers(remove_duplicate=False)
        own = {name for name, buffer in named if id(buffer) in averaged}
        local_tensors = {
            name: each for name, each in self._strategy.local_tensors().items() if name not in own
        }
        check_weights(self._all_ranks, local_tensors, self._weights())
        check_buffers(self._all_ranks, local_tensors, self._weights())


def check_weights(
    world: Communicator, local_tensors: Mapping[str, LocalTensor], names: Collection[str]
) -> None:
    """Raise ``UserError`` if a weight differs between ranks; ``names`` are all weights. Collective."""
    if (
        found := _first_difference(
            world, {name: local_tensors[name] for name in local_tensors if name in names}
        )
    ) is not None:
        name, ranks = found
        raise UserError(
            f"the weight {name!r} differs between ranks after the first step: {ranks}",
            hint="weights must change by the optimizer, or in the same way on all ranks: a forward pass that "
            "changes them in place does so for this rank's samples alone (Embedding(max_norm=...))",
        )


def check_buffers(
    world: Communicator, local_tensors: Mapping[str, LocalTensor], weights: Collection[str]
) -> None:
    """Raise ``UserError`` if a buffer differs between ranks. Collective.

    A checkpoint contains one copy of a buffer, so a resumed run would lose the other values.
    ``local_tensors`` contains weights and saved buffers; ``weights`` contains the names of all weights.
    """
    if (
        found := _first_difference(
            world, {name: local_tensors[name] for name in local_tensors if name not in weights}
        )
    ) is not None:
        name, ranks = found
        raise UserError(
            f"the buffer {name!r} differs between ranks: {ranks}; passes change it by the rank's own samples",
            hint="name it in train.average_buffers, if a mean over ranks is what one process would have; "
            "make it with persistent=False, if it is this rank's own; or do not let it depend on samples",
        )


def _first_difference(
    world: Communicator, local_tensors: Mapping[str, LocalTensor]
) -> tuple[str, str] | None:
    """Return the name of the first tensor that differs between ranks, and a text with two such ranks."""
    mine = {
        _key(name, each): value
        for (name, each), value in zip(local_tensors.items(), _sums(local_tensors), strict=True)
    }
    everyone: list[dict[str, object]] = allgather_json(world, mine)
    first: dict[str, tuple[int, object]] = {}
    for rank, of_rank in enumerate(everyone):
        for key, value in of_rank.items():
            owner, expected = first.setdefault(key, (rank, value))
            if value != expected:
                return key.partition("\0")[0], f"{describe_ranks([rank])} against {describe_ranks([owner])}"
    return None


def _key(name: str, local: LocalTensor) -> str:
    return name if local.part is None else f"{name}\0{local.part.start}"


def _sums(local_tensors: Mapping[str, LocalTensor]) -> list[object]:
    """Return shape, dtype and bit sum of each tensor. An integer sum depends on no rounding or order."""
    tensors = [each.tensor.detach() for each in local_tensors.values()]
    sums = [_bits(tensor).sum(dtype=torch.int64) for tensor in tensors]
    numbers = torch.stack([each.cpu() for each in sums]).tolist() if sums else []
    return [
        [list(tensor.shape), str(tensor.dtype), number]
        for tensor, number in zip(tensors, numbers, strict=True)
    ]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
    return flat.view(torch.int8) if flat.dtype == torch.bool else flat.view(INTEGERS[flat.element_size()])


log = logging.getLogger(__name__)

COPIES = 4
"""Memory of the plain model in multiples of its weights: gradients, and two tensors of Adam's state."""


def has_room(model: torch.nn.Module, strategy: Strategy, device: torch.device, world: Communicator) -> bool:
    """Return whether all ranks have memory for the plain model; if not, log why. Collective.

    The plain model has whole weights, gradients and optimizer state. A job that shards its model because it
    does not fit on one device must not fail because of a comparison.

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


CHANGE = "the change in forward of "


@dataclass(frozen=True)
class Finding:
    """What differs, and whether the job is refused.

    Attributes:
        text: What was found.
        hint: What the user can do.
        is_refused: Ends the job with ``health.one_process: refuse``. False for models whose difference may be
            intended: a warning.
    """

    text: str
    hint: str
    is_refused: bool


class OneProcess:
    """Compares the gradient of the job with that of one process.

    The reference of a job on n ranks is one process with all samples of a step. A sum of the ranks'
    gradients differs from its gradient if the loss is not a mean over samples: if it compares samples with
    each other (in-batch negatives), normalizes by statistics of the batch, or divides by a number of
    tokens. To see this, the replica makes two steps of the same few samples whose gradients are discarded:

        parts   half of the ranks have the first half of the samples, the others the second half; if all
                ranks read the same samples, the halves are two micro-batches; if passes contain
                collectives, two steps, because ranks must take the same path through the model
        joint   each rank has all of them in one micro-batch

    All passes run as in training, except that random numbers are constants. After each step, weights,
    buffers, random generators and the state in Python are as before. Weights that a pass has written are
    compared, too. Of a gradient, only a random projection is kept, whose length is that of the gradient
    within about 5 % (Johnson and Lindenstrauss, 1984): a copy would need memory.

    Args:
        replica: The replica of this rank (a ``TorchReplica``).
        reader: Reader of the training data.
        mesh: All ranks, and those that read other samples.
        job: The job.
    """

    def __init__(self, replica: Any, reader: TorchReader, mesh: Mesh, job: Job) -> None:
        self._replica, self._reader, self._world, self._data = replica, reader, mesh.world, mesh.data
        self._part, self._parts = (
            ("rank", "ranks") if mesh.data.size > 1 else ("micro-batch", "micro-batches")
        )
        self._refuses = job.health.one_process == "refuse"
        self._batch_size, self._per_part = job.train.batch_size_per_rank, 0
        self._unknown: set[str] = set()
        self._lost: set[str] = set()  # names of weights
        self._dtypes = {torch.float32}  # the least that is tolerated; and types that passes have used
        self._of_task: dict[str, Any] = {}
        self._storages_read: set[int] = set()  # storages of the task's tensors that passes have read
        self._is_finite = True
        self._reason: str | None = None  # why nothing is compared any more

    def compare(self, step: int, parts: Sequence[Sequence[int]]) -> str | None:
        """Compare gradients after a step, and report a difference, once. Collective.

        Args:
            step: Number of the step.
            parts: Numbers of samples of that step, in two parts.

        If the samples cannot be read or the task cannot be called with so few of them, a notice is logged,
        and no more is compared.

        Returns:
            What differs, or why nothing is compared; None: the gradients are equal; empty: they are not
            finite in this step.

        Raises:
            UserError: The product can train the model as one process does, and the job refuses others.
        """
        # Both parts together have as many samples as a micro-batch, so that passes need no more memory.
        self._per_part = min(max(1, self._batch_size // 2), *map(len, parts))
        if self._reason is not None:
            return self._reason
        if self._batch_size == 1 and not has_room_for_samples(2, self._replica.device, self._world):
            self._ends(["a rank may not have memory for two samples"])
            return self._reason
        numbers = [number for part in parts for number in part[: self._per_part]]
        batches, problem = result_of(lambda: copy.deepcopy(self._read(numbers)))
        self._of_task, iterators = self._replica.python_state.not_restored_values()
        reasons = [f"{name} is an iterator" for name in iterators]
        if problem is not None:
            reasons.append(f"{type(problem).__name__}: {problem}")
        if self._ends(reasons):
            return self._reason
        assert batches is not None
        self._unknown.clear()
        self._storages_read.clear()
        self._is_finite = True
        finding = self._finding(batches)
        names = allgather_json(self._world, names_read(self._of_task, self._storages_read))
        self._replica.python_state.read.update(name for of_rank in names for name in of_rank)
        if finding is None:
            return self._reason if self._is_finite else ""
        self._reason = finding.text
        text = f"step {step}: {finding.text}"
        if finding.is_refused and self._refuses:
            raise UserError(text, hint=f"{finding.hint}; health.one_process: warn only warns")
        if self._world.rank == 0:
            log.warning("%s. Hint: %s", text, finding.hint)
        return finding.text

    def _ends(self, reasons: Sequence[str]) -> bool:
        """Return whether a rank has a reason to compare no more, which rank 0 logs. Collective."""
        of_ranks = [reason for of_rank in allgather_json(self._world, list(reasons)) for reason in of_rank]
        if of_ranks:
            self._reason = f"gradients are not compared with those of one process: {of_ranks[0][:300]}"
            if self._world.rank == 0:
                log.warning("%s", self._reason)
        return bool(of_ranks)

    def _read(self, numbers: Sequence[int]) -> list[object]:
        """Return the batches of the first half, of the second half, and of all samples."""
        half = len(numbers) // 2
        with self._replica.python_state.restored(with_data=True):
            return self._reader.batches_of(numbers, [slice(None, half), slice(half, None), slice(None)])

    # -- what is compared

    def _finding(self, batches: Sequence[object]) -> Finding | None:
        if self._ends(self._problems_of_forward(batches)):
            return None
        if (written := self._lost_writes()) is not None:
            return written
        rank, num_ranks, size = self._data.rank, self._data.size, self._per_part
        per_part = num_ranks // 2  # ranks; the last one of an odd number does not count
        first = 2 * min(rank // 2, per_part - 1)
        pair, alone = range(first, first + 2), range(rank, rank + 1)
        own = [rank % 2] if num_ranks > 1 else [0, 1]

        def parts(weight: float = 0.5) -> Gradient:
            if self._takes_one_path():
                whole = [MicroBatch(part * size, (part + 1) * size, 1 / num_ranks) for part in (0, 1)]
                halves = [self._gradient([whole[part]], [batches[part]], alone) for part in (0, 1)]
                return weighted_sum(halves, (weight, 1 - weight))
            shares = np.array([weight, 1 - weight])
            if num_ranks > 1:
                shares *= (rank < 2 * per_part) / per_part
            of_rank = [MicroBatch(part * size, (part + 1) * size, float(shares[part])) for part in own]
            return self._gradient(of_rank, [batches[part] for part in own], pair if num_ranks > 1 else alone)

        def joint() -> Gradient:
            return self._gradient([MicroBatch(0, 2 * size, 1 / num_ranks)], batches[2:], alone)

        of_parts, of_joint = parts(), joint()
        difference = self._difference(of_parts, of_joint)
        if difference is None:
            return None
        is_random = self._difference(of_parts, parts()) is not None
        if any_rank(self._world, flag=is_random or bool(self._unknown)):
            drawn = f": {', '.join(sorted(self._unknown))}" if self._unknown else ""
            self._ends([f"they are random{drawn}"])
            return None
        return self._explained(difference, of_parts, of_joint, parts, joint)

    def _takes_one_path(self) -> bool:
        """Return whether ranks must have the same samples, so that they take the same path."""
        replica = self._replica
        is_joined = replica.gathering.was_used or any(
            isinstance(module, SyncBatchNormMixin) for module in replica.model.modules()
        )
        return replica.strategy.capabilities.collective_passes and self._data.size > 1 and not is_joined

    def _lost_writes(self) -> Finding | None:
        """Return what is wrong with forward passes that write weights which are gathered for each pass."""
        of_ranks = sorted(
            {name for names in allgather_json(self._world, sorted(self._lost)) for name in names}
        )
        if not of_ranks:
            return None
        return Finding(
            f"the forward pass changes {of_ranks[0]} in place, and the strategy loses the change: a rank has "
            "the whole weight only in a pass",
            "change weights in the task's after_update(model) under strategy: allreduce or zero, or compute "
            "with a changed copy of them (torch.nn.utils.parametrize)",
            is_refused=True,
        )

    def _explained(
        self,
        difference: str,
        of_parts: Gradient,
        of_joint: Gradient,
        parts: Callable[..., Gradient],
        joint: Callable[[], Gradient],
    ) -> Finding:
        """Return the reason for a difference between parts and joint batch. Collective."""
        found = f"{difference}: one process on the joint batch would train other weights"
        if difference.startswith(CHANGE):
            return Finding(
                f"{found}. The forward pass writes weights that depend on the samples of a rank",
                "change weights in the task's after_update(model), or compute with a changed copy of them "
                "(torch.nn.utils.parametrize)",
                is_refused=True,
            )
        with self._statistics_fixed() as layers:
            if layers and self._difference(parts(), joint()) is None:
                remedy = (
                    "set train.sync_batch_norm: true for the statistics of all ranks"
                    if self._data.size > 1
                    else "use a layer that normalizes within a sample, such as GroupNorm"
                )
                return Finding(
                    f"{found}. A layer normalizes over the samples of each {self._part}: {layers[0]}",
                    remedy,
                    is_refused=False,
                )
        first, second = parts(1.0).loss, parts(0.0).loss
        if first != second:
            weight = (of_joint.loss - second) / (first - second)
            if 0 < weight < 1 and self._difference(parts(weight), of_joint) is None:
                return Finding(
                    f"{found}. The loss of a batch is a mean over something else than its samples, such as "
                    f"tokens: of two parts with as many samples each, one has the weight {weight:.3g}",
                    "let the task's loss return a sum and a count: (total, number of tokens)",
                    is_refused=True,
                )
        if _is_close(of_parts.loss, of_joint.loss, self._limit()):
            return Finding(
                f"{found}, and the loss is equal. A hook or an autograd function changes gradients by the "
                "samples that a rank has",
                "let it act on each sample, or use a hook of the parameter (Tensor.register_hook), which "
                "gets the gradient of the whole step",
                is_refused=True,
            )
        return Finding(
            f"{found}. The loss of a batch is not a mean over its samples: it may compare samples with each "
            "other (in-batch negatives), or add them up",
            "if the loss compares samples, give it those of all ranks: horovod_train.gather(embeddings); "
            "otherwise return a mean over samples, or a sum and a count",
            is_refused=False,
        )

    def _difference(self, found: Gradient, expected: Gradient) -> str | None:
        """Return the largest difference of two gradients, in words; None: there is none. Collective."""
        names = [str(name) for name in self._replica.strategy.numbering()]
        names += [f"{CHANGE}{name}" for name, _ in self._replica.model.named_parameters()]
        numbers = np.zeros((2, len(names)))
        for place, name in enumerate(names):
            if name in found.projected or name in expected.projected:
                none = torch.zeros(NUM_COMPONENTS, dtype=torch.float64), 0.0
                ours, theirs = found.projected.get(name, none), expected.projected.get(name, none)
                numbers[0, place] = float((ours[0] - theirs[0]).square().sum())
                numbers[1, place] = max(ours[1], theirs[1])
        # Where a rank has the whole gradient, all sums are as many times larger, and their ratios are equal.
        sums = np.array(self._world.allreduce_sum(numbers.reshape(-1).tolist())).reshape(2, -1)
        if not np.isfinite(sums).all():
            self._is_finite = False
            return None  # the loss has diverged, which the job reports itself
        num = 2 * self._per_part
        limit, eps = np.array(allgather_json(self._world, [self._limit(), self._eps()])).max(0)
        rounding = NUM_ROUNDINGS * eps * np.sqrt(sums[1].max(initial=0.0))
        excess = np.sqrt(sums[0]) - np.maximum(limit * np.sqrt(sums[1]), rounding)
        worst = int(excess.argmax()) if len(excess) else 0
        if not len(excess) or excess[worst] <= 0:
            if _is_close(found.loss, expected.loss, max(limit, 1e-6)):
                return None
            return (
                f"the loss of {num} samples is {found.loss:.6g} on two {self._parts}, and "
                f"{expected.loss:.6g} on one"
            )
        relative = float(np.sqrt(sums[0, worst] / max(sums[1, worst], 1e-300)))
        what = "" if names[worst].startswith(CHANGE) else "the gradient of "
        return f"{what}{names[worst]} differs by {relative:.1%} if {num} samples are split over {self._parts}"

    def _eps(self) -> float:
        return max(torch.finfo(dtype).eps for dtype in self._dtypes)

    def _limit(self) -> float:
        limit = max(GRADIENT_LIMITS.get(dtype, LOOSEST) for dtype in self._dtypes)
        return max(limit, GPU_LIMIT) if self._replica.device.type == "cuda" else limit

    # -- passes

    def _problems_of_forward(self, batches: Sequence[object]) -> list[str]:
        """Return why the loss of a batch cannot be computed: before gradients, ranks do not wait. Collective.

        Raises:
            UserError: The strategy refuses what the passes do, on a rank.
        """
        replica = self._replica
        if replica.strategy.capabilities.owns_schedule:
            return []  # it runs all passes
        # PyTorch's wrappers expect a backward pass after a forward pass with gradients.
        is_enabled = not replica.strategy.capabilities.collective_passes

        def compute_losses() -> None:
            grad_mode = torch.set_grad_enabled(is_enabled)
            with self._traceless(), grad_mode, replica.autocast(), active(replica.gathering):
                for batch in batches:
                    replica.task.loss(replica.forward_model, copy.deepcopy(batch))

        _, problem = result_of(compute_losses)
        refused = [str(problem), problem.hint] if isinstance(problem, UserError) else None
        if found := next(filter(None, allgather_json(self._world, refused)), None):
            text, hint = found
            raise UserError(text, hint=hint)
        return [] if problem is None else [f"{type(problem).__name__}: {problem}"]

    def _gradient(
        self, micro_batches: Sequence[MicroBatch], batches: Sequence[object], gathered: range
    ) -> Gradient:
        """Return loss and gradient of a step, given the batches of this rank. Collective.

        ``horovod_train.gather`` joins the rows of the ranks ``gathered``, which have the joint batch.
        """
        share = StepShare(0, 2 * self._per_part, tuple(micro_batches))
        step = PlannedStep(share, iter(copy.deepcopy(batches)), is_last=True)
        replica = self._replica
        with self._traceless() as mode, gathered_from(replica, gathered):
            loss = float(replica.trial(step))
            with _disable_current_modes():  # a mode would see each operation
                kept = {
                    name: projected(gradient)
                    for name, _, gradient in replica.strategy.local_gradients()
                    if gradient is not None
                }
                for name, parameter in replica.model.named_parameters():
                    if (change := mode.change_of(parameter)) is not None:
                        kept[f"{CHANGE}{name}"] = projected(change)
        replica.discard()
        count = None if replica.loss.count is None else float(replica.loss.count)
        return Gradient(loss, kept, count)

    @contextmanager
    def _statistics_fixed(self) -> Iterator[list[str]]:
        """Let layers that normalize over a batch use running statistics; yield their names."""
        layers = {
            name: module
            for name, module in self._replica.model.named_modules()
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)  # noqa: SLF001
            and not isinstance(module, SyncBatchNormMixin)
            and module.training
            and module.running_mean is not None
        }
        for module in layers.values():
            module.training = False
        try:
            yield list(layers)
        finally:
            for module in layers.values():
                module.training = True

    @contextmanager
    def _traceless(self) -> Iterator[Untouched]:
        """Restore everything that passes change. In a dispatch mode, compiled functions run uncompiled."""
        replica, mode = self._replica, None
        try:
            with (
                replica.python_state.restored() as lost,
                traceless(
                    replica.model, self._of_task.values(), replica.strategy.transient_weights()
                ) as mode,
            ):
                yield mode
        finally:
            if mode is not None:
                self._unknown |= mode.unknown
                self._lost |= mode.lost
                self._storages_read |= mode.read
                self._dtypes |= mode.dtypes
        if lost:
            log.warning("the comparison with one process has changed %s", ", ".join(lost[:3]))


@contextmanager
def gathered_from(replica: Any, ranks: range) -> Iterator[None]:
    """Let ``horovod_train.gather`` join the rows of some ranks in the block."""
    replica.gathering.of = ranks
    try:
        yield
    finally:
        replica.gathering.of = None


def _is_close(found: float, wanted: float, limit: float) -> bool:
    return not (abs(found - wanted) > limit * max(abs(wanted), 1e-3))
