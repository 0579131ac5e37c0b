"""DeepSpeed's ZeRO, stages 1 to 3, with offload to host memory or to NVMe.

    DeepSpeed   the strategy
    FlatState   local shards of the weights and of the optimizer state that DeepSpeed shards over ranks

DeepSpeed reduces gradients, clips them, and performs the optimizer's step. Samples, learning rate, losses
and checkpoints are those of this package, as with any strategy. DeepSpeed's launcher, configuration file
and pickled checkpoints are not used.

DeepSpeed averages gradients over ranks, but weighted losses require their sum. Each loss is therefore
multiplied by the number of ranks before the backward pass.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
arXiv:1910.02054.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import torch

from horovod_train.checkpoint.arrays import Part
from horovod_train.collectives.base import Mesh
from horovod_train.config.schema import Job
from horovod_train.data.shard import PlannedStep
from horovod_train.errors import UserError, translated
from horovod_train.frameworks.torch.comm.collectives import broadcast_model
from horovod_train.frameworks.torch.comm.groups import agree_on_paths
from horovod_train.frameworks.torch.state.local import LocalTensor, OptimizedParameter
from horovod_train.frameworks.torch.state.optimizer import check_elementwise, clone_optimizer
from horovod_train.frameworks.torch.step.watches import Rotation, WeightWatch
from horovod_train.frameworks.torch.strategies.base import Capabilities, DevicePlacement
from horovod_train.frameworks.torch.strategies.ddp.strategy import TorchDistributed
from horovod_train.frameworks.torch.verify.verification import refuse_hooks_of_parameters
from horovod_train.system.machine import import_optional

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Piece:
    """Slice of a parameter that this rank updates.

    Attributes:
        name: Name of the parameter in the model.
        whole: Shape of the parameter.
        start: Offset of the slice in the flattened parameter.
        length: Number of elements.
        flat: The flat tensor that DeepSpeed updates.
        at: Offset of the slice in ``flat``.
        group: Index of the parameter group.
        number: Index of the flat tensor.
    """

    name: str
    whole: tuple[int, ...]
    start: int
    length: int
    flat: torch.Tensor
    at: int
    group: int
    number: int

    @property
    def stand_in(self) -> torch.Tensor:
        """A placeholder of the slice's length with memory for one element: weights may be on a disk."""
        return torch.zeros((), dtype=self.flat.dtype, device=self.flat.device).expand(self.length)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the slice's elements of a tensor with the layout of ``flat``."""
        return tensor.detach()[self.at : self.at + self.length]


