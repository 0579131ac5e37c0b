"""Model of one rank: its state in a checkpoint, and its evaluation, without training steps.

SavedState     saves and loads the state of a replica
ReplicaBase    base class of the PyTorch replica
meta_model     a task's model with fake tensors, which have shape and dtype but no memory
loss_of        loss of a batch in the job's precision, also with fake tensors
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_map

from horovod_train.checkpoint.arrays import ArrayBlob, ReplicaState
from horovod_train.collectives.base import Communicator, any_rank
from horovod_train.config.data import Data
from horovod_train.config.schema import Job, Train
from horovod_train.data.shard import InOrder, MicroBatch, PlannedStep
from horovod_train.errors import CheckpointError, UserError, result_of, translated
from horovod_train.frameworks.base import PythonStateOfRank, StepClock, add_metric, train_data_of
from horovod_train.frameworks.torch.comm.collectives import broadcast_model
from horovod_train.frameworks.torch.comm.sync_batch_norm import without_statistics
from horovod_train.frameworks.torch.state.local import (
    blobs_of,
    from_blob,
    load_model,
    model_blobs,
    optimizer_blobs,
    optimizer_document,
    optimizer_tensors,
)
from horovod_train.frameworks.torch.step.averages import AveragedWeights, RunningStatistics
from horovod_train.frameworks.torch.step.gathering import Gathering, active
from horovod_train.frameworks.torch.step.random import RankDraws
from horovod_train.frameworks.torch.step.update import StepLoss
from horovod_train.frameworks.torch.step.watches import GradientWatch
from horovod_train.frameworks.torch.strategies.base import PassContext, Strategy
from horovod_train.frameworks.torch.task import Placement, TorchReader, TorchTask, as_numbers, checked_loss
from horovod_train.frameworks.torch.verify.one_process import Equality
from horovod_train.frameworks.torch.verify.verification import FirstSteps

log = logging.getLogger(__name__)

OWN_STATE = "@"
"""Prefix of the names of rank state in a checkpoint."""


class SavedState:
    """Saves and loads the state of a replica.

    Args:
        model: The model.
        optimizer: The optimizer of the model.
        strategy: Provides this rank's shard of weights and optimizer state.
        scaler: The loss scaler.
        averaged: Averaged weights, which are saved in addition to the trained weights.
        prints_notices: Whether this rank logs warnings that are the same on all ranks.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy,
        scaler: torch.amp.GradScaler,
        averaged: AveragedWeights,
        *,
        prints_notices: bool,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._strategy = strategy
        self._scaler = scaler
        self._averaged = averaged
        self._prints_notices = prints_notices
        self._copies: dict[str, torch.Tensor] = {}

    def take(self, *, copy: bool) -> ReplicaState:
        """Return the state. With ``copy``, it remains unchanged until the next copy."""
        cache = self._copies if copy else None
        with_state = self._strategy.capabilities.checkpoints_optimizer
        tree, arrays = optimizer_blobs(
            self._strategy.saved_optimizer,
            self._strategy.optimized(),
            cache,
            settings_only=not with_state,
        )
        assert isinstance(tree, dict)
        averaged_tree, averaged = self._averaged.packed(cache)
        return ReplicaState(
            model=model_blobs(self._strategy.local_tensors(), cache),
            optimizer={**arrays, **averaged},
            optimizer_tree={**tree, **averaged_tree},
            scaler={key: float(value) for key, value in self._scaler.state_dict().items()},
            is_sharded=self._strategy.capabilities.sharded,
        )

    def check(self) -> None:
        """Raise ``UserError`` if the optimizer's state contains objects other than plain data and tensors."""
        strategy = self._strategy
        try:
            optimizer_tensors(strategy.saved_optimizer, strategy.optimized())
        except CheckpointError as error:
            raise UserError(
                f"the state of the optimizer {type(self._optimizer).__name__} cannot be saved in a "
                "checkpoint: "
                f"{error.message}",
                hint="use another optimizer",
            ) from error

    def load(self, state: ReplicaState) -> None:
        """Load a state, except the optimizer's settings (weight decay, momentum, ...), which the job defines.

        Raises:
            CheckpointError: The state belongs to another model or optimizer.
        """
        try:
            found = state.optimizer_tree["class"]
            if found != type(self._optimizer).__qualname__:
                raise ValueError(f"it was trained with {found}")  # noqa: TRY301
            self._load_weights(state.model)
            self._load_optimizer(state.optimizer_tree["state"], state.optimizer)
            self._averaged.load(state.optimizer_tree, state.optimizer)
        except (RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"the checkpoint belongs to another model or optimizer: {error}",
                hint="train under another name, or set checkpoint.resume: never",
            ) from error
        if self._scaler.is_enabled() and state.scaler:
            self._scaler.load_state_dict(_scaler_state(state.scaler))

    def _load_weights(self, arrays: Mapping[str, ArrayBlob]) -> None:
        if self._strategy.capabilities.sharded:
            if unknown := sorted(set(arrays) - set(self._model.state_dict())):
                raise ValueError(f"it has {unknown[0]!r}, which this model does not have")
            load_model(self._strategy.local_tensors(), arrays)
        else:  # ``load_state_dict`` of a model may rename keys of older versions
            self._model.load_state_dict({name: from_blob(blob) for name, blob in arrays.items()})

    def _load_optimizer(self, tree: Any, arrays: Mapping[str, ArrayBlob]) -> None:
        strategy = self._strategy
        optimizer = strategy.saved_optimizer
        groups = optimizer.param_groups
        document = optimizer_document(
            tree,
            arrays,
            strategy.optimized(),
            groups,
            strategy.numbering(),
            is_sharded=strategy.capabilities.sharded,
        )
        # Settings are loaded first: the device of the optimizer's state depends on them.
        for saved, group in zip(document["param_groups"], groups, strict=True):
            own = {key: group[key] for key in (*optimizer.defaults, "lr_scale") if key in group}
            self._report_other_kernel(saved, own)
            saved.update(own)
        strategy.load_optimizer(optimizer, document)

    def _report_other_kernel(self, saved: Mapping[str, object], own: Mapping[str, object]) -> None:
        if bool(saved.get("fused")) != bool(own.get("fused")) and self._prints_notices:
            log.warning(
                "the checkpoint was trained with fused: %s, and training continues with fused: %s: "
                "results are "
                "equally accurate, but not bitwise equal",
                bool(saved.get("fused")),
                bool(own.get("fused")),
            )


