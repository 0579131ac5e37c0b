"""Tensor parallelism: each layer is sharded over ranks with PyTorch's ``DTensor``.

ModelParallel    base of strategies that split a model over ranks, and sum gradients of data-parallel
                 ranks with Horovod
TensorParallel   the strategy ``tensor_parallel``
plan_of          which layers are sharded, and how
shard_layers     shards them
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from horovod_train.collectives.base import Mesh
from horovod_train.config.schema import Job
from horovod_train.errors import UserError
from horovod_train.frameworks.torch.comm.collectives import broadcast_model, tensor_communicator
from horovod_train.frameworks.torch.comm.groups import init_process_group, set_timeout
from horovod_train.frameworks.torch.state.local import LocalTensor, OptimizedParameter, to_local
from horovod_train.frameworks.torch.state.shards import (
    disable_foreach_for_mixed_groups,
    local_tensors_of_model,
    num_copies,
    optimized_parameters,
    squares_of,
)
from horovod_train.frameworks.torch.strategies.allreduce.strategy import make_allreduce
from horovod_train.frameworks.torch.strategies.base import Capabilities, DevicePlacement, Strategy
from horovod_train.frameworks.torch.verify.verification import refuse_hooks_of_parameters


class ModelParallel(Strategy):
    """Base of strategies with a part of the model on each rank; data-parallel ranks store the same part."""

    capabilities = Capabilities(sharded=True, whole_weights=False, sums_gradients=True)

    def __init__(self, mesh: Mesh, job: Job) -> None:
        self._job = job
        self._world = tensor_communicator(mesh.world)
        self._axes = mesh.axes
        self._data = make_allreduce(mesh.data, job.allreduce)

    def bind(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().bind(model, optimizer)
        self._data.bind(model, optimizer)
        disable_foreach_for_mixed_groups(optimizer)

    def defer_results(self) -> None:
        """Require that, from the next step on, the host does not wait for the device within a step."""
        super().defer_results()
        self._data.defer_results()

    def close(self) -> None:
        self._data.close()

    def optimized(self) -> Sequence[OptimizedParameter]:
        """Return this rank's shards of the optimizer's parameters, in its order."""
        return optimized_parameters(self._model, self._optimizer)

    def reduce(self, weighted_loss: torch.Tensor) -> torch.Tensor:
        """Sum gradients over the ranks that store the same part of the model; return the loss."""
        loss = self._data.reduce(weighted_loss)
        self.sent_bytes, self.layout_version = self._data.sent_bytes, self._data.layout_version
        if self._axes.tensor == 1 or self.capabilities.owns_schedule:
            return loss
        # Tensor-parallel ranks compute the same loss. They must agree on whether it is finite, also if it is
        # finite only on some of them.
        mean = (loss / self._axes.tensor / self._axes.data).reshape(1)
        return self._world.wait(self._world.start_allreduce(mean, "horovod_train.loss"))[0]

    def gradients(self) -> list[torch.Tensor]:
        return [to_local(gradient) for gradient in self._data.gradients()]

    def norm(self) -> torch.Tensor:
        """Return the L2 norm of the whole gradient; each shard is counted once."""
        squares = squares_of(self._trained(), self._num_copies)
        return self._world.wait(self._world.start_allreduce(squares, "horovod_train.norm")).sqrt()[0]

    def _num_copies(self, parameter: torch.nn.Parameter) -> int:
        """Return the number of ranks that store the same shard of a parameter."""
        return num_copies(parameter, self._axes.data * self._axes.tensor)

    def _trained(self) -> Iterator[torch.nn.Parameter]:
        return (parameter for group in self._optimizer.param_groups for parameter in group["params"])


STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather": lambda: ColwiseParallel(output_layouts=Replicate()),
    "embedding": lambda: RowwiseParallel(input_layouts=Replicate()),
    # Sequence parallelism: between layers, activations are sharded in dimension 1, the sequence.
    "sequence": lambda: SequenceParallel(use_local_output=True),
    "sequence_begins": lambda: PrepareModuleInput(
        input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True
    ),
    "sequence_ends": lambda: PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True
    ),
    "colwise_sequence": lambda: ColwiseParallel(input_layouts=Shard(1)),
    "rowwise_sequence": lambda: RowwiseParallel(output_layouts=Shard(1)),
}
TRANSFORMERS_STYLES = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "colwise_gather_output": "colwise_gather",
    "embedding_rowwise": "embedding",
}
"""Styles by their names in the plan of a Transformers model (``_tp_plan``)."""
SHARD_DIMENSION = {
    "colwise": 0,
    "colwise_gather": 0,
    "colwise_sequence": 0,
    "embedding": 0,
    "rowwise": 1,
    "rowwise_sequence": 1,
}
"""Dimension in which the weight is sharded, for styles that shard a weight."""


class TensorParallel(ModelParallel):
    """Strategy that shards layers along the mesh's tensor axis.

    A linear layer is sharded by its outputs (colwise) and the next one by its inputs (rowwise), so that
    ranks exchange activations once for two layers. Tensor-parallel ranks read the same samples.
    Data-parallel ranks store the same shards, read different samples, and sum their gradients with Horovod.

    ``plan`` is described in ``Arguments`` of this package. ``tensor_parallel_degree`` is not used, because it
    is the length of the mesh's tensor axis.
    """

    def __init__(
        self,
        mesh: Mesh,
        job: Job,
        *,
        tensor_parallel_degree: int | None = None,
        plan: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(mesh, job)
        self._plan = plan

    def wrap(self, model: torch.nn.Module, move_to_device: DevicePlacement) -> torch.nn.Module:
        """Shard the layers of rank 0's model.

        Raises:
            UserError: There is no plan, or it does not fit the model.
        """
        refuse_hooks_of_parameters(model, self._job.strategy.name, are_parameters_replaced=True)
        init_process_group(self._world, move_to_device.device, self._job.health)
        broadcast_model(model, self._world)
        placed = move_to_device(model)
        chosen = modules_of_plan(placed, self._plan or plan_of(placed))
        shard_layers(placed, self._tensor_mesh(move_to_device), chosen)
        return placed

    def _tensor_mesh(self, move_to_device: DevicePlacement) -> DeviceMesh:
        """Return the device mesh of the ranks over which layers are sharded."""
        axes = (self._axes.data, self._axes.tensor)
        mesh = init_device_mesh(move_to_device.device.type, axes, mesh_dim_names=("data", "tensor"))
        set_timeout(mesh.get_group("tensor"), self._job.health)
        return mesh["tensor"]

    def local_tensors(self) -> Mapping[str, LocalTensor]:
        """Return this rank's shards of the model's weights and buffers."""
        return local_tensors_of_model(self._model)

    def prepare_backward(self, *, is_last: bool) -> None:
        """All-reduce buckets during the next backward pass, if it is the last of this step."""
        self._data.prepare_backward(is_last=is_last)


def plan_of(model: torch.nn.Module) -> dict[str, str]:
    """Return the style by name pattern for Transformers models and PyTorch's transformer layers.

    Raises:
        UserError: The model has no plan, and no such layers.
    """
    plan = {
        pattern: TRANSFORMERS_STYLES.get(style, style)
        for pattern, style in (getattr(model, "_tp_plan", None) or {}).items()
    }
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.TransformerEncoderLayer | torch.nn.TransformerDecoderLayer):
            plan |= {f"{name}.linear1": "colwise", f"{name}.linear2": "rowwise"}
    if not plan:
        raise UserError(
            f"strategy tensor_parallel: there is no sharding plan for a {type(model).__name__}",
            hint="set strategy.args.plan, for example {'blocks.*.up': colwise, 'blocks.*.down': rowwise}",
        )
    return plan


def modules_of_plan(model: torch.nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Return the style by name of module.

    Raises:
        UserError: A style is unknown, or a pattern matches no module.
    """
    chosen: dict[str, str] = {}
    for pattern, style in plan.items():
        if style not in STYLES:
            raise UserError(
                f"strategy tensor_parallel: unknown sharding style {style!r} of {pattern}",
                hint=f"styles are {', '.join(STYLES)}; correct strategy.args.plan",
            )
        fitting = [name for name, _ in model.named_modules() if fnmatchcase(name, pattern)]
        if not fitting:
            raise UserError(f"strategy.args.plan: {pattern!r} fits no module")
        chosen |= dict.fromkeys(fitting, style)
    return chosen


def shard_layers(model: torch.nn.Module, mesh: DeviceMesh, chosen: Mapping[str, str]) -> None:
    """Shard a model's layers over the ranks of a device mesh; ``chosen`` is the style by name of module.

    Raises:
        UserError: A weight cannot be sharded in its style.
    """
    for name, style in chosen.items():
        if style in SHARD_DIMENSION:
            check_can_be_cut(name, model.get_submodule(name), style, mesh.size())
    tied = _tied(model)
    parallelize_module(model, mesh, {name: STYLES[style]() for name, style in chosen.items()})
    _tie_again(model, tied)
    if torch.backends.mha.get_fastpath_enabled():
        torch.backends.mha.set_fastpath_enabled(False)  # it does not support DTensor weights


def check_can_be_cut(name: str, module: torch.nn.Module, style: str, num_ranks: int) -> None:
    """Raise ``UserError`` if a module has no 2-D weight, or its size is not divisible by ``num_ranks``."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
        raise UserError(
            f"strategy tensor_parallel: {name} is a {type(module).__name__}, which cannot be cut",
            hint="Linear and Embedding can",
        )
    length = weight.shape[SHARD_DIMENSION[style]]
    if style != "embedding" and length % num_ranks:
        raise UserError(
            f"strategy tensor_parallel: {name} has {length} "
            f"{'inputs' if SHARD_DIMENSION[style] else 'outputs'}, which {num_ranks} ranks cannot share",
            hint="set tensor_parallel_degree to a divisor, or leave it out of strategy.args.plan",
        )


def _tied(model: torch.nn.Module) -> list[list[str]]:
    """Return the names of each tied parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [each for each in names.values() if len(each) > 1]


def _tie_again(model: torch.nn.Module, tied: Sequence[Sequence[str]]) -> None:
    """Restore the identity of tied parameters after sharding."""
    for first, *others in tied:
        source = model.get_parameter(first)
        for name in others:
            own = model.get_parameter(name)
            if getattr(own, "placements", None) != getattr(source, "placements", None):
                raise UserError(
                    f"strategy tensor_parallel: {first} and {name} are one weight, cut in two ways",
                    hint="share both in the same way in strategy.args.plan, or neither",
                )
            module, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(module), leaf, source)
