"""Base class of the PyTorch replica: state and evaluation of a rank's model, without training steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from horovod_train.checkpoint.arrays import ArrayBlob, ReplicaState
from horovod_train.collectives.base import Communicator, any_rank
from horovod_train.config.schema import Train
from horovod_train.data.planned_step import PlannedStep
from horovod_train.data.shard import MicroBatch
from horovod_train.frameworks.base import PythonStateOfRank, StepClock, add_metric
from horovod_train.frameworks.torch.comm.collectives import broadcast_model
from horovod_train.frameworks.torch.comm.sync_batch_norm import without_statistics
from horovod_train.frameworks.torch.state.saved_state import SavedState, load_rank_states, rank_state_of
from horovod_train.frameworks.torch.step.averaged_weights import AveragedWeights
from horovod_train.frameworks.torch.step.gathering import Gathering, active
from horovod_train.frameworks.torch.step.gradient_watch import GradientWatch
from horovod_train.frameworks.torch.step.loss import StepLoss
from horovod_train.frameworks.torch.step.sample_random import RankDraws
from horovod_train.frameworks.torch.step.statistics import RunningStatistics
from horovod_train.frameworks.torch.strategies.base import PassContext, Strategy
from horovod_train.frameworks.torch.task import TorchTask, as_numbers
from horovod_train.frameworks.torch.verify.equality import Equality
from horovod_train.frameworks.torch.verify.first_steps import FirstSteps

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
        return PassContext(self.task, self.autocast, clock.lap, self.without_statistics, self.loss.weigh)

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