def _scaler_state(plain: Mapping[str, float]) -> dict[str, float]:
    integers = {"growth_interval", "_growth_tracker"}
    return {key: int(value) if key in integers else value for key, value in plain.items()}


def rank_state_of(strategy: Strategy) -> dict[str, ArrayBlob]:
    """Return the rank state of a strategy; names contain ``rank_state_kind``."""
    kind = f"{OWN_STATE}{strategy.capabilities.rank_state_kind}/"
    return blobs_of({f"{kind}{name}": each for name, each in strategy.rank_state().items()}, None, prefix="")


def load_rank_states(
    strategy: Strategy, of_ranks: Sequence[Mapping[str, ArrayBlob]], device: torch.device
) -> None:
    """Load the rank states of all ranks. A state of another ``rank_state_kind`` is dropped."""
    kind = f"{OWN_STATE}{strategy.capabilities.rank_state_kind}/"
    others = {name for state in of_ranks for name in state if name.startswith(OWN_STATE)}
    if dropped := sorted({name.partition("/")[0] for name in others if not name.startswith(kind)}):
        log.warning(
            "the checkpoint contains per-rank state of %s, which is ignored",
            dropped[0].removeprefix(OWN_STATE),
        )
    strategy.load_rank_states(
        [
            {
                name.removeprefix(kind): from_blob(blob).to(device)
                for name, blob in state.items()
                if name.startswith(kind) or not name.startswith(OWN_STATE)  # older versions wrote no prefix
            }
            for state in of_ranks
        ]
    )


AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class ReplicaBase:
    """The model of one rank, its state, and its evaluation.

    Attributes:
        model: The model, on its device.
        strategy: Synchronizes the replicas of all ranks.
        data_ranks: Communicator of the data-parallel ranks.
        all_ranks: Communicator of all ranks; larger than ``data_ranks`` under model parallelism.
        device: Device of the model.
        statistics: Running statistics of normalization layers, which differ between ranks in training.
        equality: Checks that the ranks' copies of weights and buffers are equal.
        saved_state: Saves and loads the state of a checkpoint.
        task: Computes loss and metrics; None: the user's own loop computes them.
        train: The job's ``train`` section.
        forward_model: The module that the task calls: the compiled model, or the model itself.
        averaged: Averaged weights, which evaluation uses instead of the trained weights.
        loss: Loss of the current step.
        draws: Random numbers of passes.
        gathering: Ranks that ``horovod_train.gather`` joins.
        gradient_watch: Refuses gradients that a loss computes itself.
        is_training: Whether modules are in training mode.
        python_state: State in Python of the task and the model; None: the user's own loop has it.
        first_steps: Checks of the first steps.
    """

    model: torch.nn.Module
    strategy: Strategy
    data_ranks: Communicator
    all_ranks: Communicator
    device: torch.device
    statistics: RunningStatistics
    equality: Equality
    saved_state: SavedState
    first_steps: FirstSteps
    task: TorchTask | None
    train: Train
    forward_model: torch.nn.Module
    averaged: AveragedWeights
    loss: StepLoss
    is_training: bool
    draws: RankDraws
    gathering: Gathering
    gradient_watch: GradientWatch
    python_state: PythonStateOfRank | None = None

    def autocast(self) -> AbstractContextManager[object]:
        """Return the autocast context of a forward pass, for the job's precision."""
        dtype = AUTOCAST_DTYPES.get(self.train.precision)
        return torch.autocast(self.device.type, dtype) if dtype else nullcontext()

    @contextmanager
    def without_statistics(self) -> Iterator[None]:
        """Restore running statistics after the block, which runs the passes of a padding micro-batch."""
        with self.statistics.kept(), without_statistics():
            yield

    def pass_context_of(self, clock: StepClock) -> PassContext:
        """Return the context for a strategy that runs the passes of a step itself."""
        assert self.task is not None
        return PassContext(
            self.task, self.autocast, clock.end_phase, self.without_statistics, self.loss.weight_loss
        )

    @contextmanager
    def forward_context(self, share: float) -> Iterator[None]:
        """Run the forward pass of a micro-batch, given its fraction of the step's samples, in the block."""
        with self.autocast(), self.draws.forward(), self.gradient_watch.watched(share):
            yield

    @contextmanager
    def passes_of(self, share: float) -> Iterator[None]:
        """Run both passes of a micro-batch, given its fraction of the step's samples, in the block."""
        with self.gathering.passes(share), nullcontext() if share else self.without_statistics():
            yield

    def scheduled_loss(self, step: PlannedStep, clock: StepClock) -> torch.Tensor:
        """Run the passes of a step by the strategy; return this rank's part of the loss, shape []."""
        with self.gathering.passes(1.0):
            return self.strategy.run_schedule(step, self.pass_context_of(clock))

    @torch.no_grad()
    def evaluate(self, batches: Iterable[tuple[MicroBatch, object]]) -> dict[str, tuple[float, int]]:
        """Return (sum, count) of each metric over this rank's batches."""
        self.forward_model.eval()
        self.is_training = False
        compute = getattr(self.task, "metrics", self._loss_as_metric)
        sums: dict[str, tuple[float, int]] = {}
        with self.averaged.shown(), active(self.gathering):
            for micro_batch, batch in batches:
                with self.draws.evaluation(micro_batch):
                    values = self._metrics_of(compute, batch)
                for name, value in values.items():
                    add_metric(sums, name, as_numbers(value), len(micro_batch))
        return sums

    def _metrics_of(self, compute: Callable[..., Any], batch: object) -> Mapping[str, Any]:
        if self.strategy.capabilities.owns_schedule:
            return self.strategy.metrics_of(compute, batch, self.pass_context_of(StepClock()))
        with self.autocast():
            values: Mapping[str, Any] = compute(self.forward_model, batch)
        return values

    def _loss_as_metric(self, model: torch.nn.Module, batch: object) -> dict[str, torch.Tensor]:
        assert self.task is not None
        return {"loss": self.task.loss(model, batch)}

    def sync_buffers(self) -> None:
        """Average running statistics over ranks; raise ``UserError`` if other buffers differ. Collective."""
        self.equality.sync_buffers()

    def broadcast(self) -> None:
        """Broadcast rank 0's weights and buffers; raise ``UserError`` if the models differ. Collective."""
        if self.strategy.capabilities.whole_weights:  # otherwise, ``wrap`` has broadcast them
            broadcast_model(self.model, self.data_ranks)
        self.first_steps.broadcast()

    def is_finite(self) -> bool:
        """Return whether all weights and running statistics are finite, equal on all ranks. Collective."""
        weights = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        own = [local.tensor for name, local in self.strategy.local_tensors().items() if name in weights]
        is_local_finite = all(bool(tensor.isfinite().all()) for tensor in [*own, *self.statistics.buffers])
        return (
            not any_rank(self.all_ranks, flag=not is_local_finite)
            if self.strategy.capabilities.sharded
            else is_local_finite
        )

    def state(self, *, copy: bool) -> ReplicaState:
        """Return the state. With ``copy``, it remains unchanged until the next copy."""
        return self.saved_state.take(copy=copy)

    def load_state(self, state: ReplicaState) -> None:
        """Load a state, also into the reference model of the first steps; see ``SavedState.load``."""
        self.saved_state.load(state)
        self.first_steps.load_state(state)

    def rank_state(self) -> Mapping[str, ArrayBlob]:
        """Return the rank state of the strategy, such as residuals."""
        return rank_state_of(self.strategy)

    def load_rank_states(self, of_ranks: Sequence[Mapping[str, ArrayBlob]]) -> None:
        """Load the rank states that all ranks saved."""
        load_rank_states(self.strategy, of_ranks, self.device)

    def device_name(self) -> str:
        """Return the name of the model's device."""
        return str(self.device)

    def num_parameters(self) -> int:
        """Return the number of trainable elements of the whole model."""
        return self.strategy.num_parameters()


