"""PyTorch's ``fully_shard`` (FSDP2): each rank stores a shard of weights, gradients and optimizer state.

A unit, such as a layer, is all-gathered for its forward and backward pass, and resharded after it.
Between steps, a rank stores 1/N. At the peak, it also stores two gathered units: in use, and prefetched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from horovod_train.collectives.base import Mesh, allgather_json
from horovod_train.config.schema import Job
from horovod_train.data.shard import PlannedStep
from horovod_train.errors import UserError
from horovod_train.frameworks.torch.comm.collectives import Exchange, broadcast_model
from horovod_train.frameworks.torch.comm.groups import PathAgreement, agree_on_paths, set_timeout
from horovod_train.frameworks.torch.sizes import modules_matching, units_to_shard
from horovod_train.frameworks.torch.state.local import (
    LocalTensor,
    OptimizedParameter,
    describe,
    load_initial,
    move,
    to_local,
    unsharded_parameters,
)
from horovod_train.frameworks.torch.state.shards import (
    disable_foreach_for_mixed_groups,
    gathered_full,
    local_tensors_of_model,
    materialize,
    num_copies,
    optimized_parameters,
    squares_of,
)
from horovod_train.frameworks.torch.step.watches import Rotation, WeightWatch
from horovod_train.frameworks.torch.strategies.base import Capabilities, DevicePlacement
from horovod_train.frameworks.torch.strategies.ddp.strategy import TorchDistributed

log = logging.getLogger(__name__)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Fsdp(TorchDistributed):
    """Strategy that shards a model unit by unit with ``fully_shard``.

    The arguments are described in ``Arguments`` of this package. With ``shard_ranks``, groups of
    consecutive ranks shard the model, and the groups are replicas (HSDP).
    """

    capabilities = Capabilities(
        collective_passes=True, sharded=True, whole_weights=False, meta_model=True, sums_gradients=True
    )

    def __init__(
        self,
        mesh: Mesh,
        job: Job,
        *,
        units: Sequence[str] | None = None,
        param_dtype: str | None = None,
        reduce_dtype: str | None = None,
        reshard_after_forward: bool = True,
        reduce_each: bool = True,
        prefetch_units: int = 1,
        offload: bool = False,
        shard_ranks: int | Literal["host"] | None = None,
    ) -> None:
        super().__init__(mesh, job)
        self._units = units
        self._precision = MixedPrecisionPolicy(
            param_dtype=DTYPES.get(param_dtype or ""), reduce_dtype=DTYPES.get(reduce_dtype or "")
        )
        self._reshard = reshard_after_forward
        self._reduce_each = reduce_each
        self._prefetch_units = prefetch_units
        self._offload = offload
        self._shard_ranks = shard_ranks
        self._exchange = Exchange(self._data)
        self._shard_watch = WeightWatch(None)
        self._has_warned = False

    def wrap(self, model: torch.nn.Module, move_to_device: DevicePlacement) -> torch.nn.Module:
        """Shard rank 0's model unit by unit, so that each unsharded unit is freed before the next is sharded.

        For a model on the meta device, each rank reads its shard of the weights from the file.

        Raises:
            UserError: The model cannot be sharded with these arguments.
        """
        self._start_groups(move_to_device.device)
        if self._offload and move_to_device.device.type == "cpu":
            raise UserError(
                "strategy.args.offload: without a GPU, weights are in host memory already",
                hint="leave it out",
            )
        broadcast_model(model, self._ranks)
        units = (
            units_to_shard(model)
            if self._units is None
            else modules_matching(model, self._units, "strategy.args.units")
        )
        mesh = self._device_mesh(model, move_to_device)
        whole = self._unsharded_parameters(model, units.values())
        offload = CPUOffloadPolicy() if self._offload else OffloadPolicy()
        try:
            for unit in units.values():
                fully_shard(
                    unit, mesh=mesh, reshard_after_forward=self._reshard, mp_policy=self._precision,
                    offload_policy=offload, ignored_params=whole & set(unit.parameters()),
                )  # fmt: skip
            fully_shard(
                model, mesh=mesh, mp_policy=self._precision, offload_policy=offload, ignored_params=whole
            )
        except ValueError as error:
            raise UserError(
                f"strategy fsdp cannot shard this model: {error}",
                hint="name the modules that belong together in strategy.args.units",
            ) from error
        if move_to_device.weights is None:
            move(whole, move_to_device.device)
        if move_to_device.weights is not None:
            weights_on = torch.device("cpu") if self._offload else move_to_device.device
            materialize(model, weights_on, move_to_device.device)
            load_initial(model, local_tensors_of_model(model), move_to_device.weights)
        sharded = [unit for unit in units.values() if isinstance(unit, FSDPModule)]
        self._set_up(model, sharded)
        return model

    def _unsharded_parameters(
        self, model: torch.nn.Module, units: Iterable[torch.nn.Module]
    ) -> set[torch.nn.Parameter]:
        """Return the parameters that are not sharded; log them with the reason.

        Raises:
            UserError: ``param_dtype`` is set, and would apply only to the sharded parameters.
        """
        whole = unsharded_parameters(model, units)
        described = describe(model, whole)
        if described and self._precision.param_dtype is not None:
            raise UserError(
                f"strategy.args.param_dtype: {described}; their data type would differ from that of "
                "gathered weights",
                hint="leave param_dtype out, and set train.precision",
            )
        if described and self._ranks.rank == 0:
            log.warning("strategy %s: %s", self._job.strategy.name, described)
        return set(whole)

    def _device_mesh(self, model: torch.nn.Module, move_to_device: DevicePlacement) -> DeviceMesh:
        """Return the device mesh for sharding: 1-D, or 2-D with replicas (HSDP)."""
        axes, names = self._sharding_axes()
        mesh = init_device_mesh(move_to_device.device.type, axes, mesh_dim_names=names)
        for name in names:
            set_timeout(mesh.get_group(name), self._job.health)
        return mesh

    def _sharding_axes(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Return sizes and names of the device mesh's dimensions, over the data-parallel ranks."""
        num_ranks = self._data.size
        group_size = num_ranks_of(self._shard_ranks, num_ranks, allgather_json(self._data, self._data.host))
        if group_size == num_ranks:
            return (num_ranks,), ("shard",)
        return (num_ranks // group_size, group_size), ("copy", "shard")

    def _set_up(self, model: torch.nn.Module, units: Sequence[FSDPModule]) -> None:
        self._paths = agree_on_paths(self._ranks, self._job.health)
        self._used: set[int] = set()  # ids of parameters that have had a gradient in this step
        rotation = Rotation()
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule):
                announce_collectives(module, name or "the model", self._paths, self._used, rotation)
        model.register_forward_pre_hook(lambda *_: self._begin_evaluation(), prepend=True)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # Losses are weighted by samples: gradients are summed, not averaged.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(enable=True)
        assert isinstance(model, FSDPModule)
        # Otherwise, message sizes would differ between ranks that use different parameters.
        model.set_reduce_scatter_unused_params(reduce_scatter_unused_params=True)
        num = self._prefetch_units
        for at, unit in enumerate(units) if num > 1 else ():  # 1 is PyTorch's default
            unit.set_modules_to_forward_prefetch(list(units[at + 1 : at + 1 + num]))
            unit.set_modules_to_backward_prefetch(list(reversed(units[max(0, at - num) : at])))

    def _begin_evaluation(self) -> None:
        if not torch.is_grad_enabled():
            self._paths.begin_pass("evaluation")

    def bind(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().bind(model, optimizer)
        self._plain = [p for p in self._parameters() if not isinstance(p, DTensor) and p.requires_grad]
        disable_foreach_for_mixed_groups(optimizer)
        self._bytes_once = sum(p.numel() * p.element_size() for p in model.parameters())

    def local_tensors(self) -> Mapping[str, LocalTensor]:
        """Return this rank's shards of the model's weights and buffers."""
        self._reshard_all()
        return local_tensors_of_model(self._model)

    def optimized(self) -> Sequence[OptimizedParameter]:
        """Return this rank's shards of the optimizer's parameters, in its order."""
        self._reshard_all()
        return optimized_parameters(self._model, self._optimizer)

    def _reshard_all(self) -> None:
        """Reshard units that an evaluation has left unsharded."""
        assert isinstance(self._model, FSDPModule)
        self._model.reshard()

    def whole_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the model has whole weights, which a task may change."""
        self._reshard_all()
        return gathered_full(self._model)

    # -- one step

    def begin(self, step: PlannedStep) -> None:
        """Start a step: no parameter has a gradient yet."""
        self._used.clear()
        self._shard_watch.begin(p for p in self._parameters() if isinstance(p, DTensor))

    def _warn_of_writes(self) -> None:
        """Warn, once, of writes to shards during passes: some of them have no effect.

        A part of a ``DTensor``, such as ``weight[3]``, is a copy if it is split over ranks; only the count of
        writes shows that it was written.
        """
        written = self._shard_watch.end()
        if written is None or self._has_warned:
            return
        self._has_warned = True
        name = next(name for name, each in self._model.named_parameters() if each is written)
        log.warning(
            "strategy %s: %s is written during a pass, while it is split over ranks. Writes to a part of it, "
            "such as weight[3].zero_(), have no effect: write in the task's after_update(model)",
            self._job.strategy.name,
            name,
        )

    def prepare_backward(self, *, is_last: bool) -> None:
        """Prepare for a pass; reduce its gradients if it is the last of the step, or with ``reduce_each``."""
        assert isinstance(self._model, FSDPModule)
        self._paths.begin_pass("training")
        self._model.set_requires_gradient_sync(is_last or self._reduce_each)

    def reduce(self, weighted_loss: torch.Tensor) -> torch.Tensor:
        """All-reduce the gradients of unsharded parameters; return the loss of the global batch."""
        self._paths.end_pass()
        self._warn_of_writes()
        self.sent_bytes = 3 * self._bytes_once  # two all-gathers and a reduce-scatter
        self._used.update(id(p) for p in self._plain if p.grad is not None)
        if self._plain:
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._plain]
            for parameter, total in zip(self._plain, self._exchange.sum(gradients, "unsharded"), strict=True):
                parameter.grad = total
        trained = [p for p in self._parameters() if p.requires_grad]
        is_used = [id(p) in self._used for p in trained]
        # PyTorch reduces zeros for a rank without a gradient; if no rank has one, it must be None.
        loss, *num_using = self._sums_of_step(weighted_loss, is_used)
        for parameter, number in zip(trained, num_using, strict=True) if num_using else ():
            if number == 0:
                parameter.grad = None
        return loss

    def _sums_of_step(self, weighted_loss: torch.Tensor, is_used: Sequence[bool]) -> list[Any]:
        """Return the loss and, if this rank lacks a gradient, for each parameter how many ranks have one."""
        all_used = all(is_used)
        if all_used:
            flags = torch.ones(len(is_used), dtype=weighted_loss.dtype, device=weighted_loss.device)
        else:
            flags = torch.tensor(is_used, pin_memory=weighted_loss.is_cuda).to(
                weighted_loss, non_blocking=True
            )
        sums = super().reduce(torch.cat([weighted_loss.detach().reshape(1), flags]))
        return [sums[0], *(() if all_used else sums[1:].tolist())]

    def gradients(self) -> list[torch.Tensor]:
        return [to_local(gradient) for gradient in super().gradients()]

    def norm(self) -> torch.Tensor:
        """Return the L2 norm of the whole gradient; each shard is counted once."""
        squares = squares_of(self._parameters(), lambda p: num_copies(p, self._ranks.size))
        dist.all_reduce(squares)
        return squares.sqrt()[0]


def announce_collectives(
    module: FSDPModule, name: str, paths: PathAgreement, used: set[int], rotation: Rotation
) -> None:
    """Record a unit's forward and backward passes in the path comparison, before their collectives.

    The ``id`` of each parameter with a gradient is added to ``used``. Forward passes that write weights are
    refused.
    """
    groups: Any = module._get_fsdp_state()._fsdp_param_groups  # noqa: SLF001  (no public API)
    for group in groups:
        watch = WeightWatch(rotation)
        group.pre_forward = _watched(
            _announced(group.pre_forward, f"the forward pass of {name}", paths), group, watch
        )
        group.post_forward = _unchanged(group.post_forward, watch, name)
        group.pre_backward = _announced(group.pre_backward, f"the backward pass of {name}", paths)
        group.post_backward = _recording_used(
            _announced(group.post_backward, f"the gradient of {name}", paths), group, used
        )


def _announced(method: Callable[..., Any], event: str, paths: PathAgreement) -> Callable[..., Any]:
    def call(*args: Any, **more: Any) -> Any:
        paths.event(event)
        return method(*args, **more)

    return call


def _watched(method: Callable[..., Any], group: Any, watch: WeightWatch) -> Callable[..., Any]:
    """Record the weights of a unit after ``method`` has gathered them."""

    def call(*args: Any, **more: Any) -> Any:
        result = method(*args, **more)
        gathered = (getattr(each, "_unsharded_param", None) for each in group.fsdp_params)
        watch.begin(weight for weight in gathered if weight is not None)
        return result

    return call


def _unchanged(method: Callable[..., Any], watch: WeightWatch, name: str) -> Callable[..., Any]:
    """Refuse a forward pass that changes gathered weights in place, because resharding drops the change."""

    def call(*args: Any, **more: Any) -> Any:
        if (weight := watch.end()) is not None:
            raise UserError(
                f"strategy fsdp: the forward pass of {name} changes a weight of shape {list(weight.shape)} "
                "in place, and the change is lost when the unit is resharded",
                hint="use strategy: allreduce; Embedding(max_norm=...), for example, changes its weight",
            )
        return method(*args, **more)

    return call


def _recording_used(method: Callable[..., Any], group: Any, used: set[int]) -> Callable[..., Any]:
    def call(*args: Any, **more: Any) -> Any:
        for each in group.fsdp_params:
            has_gradient = hasattr(each, "_unsharded_param") and each.unsharded_param.grad is not None
            if has_gradient or each.unsharded_accumulated_grad is not None:
                used.add(id(each.sharded_param))
        return method(*args, **more)

    return call


def num_ranks_of(wanted: int | Literal["host"] | None, num_ranks: int, hosts: Sequence[str]) -> int:
    """Return the size of a sharding group, given ``strategy.args.shard_ranks`` and the host of each rank.

    Raises:
        UserError: The data-parallel ranks cannot be divided into such groups of consecutive ranks.

    >>> num_ranks_of("host", 4, ["a", "a", "b", "b"])
    2
    """
    if wanted is None:
        return num_ranks
    if wanted == "host":
        runs = [(host, len(list(same))) for host, same in groupby(hosts)]
        if len({number for _, number in runs}) > 1 or len(runs) > len(set(hosts)):
            found = ", ".join(f"{number} on {host}" for host, number in runs)
            raise UserError(
                f"strategy.args.shard_ranks: host: each host must have the same number of consecutive "
                f"ranks: {found}",
                hint="start equally many consecutive ranks on each host, or set a number",
            )
        return runs[0][1]
    if num_ranks % wanted:
        raise UserError(
            f"strategy.args.shard_ranks: {wanted} does not divide {num_ranks} ranks",
            hint=f"start a multiple of {wanted} ranks, or leave shard_ranks out",
        )
    return wanted