class FlatState:
    """Access to this rank's shards in DeepSpeed, for saving and loading.

    DeepSpeed concatenates parameters into flat tensors, and updates those. This class maps ranges of a flat
    tensor to ranges of the model's parameters, which checkpoints contain. Stages 1 and 2 split the flat
    tensor of a parameter group into one part per rank. Stage 3 splits each parameter, and concatenates a
    rank's parts.

    Args:
        model: The model.
        made: DeepSpeed's wrapper of the optimizer.
        names: Names of the parameters, by ``id``.
        stage: Stage of ZeRO.
        rank: This rank.
    """

    def __init__(
        self, model: torch.nn.Module, made: Any, names: Mapping[int, str], stage: int, rank: int
    ) -> None:
        self._model, self._made, self._stage, self._rank = model, made, stage, rank
        find = pieces_of_stage_3 if stage == 3 else pieces_of_stages_1_and_2
        self._pieces = sorted(find(made, names, rank), key=lambda piece: piece.group)

    def local_tensors(self) -> dict[str, LocalTensor]:
        """Return weights and buffers by name; with stage 3, this rank's shards of the weights."""
        self._reshard()
        tensors = self._model.state_dict(keep_vars=True)
        return {name: self._local_tensor_of(tensor) for name, tensor in tensors.items()}

    def _reshard(self) -> None:
        """Reshard the parameters that passes have left gathered or in flight (stage 3)."""
        if self._stage == 3:
            self._made._partition_all_parameters()  # noqa: SLF001  (no public API)

    def _local_tensor_of(self, tensor: Any) -> LocalTensor:
        if not hasattr(tensor, "ds_tensor"):
            return LocalTensor(tensor.detach())
        own, whole = tensor.ds_tensor, tuple(tensor.ds_shape)
        start, length = own_part(tensor, self._rank)
        return LocalTensor(own.detach()[:length], Part(whole, (start,)))

    def optimized(self) -> Sequence[OptimizedParameter]:
        """Return this rank's shards of the optimized parameters."""
        return [
            OptimizedParameter(p.name, LocalTensor(p.stand_in, Part(p.whole, (p.start,))))
            for p in self._pieces
        ]

    def gradients(self) -> Iterator[tuple[str, Part, torch.Tensor]]:
        """Yield this rank's shards of the gradients; valid after the backward pass and before the update.

        Flat tensors whose gradients DeepSpeed has moved to the host or to a disk are omitted.
        """
        flat: dict[int, torch.Tensor] = {}
        for piece in self._pieces:
            if piece.number not in flat:
                pieces = self._made.averaged_gradients.get(piece.number)
                if not pieces:
                    continue
                flat[piece.number] = self._made.flatten(pieces)
            yield piece.name, Part(piece.whole, (piece.start,)), piece.of(flat[piece.number])

    def optimizer(self) -> torch.optim.Optimizer:
        """Return an optimizer over the slices, with views of DeepSpeed's state; copies if it is on disk."""
        base = self._made.optimizer
        weights = [piece.stand_in for piece in self._pieces]
        groups = [
            {**group, "params": [w for w, p in zip(weights, self._pieces, strict=True) if p.group == number]}
            for number, group in enumerate(base.param_groups)
        ]
        shown = clone_optimizer(base, groups)
        for same in self._by_flat(weights):
            flat = same[0][0].flat
            with self._in_memory(same[0][0], is_changed=False) as is_on_disk:
                for piece, weight in same if flat in base.state else ():
                    shown.state[weight] = {
                        key: _copied(piece.of(value), is_on_disk) if is_like(value, flat) else value
                        for key, value in base.state[flat].items()
                    }
        return shown

    @torch.no_grad()
    def update_from(self, shown: torch.optim.Optimizer) -> None:
        """Copy the model's weights and the state of ``shown``, a result of ``optimizer``, to DeepSpeed."""
        self._reshard()
        for same in self._by_flat([weight for group in shown.param_groups for weight in group["params"]]):
            number, flat = same[0][0].number, same[0][0].flat
            with self._in_memory(same[0][0], is_changed=True):
                flat.data.copy_(self._weights_of(number))
                entries = [(piece, shown.state.get(weight) or {}) for piece, weight in same]
                replace_state(self._made.optimizer.state[flat], joined(flat, entries))

    def _weights_of(self, number: int) -> torch.Tensor:
        """Return the model's weights that correspond to a flat tensor, which may be the same memory."""
        if self._stage == 3:
            weights: torch.Tensor = self._made.fp16_partitioned_groups_flat[number]
        else:
            weights = self._made.parallel_partitioned_bit16_groups[number][self._rank]
        return weights.data

    def _by_flat(self, others: Sequence[Any]) -> list[list[tuple[Piece, Any]]]:
        """Group the slices by flat tensor, each with its item of ``others``."""
        found: dict[int, list[tuple[Piece, Any]]] = defaultdict(list)
        for piece, other in zip(self._pieces, others, strict=True):
            found[piece.number].append((piece, other))
        return list(found.values())

    @contextmanager
    def _in_memory(self, piece: Piece, *, is_changed: bool) -> Iterator[bool]:
        """Load a slice's flat tensor and its state into memory for the block; yield whether it is on disk."""
        made = self._made
        if self._stage != 3 or not made._swappable_optimizer_subgroup(piece.number):  # noqa: SLF001
            yield False
            return
        made._optimizer_states_and_gradient_swap_in(piece.number)  # noqa: SLF001
        yield True
        if is_changed:
            made._optimizer_states_and_gradient_swap_out(piece.number)  # noqa: SLF001
        else:
            made._release_swap_buffers(piece.number)  # noqa: SLF001


