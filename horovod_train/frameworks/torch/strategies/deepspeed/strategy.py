"""DeepSpeed's ZeRO, stages 1 to 3, with offload to the host's memory or to NVMe.

DeepSpeed reduces gradients, clips them and makes the optimizer's step; samples, learning rate, losses and
checkpoints are ours, as under any strategy. Nothing of DeepSpeed's launcher, configuration file or pickled
checkpoints is used.

DeepSpeed takes the mean of ranks' gradients. Losses are weighted here so that a sum is wanted, and are
multiplied by the number of ranks before the backward pass.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
arXiv:1910.02054.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import torch

from horovod_train.checkpoint.arrays import Part
from horovod_train.collectives.mesh import Mesh
from horovod_train.config.schema import Job
from horovod_train.errors import UserError, translated
from horovod_train.frameworks.torch.comm.collectives import broadcast_model
from horovod_train.frameworks.torch.comm.process_group import agree_on_paths
from horovod_train.frameworks.torch.state.elementwise import check_elementwise
from horovod_train.frameworks.torch.state.local_tensors import LocalTensor, OptimizedParameter
from horovod_train.frameworks.torch.state.optimizer import clone_optimizer
from horovod_train.frameworks.torch.strategies.base import Capabilities, DevicePlacement
from horovod_train.frameworks.torch.strategies.deepspeed.flat_state import FlatState
from horovod_train.frameworks.torch.strategies.torch_distributed import TorchDistributed
from horovod_train.system.optional import import_optional

log = logging.getLogger(__name__)

BYTES_OF_WEIGHT = 4


class DeepSpeed(TorchDistributed):
    """Lets DeepSpeed share optimizer state, gradients and weights between ranks.

    Args:
        mesh: Of the ranks.
        job: Says how large buckets are, and the largest norm of a gradient.
        stage: 1: optimizer state is shared; 2: gradients, too; 3: weights, too.
        offload_optimizer: Where the optimizer's state is kept; None: on the device.
        offload_parameters: ``cpu``: weights that are not in use are there; None: on the device.
        nvme_path: Folder on the disk for what goes to ``nvme``.
        zero_optimization: Further settings of DeepSpeed's section of that name.

    Raises:
        UserError: DeepSpeed is not installed.
    """

    capabilities = Capabilities(
        collective_passes=True,
        sharded=True,
        whole_weights=False,
        after_update=False,  # its optimizer keeps copies of the weights, and overwrites them in each step
        deferred_results=False,  # DeepSpeed reads from the device in each step
        owns_update=True,
        unused_have_zeros=True,
    )

    def __init__(
        self,
        mesh: Mesh,
        job: Job,
        *,
        stage: int = 3,
        offload_optimizer: Literal["cpu", "nvme"] | None = None,
        offload_parameters: Literal["cpu"] | None = None,
        nvme_path: str | None = None,
        zero_optimization: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(mesh, job)
        self._stage = stage
        self._offload = {"offload_optimizer": offload_optimizer, "offload_param": offload_parameters}
        self._nvme_path = nvme_path
        self._more = zero_optimization or {}
        self._is_last = True
        self._has_gradients = False
        self._divisor = 1.0
        self._engine: Any = None

    # -- the model

    def wrap(self, model: torch.nn.Module, placing: DevicePlacement) -> torch.nn.Module:
        """Start PyTorch's process group; return rank 0's model where it is trained.

        Raises:
            UserError: DeepSpeed is missing, or the model cannot be trained with it.
        """
        self._device = placing.device
        self._deepspeed = imported(placing.device)
        for name, parameter in model.named_parameters():
            if parameter.dtype != torch.float32:
                dtype = str(parameter.dtype).removeprefix("torch.")
                raise UserError(
                    f"strategy deepspeed: {name!r} is {dtype}, and DeepSpeed keeps weights in float32",
                    hint="make the model in float32 (train.precision: bf16 computes in bfloat16), or use "
                    "strategy: fsdp",
                )
        if placing.device.type == "cpu" and "cpu" in self._offload.values() and self._ranks.rank == 0:
            log.warning("strategy.args.offload_*: cpu has no effect without a GPU")
        self._start_groups(placing.device)
        self._deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)  # the group is there
        broadcast_model(model, self._ranks)
        return placing(model)

    def bind(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Attach to a model and its optimizer; DeepSpeed shards them.

        Raises:
            UserError: The optimizer cannot be split, or DeepSpeed refuses.
        """
        super().bind(model, optimizer)
        check_elementwise(optimizer, "deepspeed")
        self._check_groups(optimizer)
        self._numbering = [parameter.name for parameter in super().optimized()]
        self._num_parameters = super().num_parameters()
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._paths = agree_on_paths(self._ranks, self._job.health)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:  # before DeepSpeed's hook, which reduces the gradient
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    partial(self._on_gradient, f"the gradient of {name}")
                )
        # It is compared with what MPI says; later it is the number of the device.
        set_variable("LOCAL_RANK", os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0"))
        device = self._device.index or 0
        with translated(refusal):
            self._engine, made, _, _ = self._deepspeed.initialize(
                args=SimpleNamespace(device_rank=device),
                model=model,
                # With its own groups: DeepSpeed puts other parameters into them.
                optimizer=clone_optimizer(optimizer, [dict(group) for group in optimizer.param_groups]),
                config=self._configuration(),
            )
        set_variable("LOCAL_RANK", str(device))
        self._made = made
        if self._stage == 3:
            self._announce_gathers(model)
        self._flat = FlatState(model, made, names, self._stage, self._data.rank)
        self._bytes_once = BYTES_OF_WEIGHT * self._num_parameters

    def _on_gradient(self, event: str, _: torch.Tensor) -> None:
        self._paths.event(event)

    def _announce_gathers(self, model: torch.nn.Module) -> None:
        """Let modules announce their forward and backward pass before DeepSpeed gathers their weights."""
        coordinator = self._made.parameter_offload.get_param_coordinator()
        fetch = coordinator.fetch_sub_module
        names = {id(module): name or "the model" for name, module in model.named_modules()}

        def fetch_announced(module: torch.nn.Module, forward: bool) -> None:
            kind = "forward" if forward else "backward"
            self._paths.event(f"the {kind} pass of {names.get(id(module), type(module).__name__)}")
            fetch(module, forward)

        coordinator.fetch_sub_module = fetch_announced
        model.register_forward_pre_hook(lambda *_: self._begin_evaluation(), prepend=True)

    def _begin_evaluation(self) -> None:
        if not torch.is_grad_enabled():
            self._paths.begin_pass("evaluation")

    def _check_groups(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse what DeepSpeed would fall over, or change in silence."""
        if isinstance(optimizer, torch.optim.Adagrad):
            raise UserError(
                "strategy deepspeed: DeepSpeed creates its own Adagrad, without the settings of this one",
                hint="use sgd, adam or adamw, or strategy: zero or fsdp",
            )
        for number, group in enumerate(optimizer.param_groups):
            if self._stage < 3 and not any(parameter.requires_grad for parameter in group["params"]):
                raise UserError(
                    f"strategy deepspeed: all parameters of group {number} are frozen, which stage "
                    f"{self._stage} cannot have",
                    hint="leave the group out of param_groups(model), or use stage: 3",
                )

    def _configuration(self) -> dict[str, Any]:
        """Return DeepSpeed's configuration."""
        aligned = 2 * self._data.size  # buckets have to be multiples of it
        wanted = self._job.allreduce.bucket_size_mib * 2**20 / BYTES_OF_WEIGHT
        bucket = math.ceil(wanted / aligned) * aligned
        zero: dict[str, Any] = {
            "stage": self._stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
        }
        if self._stage == 3:
            # Its defaults gather, and update, 10^9 weights at once, which is the whole of most models.
            zero |= {
                "stage3_prefetch_bucket_size": bucket,
                "stage3_max_live_parameters": 2 * bucket,
                "stage3_max_reuse_distance": 0,
                "sub_group_size": bucket * self._data.size,
            }
        for section, target in self._offload.items():
            if target is not None:
                zero[section] = {"device": target, "nvme_path": self._nvme_path}
        train = self._job.train
        return {
            "train_micro_batch_size_per_gpu": 1,  # it counts no samples of ours
            "gradient_accumulation_steps": 1,
            "gradient_clipping": train.clip_grad_norm or 0.0,  # 1.0 if it is left out
            "communication_data_type": "fp32",
            "torch_autocast": {
                "enabled": train.precision == "bf16",
                "dtype": "bfloat16",
                "lower_precision_safe_modules": [],  # gradients of those would travel in bfloat16
            },
            "zero_optimization": zero | dict(self._more),
            "zero_allow_untested_optimizer": True,  # it was tried, in check_elementwise
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
        }

    def forward_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Return what the task calls in the model's place."""
        engine: torch.nn.Module = self._engine
        return engine

    def close(self) -> None:
        """Let go of the model."""
        if self._engine is not None:
            self._engine.destroy()
            self._engine = None
            set_variable("LOCAL_RANK", None)

    def num_parameters(self) -> int:
        """Return how many numbers are trained."""
        return self._num_parameters

    # -- one step

    def set_requires_sync(self, *, is_last: bool) -> None:
        """Begin a pass; DeepSpeed reduces gradients after the last one of this step."""
        self._is_last = is_last
        self._paths.begin_pass("training")
        self._engine.set_gradient_accumulation_boundary(is_last)

    def backward(self, weighted_loss: torch.Tensor) -> None:
        """Make the backward pass; DeepSpeed takes the mean over ranks, and a sum is wanted."""
        self._has_gradients = True
        self._engine.backward(weighted_loss * self._data.size)
        if not self._is_last:
            self._engine.step()  # counts micro-batches, and changes nothing

    def reduce(self, weighted_loss: torch.Tensor) -> torch.Tensor:
        """Return the loss of the whole step: gradients are reduced by now."""
        self._paths.end_pass()
        self.sent_bytes = (3 if self._stage == 3 else 2) * self._bytes_once
        return super().reduce(weighted_loss)

    def local_gradients(self) -> Iterator[tuple[str, Part | None, torch.Tensor | None]]:
        """Yield this rank's parts of the gradient of the step."""
        for name, part, gradient in self._flat.gradients():
            yield name, part, None if gradient is None else gradient / self._divisor

    def divide_gradients(self, divisor: torch.Tensor) -> None:
        """Let the update divide the gradient, as it does by the loss scale of fp16."""
        self._divisor = float(divisor)

    def update(self, clip_grad_norm: float | None) -> float:
        """Make the update, which DeepSpeed leaves out by itself if the gradient is not finite."""
        assert clip_grad_norm == self._job.train.clip_grad_norm, "it was told before"
        self._has_gradients = False
        for group, ours in zip(self._made.param_groups, self._optimizer.param_groups, strict=True):
            group["lr"] = ours["lr"]
        self._made.override_loss_scale(self._divisor)
        self._divisor = 1.0
        self._step()
        self._made.override_loss_scale(1.0)  # backward passes multiply by it
        return math.inf if self._made.overflow else float(self._engine.get_global_grad_norm())

    def _step(self) -> None:
        """Let DeepSpeed make or leave out the update, and forget the gradients.

        Stage 3 keeps the gradient of a parameter that the next step does not use, and would use it again.
        """
        self._engine.step()
        if self._stage == 3:
            self._made.grad_partitions_flat_buffer.zero_()
            for flat in self._made.fp32_partitioned_groups_flat:
                if flat.grad is not None:
                    flat.grad.zero_()

    def after_update(self, *, is_used: torch.Tensor | bool) -> None:
        """Drop the gradients of a step that was left out for its loss."""
        if not self._has_gradients:
            return
        self._has_gradients = False
        self._divisor = 1.0
        with left_out(self._made, self._stage):  # on all ranks alike, for all know the loss
            self._step()

    # -- checkpoints

    @property
    def saved_optimizer(self) -> torch.optim.Optimizer:
        """Return an optimizer over this rank's parts of the weights."""
        return self._flat.optimizer()

    def local_tensors(self) -> Mapping[str, LocalTensor]:
        """Return what this rank has of the whole model's weights and buffers."""
        return self._flat.local_tensors()

    def optimized(self) -> Sequence[OptimizedParameter]:
        """Return this rank's parts of the optimizer's parameters, in its order."""
        return self._flat.optimized()

    def numbering(self) -> Sequence[str | int]:
        """Return the names of parameters as an optimizer of the whole model numbers them."""
        return self._numbering

    def load_optimizer(self, optimizer: torch.optim.Optimizer, document: dict[str, Any]) -> None:
        """Load an optimizer state into DeepSpeed, after the weights."""
        super().load_optimizer(optimizer, document)
        self._flat.update_from(optimizer)


def refusal(error: Exception) -> UserError:
    """Return the error of settings that DeepSpeed does not accept."""
    set_variable("LOCAL_RANK", None)
    return UserError(
        f"DeepSpeed refuses: {type(error).__name__}: {error}",
        hint="look at strategy.args; nvme needs libaio and its headers (Debian: libaio-dev)",
    )


@contextmanager
def left_out(made: Any, stage: int) -> Iterator[None]:
    """Let DeepSpeed take the gradient for one that is not finite, while the block runs.

    In 32 bits it looks at the norm alone, which is finite where the loss of a rank is not.
    """

    def is_found(*_: object, **__: object) -> bool:
        made.overflow = True
        return True

    if stage == 3:
        made._overflow_check_and_loss_scale_update = is_found  # noqa: SLF001
        yield
        del made._overflow_check_and_loss_scale_update  # noqa: SLF001
    else:
        before = made.check_grad_overflow
        made.check_grad_overflow, made.has_overflow = True, is_found
        yield
        made.check_grad_overflow = before
        del made.has_overflow


def imported(device: torch.device) -> Any:
    """Return DeepSpeed, silent, and without what it would compile on a CPU.

    Raises:
        UserError: It is not installed.
    """
    set_variable("DS_ACCELERATOR", device.type)  # read when it is imported
    try:
        deepspeed = import_optional(
            "deepspeed",
            needed_by="strategy deepspeed",
            hint="pip install 'horovod_train[deepspeed]' on every host, or use strategy: zero or fsdp",
        )
    finally:
        set_variable("DS_ACCELERATOR", None)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings(
        "ignore", r"`torch\.distributed\..*` is deprecated", FutureWarning
    )  # which it calls
    # Collectives through shared memory: needs a compiler at run time, and prints.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def set_variable(name: str, value: str | None) -> None:
    """Set what DeepSpeed reads of the environment; None: remove it."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
