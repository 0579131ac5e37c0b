"""Lightning strategy that trains on Horovod's ranks, and sums gradients while backward runs."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import lightning
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torchmetrics import Metric

from horovod_train.checkpoint.arrays import dump_state, parse_state
from horovod_train.collectives.base import Communicator, barrier
from horovod_train.collectives.horovod import HorovodCommunicator
from horovod_train.config.schema import Allreduce
from horovod_train.errors import CheckpointError, UserError
from horovod_train.frameworks.devices import join
from horovod_train.frameworks.torch.comm.collectives import (
    Exchange,
    TorchCommunicator,
    broadcast_model,
    size_bytes_of,
    sum_over,
    tensor_communicator,
)
from horovod_train.frameworks.torch.comm.sync_batch_norm import synchronize_batch_norm
from horovod_train.frameworks.torch.state.local import pack_tensors, unpack_tensors
from horovod_train.frameworks.torch.step import deferred
from horovod_train.frameworks.torch.step.gradient_hooks import (
    GradientHooks,
    defer_hooks_after_accumulation,
)
from horovod_train.frameworks.torch.strategies.allreduce.strategy import make_allreduce
from horovod_train.frameworks.torch.strategies.base import Strategy

OPERATIONS = {"mean": "Average", "avg": "Average", "sum": "Sum", "min": "Min", "max": "Max"}
NATIVE_DTYPES = {torch.int32, torch.int64, torch.float16, torch.float32, torch.float64}
FACTOR = "horovod_train_lr_factor"


class HorovodEnvironment(ClusterEnvironment):
    """Cluster environment of ranks that ``horovodrun``, ``mpirun`` or ``srun`` started."""

    def __init__(self, world: Communicator) -> None:
        super().__init__()
        self._world = world

    @property
    def creates_processes_externally(self) -> bool:
        """True: Lightning must not start processes."""
        return True

    @property
    def main_address(self) -> str:
        """Not used: torch.distributed is never initialized."""
        return socket.gethostname()

    @property
    def main_port(self) -> int:
        """Not used: torch.distributed is never initialized."""
        return 0

    @staticmethod
    def detect() -> bool:
        """Return False: only ``HorovodStrategy`` selects this environment."""
        return False

    def world_size(self) -> int:
        """Return the number of ranks."""
        return self._world.size

    def set_world_size(self, size: int) -> None:
        """Do nothing: the launcher sets the size."""

    def global_rank(self) -> int:
        """Return the rank of this process."""
        return self._world.rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the launcher sets the rank."""

    def local_rank(self) -> int:
        """Return the local rank of this process."""
        return self._world.local_rank

    def node_rank(self) -> int:
        """Return the index of the host."""
        world = self._world
        return int(world.hvd.cross_rank()) if isinstance(world, HorovodCommunicator) else 0

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Do nothing: the launcher sets the number of ranks, not ``Trainer``."""


class HorovodStrategy(ParallelStrategy):
    """Data-parallel training on Horovod's ranks.

    With automatic optimization, gradients are summed while backward runs, only in the last micro-batch of a
    step, and before clipping. With manual optimization, the gradients of an optimizer are averaged before its
    step. The first five arguments are as in other strategies; ``cluster_environment`` is not used.

    Args:
        scale_learning_rate: Scaling of learning rates with the number of ranks: linear, sqrt or none. Rates
            in checkpoints of another number of ranks are adapted.
        bucket_size_mib: Approximate size of a bucket of gradients.
        wire_dtype: Data type of sent gradients: fp32, fp16, bf16. Not used with manual optimization.
        world: The communicator; None: that of this process.

    Raises:
        EngineError: The process is one of several ranks, and Horovod is missing or cannot start.
    """

    strategy_name = "horovod"

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        *,
        scale_learning_rate: Literal["linear", "sqrt", "none"] = "none",
        bucket_size_mib: float = 8.0,
        wire_dtype: Literal["fp32", "fp16", "bf16"] = "fp32",
        world: Communicator | None = None,
    ) -> None:
        self.world = join(TorchCommunicator) if world is None else world
        super().__init__(
            accelerator, parallel_devices, HorovodEnvironment(self.world), checkpoint_io, precision_plugin
        )
        rank_zero_only.rank = self.world.rank
        self._allreduce = Allreduce(bucket_size_mib=bucket_size_mib, wire_dtype=wire_dtype)
        rules = {"linear": float(self.world.size), "sqrt": self.world.size**0.5, "none": 1.0}
        if scale_learning_rate not in rules:
            raise UserError(
                f"unknown value of scale_learning_rate: {scale_learning_rate!r}",
                hint=f"use one of {', '.join(rules)}",
            )
        self.lr_factor = rules[scale_learning_rate]
        self.share = 1.0 / self.world.size  # weight of this rank's loss in the step
        self.gradients: Strategy | None = None  # reduces gradients; None with manual optimization
        self.loss: torch.Tensor | None = None
        self._weighted_loss: torch.Tensor | None = None
        self._is_blocked = False

    # -- ranks and devices

    @property
    def is_distributed(self) -> bool:
        """True: otherwise, Lightning would not inject a distributed sampler."""
        return True

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        devices: list[torch.device] = self.parallel_devices or [torch.device("cpu")]
        # Trainer passes one device, if each rank sees only its own, or else one for each rank.
        return devices[self.local_rank if len(devices) > self.local_rank else 0]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Arguments of the injected sampler."""
        return {"num_replicas": self.world.size, "rank": self.world.rank}

    def model_to_device(self) -> None:
        """Move the model to the device of this rank."""
        assert self.model is not None
        self.model.to(self.root_device)

    def setup(self, trainer: lightning.Trainer) -> None:
        """Broadcast rank 0's weights; before a fit, also scale learning rates and create the reducer."""
        super().setup(trainer)
        assert self.model is not None
        self._hooks = GradientHooks(list(self.model.parameters()).copy)
        if self.world.size > 1:
            self._synchronize_metrics()
            self._synchronize_batch_norm()
            broadcast_model(self.model, self.world)
        if trainer.state.fn == TrainerFn.FITTING:
            scale_rates(self.optimizers, [c.scheduler for c in self.lr_scheduler_configs], self.lr_factor)
            defer_hooks_after_accumulation(self.model)
            if self._is_automatic:
                (optimizer,) = self.optimizers
                self.gradients = make_allreduce(self.world, self._allreduce)
                self.gradients.bind(self.model, optimizer)
                if deferred.lag_steps_of(self.root_device):
                    self.gradients.defer_results()

    def teardown(self) -> None:
        """Detach the gradient reducer from the parameters."""
        if self.gradients is not None:
            self.gradients.close()
        self.gradients = None
        super().teardown()

    @property
    def _is_automatic(self) -> bool:
        assert self.lightning_module is not None
        return bool(self.lightning_module.automatic_optimization)

    # -- gradients

    def backward(
        self,
        closure_loss: torch.Tensor,
        optimizer: torch.optim.Optimizer | None,
        *args: object,
        **kwargs: object,
    ) -> torch.Tensor:
        """Run backward for this rank's weighted loss."""
        self._hooks.defer()
        if self.gradients is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        weighted = closure_loss * self.share
        before = self._weighted_loss
        self._weighted_loss = weighted.detach() if before is None else before + weighted.detach()
        return super().backward(weighted, optimizer, *args, **kwargs)

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        """Enable the all-reduce of gradients while backward runs, in the last backward of a step."""
        if self.gradients is not None and not self._is_blocked:
            self.gradients.prepare_backward(is_last=True)

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """Wait for the all-reduce of gradients, after the last backward of a step."""
        if self.gradients is not None and not self._is_blocked:
            assert self._weighted_loss is not None
            self.loss = self.gradients.reduce(self._weighted_loss)
            self._hooks.call()
            self._weighted_loss = None

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Accumulate gradients without communication."""
        self._is_blocked = True
        try:
            yield
        finally:
            self._is_blocked = False

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], object],
        model: object = None,
        **kwargs: object,
    ) -> object:
        """Perform an optimizer step; with manual optimization, average the optimizer's gradients first."""
        if not self._is_automatic:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            if self.world.size > 1:
                self._average_gradients_of(parameters)
            GradientHooks(lambda: parameters).call()
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    def _average_gradients_of(self, optimized: list[torch.nn.Parameter]) -> None:
        """Average gradients over ranks; if only other ranks have a gradient, this rank contributes zeros."""
        parameters = [p for p in optimized if p.requires_grad]
        num_users = self.world.allreduce_sum([float(p.grad is not None) for p in parameters])
        used = [p for p, users in zip(parameters, num_users, strict=True) if users]
        for parameter in used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        means = Exchange(self.world, int(self._allreduce.bucket_size_mib * 2**20)).mean(
            [p.grad for p in used if p.grad is not None]
        )
        for parameter, mean in zip(used, means, strict=True):
            parameter.grad = mean

    # -- collectives

    def reduce(self, tensor: Any, group: object = None, reduce_op: Any = "mean") -> Any:
        """Return the mean, sum, minimum or maximum of a tensor over ranks; other objects are unchanged."""
        if self.world.size == 1 or not isinstance(tensor, torch.Tensor):
            return tensor
        name = str(getattr(reduce_op, "name", reduce_op)).rpartition(".")[2].lower()
        if name not in OPERATIONS:
            raise UserError(f"cannot reduce by {reduce_op!r}", hint=f"use one of {', '.join(OPERATIONS)}")
        is_native = tensor.dtype in NATIVE_DTYPES and not (
            name in {"mean", "avg"} and not tensor.is_floating_point()
        )
        sent = tensor.detach() if is_native else tensor.detach().float()
        hvd = self._horovod.hvd
        total = self._horovod.call(
            lambda: hvd.allreduce(sent, op=getattr(hvd, OPERATIONS[name])), "reduce", size_bytes_of(sent)
        )
        return total.to(tensor.dtype) if tensor.is_floating_point() else total

    def all_gather(
        self, tensor: torch.Tensor, group: object = None, sync_grads: bool = False
    ) -> torch.Tensor:
        """Return the tensors of all ranks, shape [ranks, ...].

        With ``sync_grads``, the gradient of this rank's tensor is the sum of its gradients on all ranks, as
        losses are weighted by their samples; Horovod's own operation averages it.
        """
        if self.world.size == 1:
            return tensor.unsqueeze(0)
        found: torch.Tensor = _Gather.apply(tensor if sync_grads else tensor.detach(), self._horovod)  # type: ignore[no-untyped-call]
        return found

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank ``src``'s object: numbers, text, tensors, and lists, tuples and mappings of them.

        Raises:
            UserError: The object has another type; objects are not pickled.
        """
        if self.world.size == 1:
            return obj
        try:
            data = dump_state(*pack_tensors({"value": obj}, None)) if self.world.rank == src else b""
        except CheckpointError as error:
            raise UserError(
                f"cannot broadcast a {type(obj).__name__}: {error.message}",
                hint="send plain data; objects are not pickled between ranks",
            ) from error
        return unpack_tensors(*parse_state(self.world.allgather(data)[src]))["value"]

    def barrier(self, name: str | None = None) -> None:
        """Wait until every rank has called this method."""
        barrier(self.world)

    @property
    def _horovod(self) -> TorchCommunicator:
        assert isinstance(self.world, TorchCommunicator)
        return self.world

    def _synchronize_metrics(self) -> None:
        """Make torchmetrics synchronize over all ranks: on its own, it supports only torch.distributed."""
        assert self.lightning_module is not None
        for module in self.lightning_module.modules():
            if isinstance(module, Metric):
                module.dist_sync_fn = self._gather_tensors
                module.distributed_available_fn = lambda: True

    def _synchronize_batch_norm(self) -> None:
        """Make ``SyncBatchNorm`` use the statistics of all ranks; ``sync_batchnorm`` of Trainer adds it."""
        assert self.model is not None
        if self._layer_sync is not None:
            self._layer_sync.apply(self.model)  # in place, because the module itself is no such layer
        total = partial(sum_over, tensor_communicator(self.world))
        synchronize_batch_norm(self.model, total, every=False, prefix="horovod_train.batch_norm")

    def _gather_tensors(self, tensor: torch.Tensor, group: object = None) -> list[torch.Tensor]:
        """Return the tensor of each rank; shapes may differ."""
        tree, arrays = pack_tensors({"value": tensor}, None)
        pieces = self.world.allgather(dump_state(tree, arrays))
        return [unpack_tensors(*parse_state(piece))["value"].to(tensor.device) for piece in pieces]

    # -- checkpoints

    def save_checkpoint(
        self, checkpoint: dict[str, object], filepath: str | os.PathLike[str], storage_options: object = None
    ) -> None:
        """Write a checkpoint on rank 0, with the factor on learning rates."""
        checkpoint[FACTOR] = self.lr_factor
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, object]:
        """Read a checkpoint; adapt learning rates that were scaled by another factor."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        ratio = self.lr_factor / checkpoint.get(FACTOR, self.lr_factor)
        if ratio != 1.0:
            rescale_checkpoint(checkpoint, ratio)
        return checkpoint


