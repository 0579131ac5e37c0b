"""Pipeline parallelism: each rank stores some layers, and micro-batches pass from rank to rank.

The micro-batches of a step (``train.accumulation_steps``) are processed concurrently, in the order of a
schedule. The rank with the first stage reads inputs, and the rank with the last stage computes the loss. Both
call the task with a stand-in for the model (``values.py``).

Several pipelines are data-parallel replicas, and ranks with the same stage sum their gradients with
Horovod. The result equals that of a single process with the same micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_map

from horovod_train.collectives.base import Mesh
from horovod_train.config.schema import Job
from horovod_train.data.shard import PlannedStep
from horovod_train.errors import UserError
from horovod_train.frameworks.torch.comm.collectives import broadcast_model
from horovod_train.frameworks.torch.comm.groups import init_process_group, new_group, set_timeout
from horovod_train.frameworks.torch.state.local import LocalTensor, to_local, whole_parameters
from horovod_train.frameworks.torch.state.optimizer import check_separable
from horovod_train.frameworks.torch.state.shards import (
    local_tensor_of,
)
from horovod_train.frameworks.torch.strategies.base import Capabilities, DevicePlacement, PassContext
from horovod_train.frameworks.torch.strategies.tensor_parallel.strategy import (
    ModelParallel,
    modules_of_plan,
    plan_of,
    shard_layers,
)
from horovod_train.frameworks.torch.verify.verification import copy_of_task
from horovod_train.plugins.pipeline.cut import cut_model
from horovod_train.plugins.pipeline.passes import (
    Balance,
    Messages,
    Pass,
    PipelinePasses,
    Place,
    Stage,
    order_of,
)
from horovod_train.plugins.pipeline.values import (
    answered_with,
    drawing_by_stage,
    inputs_of_call,
)

DIRECTIONS = ("activations", "gradients")


@dataclass(frozen=True)
class Tied:
    """Parameter that several ranks of a pipeline use, and the process group of these ranks."""

    name: str
    num_ranks: int
    group: Any


class Pipeline(ModelParallel):
    """Strategy that splits a model into stages, which run on different ranks.

    The arguments are described in ``Arguments`` of this package, and ``plan`` in that of ``mesh``.
    ``pipeline_parallel_degree`` is not used, because it is the length of the mesh's pipeline axis.
    """

    def __init__(
        self,
        mesh: Mesh,
        job: Job,
        *,
        pipeline_parallel_degree: int | None = None,
        schedule: str = "1f1b",
        virtual_stages_per_rank: int = 1,
        balance: Balance = "parameters",
        plan: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(mesh, job)
        self._schedule = schedule
        self._balance = balance
        self._plan = plan
        self._num_chunks = virtual_stages_per_rank if mesh.axes.pipeline > 1 else 1
        self.capabilities = Capabilities(
            sharded=True,
            whole_weights=False,
            owns_schedule=True,
            sums_gradients=True,
            after_update=False,  # a rank stores only the weights of its stages
            num_loss_copies=mesh.axes.tensor,
        )
        self._signatures: dict[Hashable, int] = {}

    # -- the model

    def wrap(self, model: torch.nn.Module, move_to_device: DevicePlacement) -> torch.nn.Module:
        """Split rank 0's model into stages, and free the weights that this rank's stages do not use.

        Raises:
            UserError: The model cannot be split into so many stages.
        """
        task, example = move_to_device.task, move_to_device.example
        assert task is not None
        assert example is not None
        init_process_group(self._world, move_to_device.device, self._job.health)
        broadcast_model(model, self._world)
        parts_of = getattr(task, "pipeline_parts", None)
        stages = cut_model(
            model,
            None if parts_of is None else list(parts_of(model)),
            lambda: tree_map(_on_cpu, inputs_of_call(copy_of_task(task).loss, model, example(), 0)),
            self._axes.pipeline * self._num_chunks,
            self._world,
            self._balance,
            move_to_device.new_model,
        )
        self._firsts = [stage.first for stage in stages]
        self._place = self._placed(stages)
        self._tied = self._find_tied(model, stages)
        self._owns = self._names_of_stage(model, stages)
        keep_only(model, self._owns, move_to_device.device)
        if self._axes.tensor > 1:
            self._share_layers(model, stages, move_to_device)
        self._device = move_to_device.device
        self._messages = Messages(self._world, move_to_device.device)
        return model

    def _placed(self, stages: Sequence[Stage]) -> Place:
        """Return this rank's position; every rank must call it and creates all groups in the same order."""
        num_ranks = self._axes.pipeline
        for ranks in self._axes.pipelines():
            groups = {direction: new_group(ranks, self._job.health) for direction in DIRECTIONS}
            if self._world.rank in ranks:
                own_ranks, own_groups = ranks, groups
        rank = own_ranks.index(self._world.rank)
        own = [stages[chunk * num_ranks + rank] for chunk in range(self._num_chunks)]
        return Place(rank, own_ranks, own_groups, own)

    def _share_layers(
        self, model: torch.nn.Module, stages: Sequence[Stage], move_to_device: DevicePlacement
    ) -> None:
        """Shard this rank's layers along the tensor axis."""
        axes = self._axes
        whole = init_device_mesh(
            move_to_device.device.type,
            (axes.data, axes.pipeline, axes.tensor),
            mesh_dim_names=("data", "pipeline", "tensor"),
        )
        set_timeout(whole.get_group("tensor"), self._job.health)
        plan = modules_of_plan(model, self._plan or plan_of(model))
        used_directly = [
            f"{name}.{leaf}"
            for name in plan
            for leaf, _ in model.get_submodule(name).named_parameters(recurse=False)
            if any(f"{name}.{leaf}" in stage.names for stage in stages)
        ]
        if used_directly:
            raise UserError(
                f"strategy mesh: {used_directly[0]} is used outside of its module, and cannot be shared",
                hint="leave its module out of strategy.args.plan",
            )
        own = {name: style for name, style in plan.items() if any(s.owns(name) for s in self._place.stages)}
        shard_layers(model, whole["tensor"], own)

    def _find_tied(self, model: torch.nn.Module, stages: Sequence[Stage]) -> list[Tied]:
        """Return the parameters that this rank and other ranks of its pipeline use."""
        aliases: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            aliases.setdefault(id(parameter), []).append(name)
        found = []
        for names in aliases.values():
            using = [at for at, stage in enumerate(stages) if any(map(stage.owns, names))]
            places = sorted({at % self._axes.pipeline for at in using})
            for pipeline in self._axes.pipelines() if len(places) > 1 else ():
                ranks = [pipeline[place] for place in places]
                group = new_group(ranks, self._job.health)
                if self._world.rank in ranks:
                    found.append(Tied(names[0], len(ranks), group))
        return found

    def _names_of_stage(self, model: torch.nn.Module, stages: Sequence[Stage]) -> frozenset[str]:
        """Return the names of this rank's parameters and buffers; unused ones are on a pipeline's rank 0."""
        tensors: dict[int, list[str]] = {}
        for found in (
            model.named_parameters(remove_duplicate=False),
            model.named_buffers(remove_duplicate=False),
        ):
            for name, tensor in found:
                tensors.setdefault(id(tensor), []).append(name)
        own: set[str] = set()
        for names in tensors.values():
            is_used = any(stage.owns(name) for stage in stages for name in names)
            is_own = any(stage.owns(name) for stage in self._place.stages for name in names)
            if is_own or (not is_used and self._place.rank == 0):
                own.update(names)
        return frozenset(own)

    def bind(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Attach to this rank's stages; remove parameters of other stages from the optimizer.

        Raises:
            UserError: No parameter of this rank is trained, or the optimizer's update of a weight depends on
                weights of other stages.
        """
        self._numbering = [parameter.name for parameter in whole_parameters(model, optimizer)]
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if not parameter.is_meta]
        if not any(p.requires_grad for group in optimizer.param_groups for p in group["params"]):
            raise UserError(
                f"strategy pipeline: rank {self._world.rank} has no parameter that is trained",
                hint="use fewer stages, or strategy: fsdp, where layers are frozen",
            )
        if self._axes.pipeline > 1:
            check_separable(optimizer, self._job.strategy.name)
        super().bind(model, optimizer)
        self._required = [(parameter, parameter.requires_grad) for parameter in model.parameters()]

    def local_tensors(self) -> Mapping[str, LocalTensor]:
        """Return this rank's shards of the model's weights and buffers."""
        found = self._model.state_dict().items()
        return {name: local_tensor_of(tensor) for name, tensor in found if name in self._owns}

    # -- passes

    @contextmanager
    def same_random_state(self, model: torch.nn.Module, step: PlannedStep) -> Iterator[PlannedStep]:
        message = torch.tensor(draw_seed())  # run_schedule draws the same seed again on the first rank
        if self._axes.pipeline > 1:
            dist.broadcast(message, self._place.ranks[0], group=self._place.groups["activations"])

        def batches(begin: Callable[[int], None]) -> Iterator[Any]:
            for at, (_, batch) in enumerate(step):
                begin(int(message) + at)
                yield batch

        with drawing_by_stage(model, self._firsts) as begin:
            yield PlannedStep(step.share, batches(begin), step.is_last)

    def run_schedule(self, step: PlannedStep, context: PassContext) -> torch.Tensor:
        """Run the forward and backward passes of a step; return this rank's part of the loss, shape []."""
        batches = [batch for _, batch in step] if self._reads else []
        context.end_phase("data")
        shares = [micro_batch.share for micro_batch in step.share.micro_batches]
        losses: list[torch.Tensor] = []

        def weighted(loss: object, at: int) -> torch.Tensor:
            found = context.weight_loss(loss, shares[at])
            if found.is_meta:
                raise UserError(
                    "strategy pipeline: the task's loss uses weights that other ranks have",
                    hint="let the model itself return what depends on them",
                )
            losses.append(found.detach())
            return found

        if shares:
            passes = self._passes(
                context,
                context.task.loss,
                batches,
                len(shares),
                weighted,
                lambda at: nullcontext() if shares[at] else context.without_statistics(),
            )
            self._check_same_trained()
            order = order_of(
                self._schedule,
                rank=self._place.rank,
                num_ranks=self._axes.pipeline,
                num_chunks=self._num_chunks,
                num_micro_batches=len(shares),
            )
            passes.make(order, self._before_last)
        return torch.stack(losses).sum() if losses else torch.zeros((), device=self._device)

    def _check_same_trained(self) -> None:
        """Raise ``UserError`` if the set of trained parameters has changed, because messages depend on it."""
        if any(parameter.requires_grad != before for parameter, before in self._required):
            raise UserError(
                f"strategy {self._job.strategy.name}: the set of trained parameters has changed",
                hint="freeze parameters before training begins, or use strategy: allreduce",
            )

    def _before_last(self) -> None:
        if self._num_chunks == 1:  # otherwise, the last pass computes gradients of only one stage
            self._data.prepare_backward(is_last=True)

    def metrics_of(
        self, compute: Callable[[Any, Any], Mapping[str, Any]], batch: Any, context: PassContext
    ) -> Mapping[str, Any]:
        """Return the metrics of a batch on tensor rank 0 of the last stage; empty on other ranks."""
        batches = [batch] if self._reads else []
        passes = self._passes(
            context, compute, batches, 1, lambda metrics, _: metrics, lambda _: nullcontext()
        )
        found = [passes.forward(Pass("forward", chunk, 0)) for chunk in range(self._num_chunks)]
        self._messages.end()
        _, _, tensor = self._axes.place(self._world.rank)
        return found[-1] or {} if tensor == 0 else {}

    @property
    def _reads(self) -> bool:
        """Whether this rank reads batches, because it has the first or the last stage."""
        return self._place.rank in {0, self._axes.pipeline - 1}

    def _passes(
        self,
        context: PassContext,
        function: Callable[[Any, Any], Any],
        batches: Sequence[Any],
        num_micro_batches: int,
        result: Callable[[Any, int], Any],
        enter_pass: Callable[[int], AbstractContextManager[object]],
    ) -> PipelinePasses:
        """Prepare the passes; the first rank broadcasts a seed and the number of the micro-batches' kind."""
        message = torch.zeros(2, dtype=torch.int64)
        inputs: list[dict[str, Any]] = []
        if self._place.rank == 0:
            seed = draw_seed()
            with context.autocast():
                inputs = [
                    inputs_of_call(function, self._model, batch, seed + at)
                    for at, batch in enumerate(batches)
                ]
            kind = (torch.is_grad_enabled(), num_micro_batches, str(tree_map(_shape, inputs)))
            message = torch.tensor([self._signatures.setdefault(kind, len(self._signatures)), seed])
        if self._axes.pipeline > 1:
            dist.broadcast(message, self._place.ranks[0], group=self._place.groups["activations"])
        number, seed = message.tolist()
        self._messages.begin(number)

        def made_of(at: int, output: Any) -> Any:
            return result(answered_with(function, self._model, batches[at], output, seed + at), at)

        return PipelinePasses(
            self._place,
            self._messages,
            inputs=inputs.__getitem__,
            result=made_of,
            autocast=context.autocast,
            end_phase=context.end_phase,
            seed=seed,
            context=enter_pass,
        )

    # -- the rest of a step

    def reduce(self, weighted_loss: torch.Tensor) -> torch.Tensor:
        """Sum gradients over ranks with the same stage, and of parameters that several ranks use."""
        loss = super().reduce(weighted_loss)
        for tied in self._tied:
            parameter = self._model.get_parameter(tied.name)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(to_local(parameter.grad), group=tied.group)
        # Only ranks with the last stage have the loss; the first of them sends it to all ranks.
        has_it = self._axes.place(self._world.rank) == (0, self._axes.pipeline - 1, 0)
        message = (loss if has_it else torch.zeros_like(loss)).reshape(1)
        return self._world.wait(self._world.start_allreduce(message, "horovod_train.loss"))[0]

    def _num_copies(self, parameter: torch.nn.Parameter) -> int:
        """Return the number of ranks that store the same shard of a parameter, which stages may share."""
        having = [t.num_ranks for t in self._tied if self._model.get_parameter(t.name) is parameter]
        return super()._num_copies(parameter) * (having[0] if having else 1)


def draw_seed() -> int:
    """Return a seed, drawn from this rank's generator."""
    return int(torch.randint(2**31, (), dtype=torch.int64))


def keep_only(model: torch.nn.Module, names: frozenset[str], device: torch.device) -> None:
    """Move the named tensors to a device; replace other parameters by parameters on the meta device."""
    empty: dict[torch.nn.Parameter, torch.nn.Parameter] = {}  # tied parameters remain tied
    for module_name, module in model.named_modules():
        prefix = f"{module_name}." if module_name else ""
        for name, parameter in list(module._parameters.items()):  # noqa: SLF001  (includes None)
            if parameter is None:
                continue
            if prefix + name in names:
                parameter.data = parameter.data.to(device)
            else:
                if parameter not in empty:
                    without = torch.empty_like(parameter, device="meta")
                    empty[parameter] = torch.nn.Parameter(without, requires_grad=parameter.requires_grad)
                setattr(module, name, empty[parameter])
        for name, buffer in list(module._buffers.items()):  # noqa: SLF001
            if buffer is not None and prefix + name in names:
                buffer.data = buffer.data.to(device)


def _on_cpu(leaf: Any) -> Any:
    return leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf


def _shape(leaf: Any) -> object:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf
