"""What a rank holds of a replica, apart from the steps that it makes: its state, and its evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from horovod_train.checkpoint.arrays import ArrayBlob, ReplicaState
from horovod_train.collectives.base import Communicator, any_rank
from horovod_train.config.schema import Train
from horovod_train.frameworks.base import StepClock, add_metric
from horovod_train.frameworks.torch.comm.collectives import broadcast_model
from horovod_train.frameworks.torch.comm.sync_batch_norm import not_counted
from horovod_train.frameworks.torch.state.saved_state import SavedState, load_rank_states, rank_state_of
from horovod_train.frameworks.torch.step.averaged_weights import AveragedWeights
from horovod_train.frameworks.torch.step.loss import StepLoss
from horovod_train.frameworks.torch.step.statistics import RunningStatistics
from horovod_train.frameworks.torch.strategies.base import PassContext, Strategy
from horovod_train.frameworks.torch.task import TorchTask, as_numbers
from horovod_train.frameworks.torch.verify.equality import Equality
from horovod_train.frameworks.torch.verify.first_steps import FirstSteps

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class LocalModel:
    """The model of one rank.

    Attributes:
        model: On its device.
        strategy: Keeps the replicas of all ranks in step.
        data_ranks: Those that share the samples of a step.
        all_ranks: Those and others, if there are others: ranks may share a model.
        device: Where the model is.
        statistics: Running statistics, of which each rank has its own in training.
        equality: What several ranks hold is equal.
        saved_state: Of a checkpoint.
        task: Gives loss and metrics; None when the user's own loop does.
        train: The job's section.
        forward_model: What the task calls: the model's compiled form, or the model itself.
        averaged: Weights that are evaluated instead of those that are trained.
        loss: Of the step under way.
        is_training: Modules are in training mode.
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

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context in which the job's precision holds for a forward pass."""
        dtype = AUTOCAST_DTYPES.get(self.train.precision)
        return torch.autocast(self.device.type, dtype) if dtype else nullcontext()

    @contextmanager
    def not_counted(self) -> Iterator[None]:
        """Make passes of a micro-batch that does not count: statistics are as if there had been none."""
        with self.statistics.kept(), not_counted():
            yield

    def pass_context_of(self, clock: StepClock) -> PassContext:
        """Return what a strategy needs that makes the passes of a step itself."""
        assert self.task is not None
        return PassContext(self.task, self.autocast, clock.lap, self.not_counted, self.loss.weigh)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[tuple[int, object]]) -> dict[str, tuple[float, int]]:
        """Return (sum, count) of each metric over this rank's batches."""
        self.forward_model.eval()
        self.is_training = False
        compute = getattr(self.task, "metrics", self._loss_as_metric)
        sums: dict[str, tuple[float, int]] = {}
        with self.averaged.shown():
            for num_samples, batch in batches:
                for name, value in self._metrics_of(compute, batch).items():
                    add_metric(sums, name, as_numbers(value), num_samples)
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
        """Average running statistics over ranks; check that all other buffers are equal.

        Raises:
            UserError: Another buffer differs between ranks.
        """
        self.equality.sync_buffers()

    def broadcast(self) -> None:
        """Take over rank 0's weights and buffers.

        Raises:
            UserError: Ranks have made different models.
        """
        if self.strategy.capabilities.whole_weights:  # others have taken them over when they took their parts
            broadcast_model(self.model, self.data_ranks)
        self.first_steps.broadcast()

    def is_finite(self) -> bool:
        """Return whether all weights and running statistics are finite numbers: the same on every rank."""
        weights = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        own = [local.tensor for name, local in self.strategy.local_tensors().items() if name in weights]
        is_local_finite = all(bool(tensor.isfinite().all()) for tensor in [*own, *self.statistics.buffers])
        return (
            not any_rank(self.all_ranks, flag=not is_local_finite)
            if self.strategy.capabilities.sharded
            else is_local_finite
        )

    def state(self, *, copy: bool) -> ReplicaState:
        """Return the state; with ``copy``, later steps do not change it until the next copy."""
        return self.saved_state.take(copy=copy)

    def load_state(self, state: ReplicaState) -> None:
        """Take over a state; the optimizer's settings (decay, momentum, ...) stay those of the job.

        Raises:
            CheckpointError: The state belongs to another model or optimizer.
        """
        self.saved_state.load(state)
        self.first_steps.load_state(state)

    def rank_state(self) -> Mapping[str, ArrayBlob]:
        """Return what this rank's strategy keeps for itself."""
        return rank_state_of(self.strategy)

    def load_rank_states(self, of_ranks: Sequence[Mapping[str, ArrayBlob]]) -> None:
        """Take over what strategies of all ranks had kept for themselves."""
        load_rank_states(self.strategy, of_ranks, self.device)

    def device_name(self) -> str:
        """Return where the model lives, for a person."""
        return str(self.device)

    def num_parameters(self) -> int:
        """Return how many numbers are trained."""
        return self.strategy.num_parameters()