class _Gather(torch.autograd.Function):
    """Tensors of all ranks, shape [ranks, ...]; in the backward pass, the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, world: TorchCommunicator) -> torch.Tensor:
        ctx.world = world
        own = tensor.detach().unsqueeze(0).contiguous()
        gathered: torch.Tensor = world.call(
            lambda: world.hvd.allgather(own), "all_gather", size_bytes_of(own)
        )
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        world: TorchCommunicator = ctx.world
        (gradient,) = (each.contiguous() for each in gradients)
        total: torch.Tensor = world.call(
            lambda: world.hvd.allreduce(gradient, op=world.hvd.Sum),
            "all_gather.grad",
            size_bytes_of(gradient),
        )
        return total[world.rank], None


def scale_rates(optimizers: Any, schedulers: Any, factor: float) -> None:
    """Multiply the learning rates of optimizers, and the base rates of their schedulers."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for key in ("lr", "initial_lr"):
                if key in group:
                    group[key] = group[key] * factor
    for scheduler in schedulers:
        if hasattr(scheduler, "base_lrs"):
            scheduler.base_lrs = [rate * factor for rate in scheduler.base_lrs]


def rescale_checkpoint(checkpoint: Mapping[str, Any], ratio: float) -> None:
    """Multiply all learning rates in a Lightning checkpoint."""
    for state in checkpoint.get("optimizer_states", []):
        for group in state["param_groups"]:
            for key in ("lr", "initial_lr"):
                if key in group:
                    group[key] = group[key] * ratio
    for state in checkpoint.get("lr_schedulers", []):
        for key in ("base_lrs", "_last_lr"):
            if key in state:
                state[key] = [rate * ratio for rate in state[key]]


if "horovod" not in StrategyRegistry.available_strategies():
    StrategyRegistry.register("horovod", HorovodStrategy, description="Ranks started by horovodrun")