def meta_model(task: TorchTask) -> torch.nn.Module:
    """Create the task's model with fake tensors. Must be called in a ``FakeTensorMode``."""

    def on_meta_device() -> torch.nn.Module:
        with torch.device("meta"):
            return task.model()

    model, _ = result_of(on_meta_device)
    if model is None:  # some models read numbers from tensors in their constructors
        with unset_fake_temporarily():
            model = task.model()
    empty: dict[torch.Tensor, torch.Tensor] = {}  # shared weights remain shared
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter not in empty:
                fake = torch.nn.Parameter(empty_like(parameter), parameter.requires_grad)
                empty[parameter] = fake
            setattr(module, name, empty[parameter])
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(module, name, empty.setdefault(buffer, empty_like(buffer)))
    return model


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return an uninitialized CPU tensor of the same shape and dtype."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def batch_of(job: Job, task: TorchTask) -> Any:
    """Read a micro-batch of a task, as real tensors."""
    reader = TorchReader(train_data_of(job, task), Data(), job.train.seed, Placement(torch.device("cpu")))
    length = min(job.train.batch_size_per_rank, len(reader))
    return next(iter(reader.read(0, InOrder(length), [MicroBatch(0, length, share=1.0)])))


def to_fake_tensor(batch: Any) -> Any:
    """Replace the tensors of a batch by fake tensors. Must be called in a ``FakeTensorMode``."""
    return tree_map(lambda leaf: empty_like(leaf) if isinstance(leaf, torch.Tensor) else leaf, batch)


def loss_of(job: Job, task: TorchTask, model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Return the loss of a batch, computed in the job's precision."""
    dtype = AUTOCAST_DTYPES.get(job.train.precision)
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        return checked_loss(task.loss(model, batch))


def fake_step_errors(job: Job) -> AbstractContextManager[None]:
    """Return a context that replaces exceptions by a ``UserError``: the step cannot run with fake tensors."""
    return translated(
        lambda error: UserError(
            f"a step of {job.task} cannot run with fake tensors: "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            hint="does the model read numbers from tensors (item(), an if about one), or load weights? "
            "watch horovod_train_resident_memory_peak_bytes of a run instead",
        )
    )