def _copied(tensor: torch.Tensor, is_needed: bool) -> torch.Tensor:
    return tensor.clone() if is_needed else tensor


def replace_state(state: dict[str, Any], new: Mapping[str, Any]) -> None:
    """Replace the state of a tensor; overwrite its tensors in place, because DeepSpeed may refer to them."""
    for key, value in new.items():
        if is_like(state.get(key), value):
            state[key].copy_(value)
        else:
            state[key] = value


def joined(flat: torch.Tensor, pieces: Sequence[tuple[Piece, Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the state of a flat tensor, given the state of each of its slices.

    A tensor that is stored once per flat tensor, such as ``step``, becomes the maximum over the slices.
    """
    state: dict[str, Any] = {}
    for piece, entry in pieces:
        for key, value in entry.items():
            if key == "step" and isinstance(value, torch.Tensor):
                value = value.reshape(())  # noqa: PLW2901  (for a scalar weight, it looks like a slice)
            if is_like(value, piece.stand_in):
                piece.of(state.setdefault(key, torch.zeros_like(flat))).copy_(value)
            elif key not in state:
                state[key] = value.clone() if isinstance(value, torch.Tensor) else value
            elif isinstance(value, torch.Tensor) and not torch.equal(value, state[key]):
                state[key] = torch.maximum(value, state[key])
                log.warning(
                    "parameters have differing %r in the checkpoint, and DeepSpeed knows one for all: %s",
                    key,
                    state[key],
                )
    return state


def is_like(value: object, flat: object) -> bool:
    """Return whether a value of an optimizer's state is elementwise: 1-D, with the shape of a flat tensor."""
    if not isinstance(value, torch.Tensor) or not isinstance(flat, torch.Tensor):
        return False
    return value.dim() == 1 and value.shape == flat.shape


def own_part(parameter: Any, rank: int) -> tuple[int, int]:
    """Return offset and length, without padding, of a rank's shard of a parameter (stage 3)."""
    length = parameter.ds_tensor.numel()
    start = min(rank * length, parameter.ds_numel)
    return start, min(length, parameter.ds_numel - start)


def pieces_of_stages_1_and_2(made: Any, names: Mapping[int, str], _rank: int) -> list[Piece]:
    """Return this rank's slices if DeepSpeed splits flat parameter groups."""
    return [
        Piece(
            names[id(parameter)],
            tuple(parameter.shape),
            linked.lp_fragment_address.start,
            linked.lp_fragment_address.numel,
            flat,
            linked.hp_fragment_address.start,
            number,
            number,
        )
        for number, (group, flat) in enumerate(
            zip(made.bit16_groups, made.single_partition_of_fp32_groups, strict=True)
        )
        for parameter in group
        if (linked := parameter._hp_mapping) is not None  # noqa: SLF001
    ]


def pieces_of_stage_3(made: Any, names: Mapping[int, str], rank: int) -> list[Piece]:
    """Return a rank's slices if DeepSpeed splits each parameter."""
    found = []
    for number, group in enumerate(made.fp16_groups):
        for parameter in group:
            _, at, _ = made.grad_position[made.get_param_id(parameter)]
            start, length = own_part(parameter, rank)
            flat = made.fp32_partitioned_groups_flat[number]
            of_group = made.sub_group_to_group_id[number]
            whole = tuple(parameter.ds_shape)
            found.append(Piece(names[id(parameter)], whole, start, length, flat, at, of_group, number))
    return [piece for piece in found if piece.length]


BYTES_OF_WEIGHT = 4


class DeepSpeed(TorchDistributed):
    """Strategy in which DeepSpeed shards optimizer state, gradients and weights over ranks.

    The job defines the bucket size (section ``allreduce``) and the largest norm of the gradient. The
    arguments are described in ``Arguments`` of this package.
    """

    capabilities = Capabilities(
        collective_passes=True,
        sharded=True,
        whole_weights=False,
        after_update=False,  # DeepSpeed overwrites the weights with its optimizer's copies in each step
        deferred_results=False,  # DeepSpeed synchronizes with the device in each step
        owns_update=True,
        unused_have_zeros=True,
        sums_gradients=True,
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

    def wrap(self, model: torch.nn.Module, move_to_device: DevicePlacement) -> torch.nn.Module:
        """Start PyTorch's process group; return rank 0's model on this rank's device.

        Raises:
            UserError: DeepSpeed is missing, or the model cannot be trained with it.
        """
        self._device = move_to_device.device
        self._deepspeed = imported(move_to_device.device)
        for name, parameter in model.named_parameters():
            if parameter.dtype != torch.float32:
                dtype = str(parameter.dtype).removeprefix("torch.")
                raise UserError(
                    f"strategy deepspeed: {name!r} is {dtype}, and DeepSpeed keeps weights in float32",
                    hint="make the model in float32 (train.precision: bf16 computes in bfloat16), or use "
                    "strategy: fsdp",
                )
        if move_to_device.device.type == "cpu" and "cpu" in self._offload.values() and self._ranks.rank == 0:
            log.warning("strategy.args.offload_*: cpu has no effect without a GPU")
        self._start_groups(move_to_device.device)
        self._deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)  # uses the started group
        broadcast_model(model, self._ranks)
        return move_to_device(model)

    def bind(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Attach to a model and its optimizer, which DeepSpeed shards.

        Raises:
            UserError: The optimizer cannot be sharded, or DeepSpeed refuses the model or the settings.
        """
        super().bind(model, optimizer)
        check_elementwise(optimizer, "deepspeed")
        refuse_hooks_of_parameters(model, "deepspeed")
        self._check_groups(optimizer)
        self._numbering = [parameter.name for parameter in super().optimized()]
        self._num_parameters = super().num_parameters()
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._paths = agree_on_paths(self._ranks, self._job.health)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:  # registered before DeepSpeed's hook, which reduces the gradient
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    partial(self._on_gradient, f"the gradient of {name}")
                )
        # DeepSpeed first compares LOCAL_RANK with MPI's local rank, and later uses it as the device index.
        set_variable("LOCAL_RANK", os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0"))
        device = self._device.index or 0
        with translated(refusal):
            self._engine, made, _, _ = self._deepspeed.initialize(
                args=SimpleNamespace(device_rank=device),
                model=model,
                # A clone, because DeepSpeed replaces the parameters in the optimizer's groups.
                optimizer=clone_optimizer(optimizer, [dict(group) for group in optimizer.param_groups]),
                config=self._configuration(),
            )
        set_variable("LOCAL_RANK", str(device))
        self._made = made
        self._settings = [dict(group) for group in optimizer.param_groups]
        if self._stage == 3:
            self._announce_gathers(model)
        rotation = Rotation()
        self._weights = [(p, WeightWatch(rotation)) for p in model.parameters() if p.requires_grad]
        self._flat = FlatState(model, made, names, self._stage, self._data.rank)
        self._bytes_once = BYTES_OF_WEIGHT * self._num_parameters

    def _on_gradient(self, event: str, _: torch.Tensor) -> None:
        self._paths.event(event)

    def _announce_gathers(self, model: torch.nn.Module) -> None:
        """Record each module's passes in the path comparison, before DeepSpeed gathers its weights.

        Forward passes that write weights are refused.
        """
        coordinator = self._made.parameter_offload.get_param_coordinator()
        fetch, release = coordinator.fetch_sub_module, coordinator.release_sub_module
        rotation = Rotation()
        watches = defaultdict[int, WeightWatch](lambda: WeightWatch(rotation))
        names = {id(module): name or "the model" for name, module in model.named_modules()}

        def pass_of(module: torch.nn.Module, *, forward: bool) -> str:
            kind = "forward" if forward else "backward"
            return f"the {kind} pass of {names.get(id(module), type(module).__name__)}"

        def fetch_announced(module: torch.nn.Module, forward: bool) -> None:
            self._paths.event(pass_of(module, forward=forward))
            fetch(module, forward)
            if forward:
                watches[id(module)].begin(module.parameters(recurse=False))

        def release_unchanged(module: torch.nn.Module, forward: bool = False) -> None:
            if forward and (weight := watches[id(module)].end()) is not None:
                raise _written(pass_of(module, forward=True), weight)
            release(module, forward)

        coordinator.fetch_sub_module, coordinator.release_sub_module = fetch_announced, release_unchanged
        model.register_forward_pre_hook(lambda *_: self._begin_evaluation(), prepend=True)

    def _begin_evaluation(self) -> None:
        if not torch.is_grad_enabled():
            self._paths.begin_pass("evaluation")

    def _check_groups(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse optimizers and parameter groups with which DeepSpeed fails, or which it changes silently."""
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
        aligned = 2 * self._data.size  # bucket sizes must be multiples of it
        wanted = self._job.allreduce.bucket_size_mib * 2**20 / BYTES_OF_WEIGHT
        bucket = math.ceil(wanted / aligned) * aligned
        zero: dict[str, Any] = {
            "stage": self._stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
        }
        if self._stage == 3:
            # By default, DeepSpeed gathers and updates 10^9 weights at once, more than most models have.
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
            "train_micro_batch_size_per_gpu": 1,  # DeepSpeed's sample counts are not used
            "gradient_accumulation_steps": 1,
            "gradient_clipping": train.clip_grad_norm or 0.0,  # the default is 1.0
            "communication_data_type": "fp32",
            "torch_autocast": {
                "enabled": train.precision == "bf16",
                "dtype": "bfloat16",
                "lower_precision_safe_modules": [],  # gradients of such modules would be sent in bfloat16
            },
            "zero_optimization": zero | dict(self._more),
            "zero_allow_untested_optimizer": True,  # check_elementwise has tested it
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
        }

    def forward_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Return DeepSpeed's engine, which the task calls instead of the model."""
        engine: torch.nn.Module = self._engine
        return engine

    def close(self) -> None:
        """Destroy the engine, which detaches its hooks from the model."""
        if self._engine is not None:
            self._engine.destroy()
            self._engine = None
            set_variable("LOCAL_RANK", None)

    def num_parameters(self) -> int:
        """Return the number of trainable elements of the whole model."""
        return self._num_parameters

    # -- one step

    def begin(self, step: PlannedStep) -> None:
        for weight, watch in self._weights:
            watch.begin([weight] if weight.numel() else ())  # stage 3 keeps small ones between modules

    def prepare_backward(self, *, is_last: bool) -> None:
        """Prepare for a pass; DeepSpeed reduces gradients after the last pass of this step."""
        self._is_last = is_last
        self._paths.begin_pass("training")
        self._engine.set_gradient_accumulation_boundary(is_last)

    def backward(self, weighted_loss: torch.Tensor) -> None:
        """Run the backward pass, with a loss whose mean over ranks is the weighted sum."""
        self._has_gradients = True
        self._engine.backward(weighted_loss * self._data.size)
        if not self._is_last:
            self._engine.step()  # only counts micro-batches

    def reduce(self, weighted_loss: torch.Tensor) -> torch.Tensor:
        """Return the loss of the global batch; gradients were reduced in the backward pass."""
        self._paths.end_pass()
        self.sent_bytes = (3 if self._stage == 3 else 2) * self._bytes_once
        return super().reduce(weighted_loss)

    def local_gradients(self) -> Iterator[tuple[str, Part | None, torch.Tensor | None]]:
        """Yield this rank's shards of the gradient of the step."""
        for name, part, gradient in self._flat.gradients():
            yield name, part, None if gradient is None else gradient / self._divisor

    def divide_gradients(self, divisor: torch.Tensor) -> None:
        self._divisor = float(divisor)

    def update(self, clip_grad_norm: float | None) -> float:
        assert clip_grad_norm == self._job.train.clip_grad_norm, "differs from DeepSpeed's configuration"
        self._has_gradients = False
        for _, watch in self._weights:
            if (written := watch.end()) is not None:
                raise _written("the task or the model", written)
        self._copy_settings()
        self._made.override_loss_scale(self._divisor)
        self._divisor = 1.0
        self._step()
        self._made.override_loss_scale(1.0)  # backward passes multiply the loss by it
        return math.inf if self._made.overflow else float(self._engine.get_global_grad_norm())

    def _copy_settings(self) -> None:
        """Copy what has changed in our groups, such as the rate; DeepSpeed's also contain optimizer state."""
        groups = zip(self._made.param_groups, self._optimizer.param_groups, self._settings, strict=True)
        for group, ours, before in groups:
            changed = {
                name: value
                for name, value in ours.items()
                if name != "params" and value is not before.get(name)
            }
            group.update(changed)
            before.update(changed)

    def _step(self) -> None:
        """Let DeepSpeed perform or skip the update, and zero the gradients.

        Otherwise, stage 3 would reuse the gradient of a parameter that the next step does not use.
        """
        self._engine.step()
        if self._stage == 3:
            self._made.grad_partitions_flat_buffer.zero_()
            for flat in self._made.fp32_partitioned_groups_flat:
                if flat.grad is not None:
                    flat.grad.zero_()

    def after_update(self, *, is_used: torch.Tensor | bool) -> None:
        """Discard the gradients of a step that was skipped because its loss is not finite."""
        if not self._has_gradients:
            return
        self._has_gradients = False
        self._divisor = 1.0
        with forced_skip(self._made, self._stage):  # on all ranks, because all have the same loss
            self._step()

    # -- checkpoints

    @property
    def saved_optimizer(self) -> torch.optim.Optimizer:
        """An optimizer over this rank's shards of the weights."""
        return self._flat.optimizer()

    def local_tensors(self) -> Mapping[str, LocalTensor]:
        """Return this rank's shards of the model's weights and buffers."""
        return self._flat.local_tensors()

    def transient_weights(self) -> Mapping[str, torch.nn.Parameter]:
        """Return all parameters under stage 3, in which each rank gathers them from shards."""
        return dict(self._model.named_parameters()) if self._stage == 3 else {}

    def optimized(self) -> Sequence[OptimizedParameter]:
        """Return this rank's shards of the optimizer's parameters, in its order."""
        return self._flat.optimized()

    def load_optimizer(self, optimizer: torch.optim.Optimizer, document: dict[str, Any]) -> None:
        super().load_optimizer(optimizer, document)
        self._flat.update_from(optimizer)


def refusal(error: Exception) -> UserError:
    """Remove ``LOCAL_RANK`` from the environment; return the error for settings that DeepSpeed refuses."""
    set_variable("LOCAL_RANK", None)
    return UserError(
        f"DeepSpeed refuses: {type(error).__name__}: {error}",
        hint="look at strategy.args; nvme needs libaio and its headers (Debian: libaio-dev)",
    )


@contextmanager
def forced_skip(made: Any, stage: int) -> Iterator[None]:
    """Let DeepSpeed treat the gradient as not finite, and skip the update, during the block.

    In float32, DeepSpeed checks only the norm, which can be finite if the loss of a rank is not.
    """

    def is_found(*_: object, **__: object) -> bool:
        made.overflow = True
        return True

    if stage == 3:
        made._overflow_check_and_loss_scale_update = is_found  # noqa: SLF001
        try:
            yield
        finally:
            del made._overflow_check_and_loss_scale_update  # noqa: SLF001
        return
    before = made.check_grad_overflow
    made.check_grad_overflow, made.has_overflow = True, is_found
    try:
        yield
    finally:
        made.check_grad_overflow = before
        del made.has_overflow


def imported(device: torch.device) -> Any:
    """Import DeepSpeed without its log output, and without an extension that it would compile on a CPU.

    Raises:
        UserError: DeepSpeed is not installed.
    """
    set_variable("DS_ACCELERATOR", device.type)  # DeepSpeed reads it at import
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
    )  # DeepSpeed calls these functions
    # The extension for shared-memory collectives needs a compiler at run time, and prints messages.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def set_variable(name: str, value: str | None) -> None:
    """Set an environment variable that DeepSpeed reads; None: remove it."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _written(what: str, weight: torch.Tensor) -> UserError:
    shape = list(getattr(weight, "ds_shape", weight.shape))
    return UserError(
        f"strategy deepspeed: {what} changes a weight of shape {shape} "
        "in place, and DeepSpeed overwrites the change with its own copy of the weights",
        hint="use strategy: allreduce or zero; Embedding(max_norm=...), for example, changes its weight",
    )
