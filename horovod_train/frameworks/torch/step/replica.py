"""The training step: forward, backward, all-reduce, update."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Mapping
from typing import Protocol, cast

import torch

from horovod_train.checkpoint.arrays import ReplicaState
from horovod_train.collectives.base import Communicator
from horovod_train.config.schema import Health, Train
from horovod_train.data.shard import MicroBatch, PlannedStep
from horovod_train.errors import UserError
from horovod_train.frameworks.base import StepClock
from horovod_train.frameworks.torch.sizes import FlopCounter
from horovod_train.frameworks.torch.state.model import ReplicaBase, SavedState
from horovod_train.frameworks.torch.state.optimizer import ScheduledArguments, set_rates
from horovod_train.frameworks.torch.step import deferred
from horovod_train.frameworks.torch.step.averages import (
    AveragedBuffers,
    AveragedWeights,
    Averaging,
    RunningStatistics,
)
from horovod_train.frameworks.torch.step.deferred import (
    CudaTimer,
    DeviceClock,
    HostTimer,
    NoiseMeter,
    Number,
    Outcome,
    Packed,
    pack,
)
from horovod_train.frameworks.torch.step.gathering import Gathering
from horovod_train.frameworks.torch.step.graphs import Recorder, StepGraphs, rate_of_graphs
from horovod_train.frameworks.torch.step.random import draws_of
from horovod_train.frameworks.torch.step.update import (
    DeviceScaler,
    StepLoss,
    TaskAfterUpdate,
    Update,
    Updated,
    UpdateOnDevice,
    UpdateOnHost,
    can_be_masked,
)
from horovod_train.frameworks.torch.step.watches import GradientWatch
from horovod_train.frameworks.torch.strategies.base import Strategy
from horovod_train.frameworks.torch.task import TorchTask, is_sum_and_count
from horovod_train.frameworks.torch.verify.one_process import Equality
from horovod_train.frameworks.torch.verify.verification import FirstSteps

log = logging.getLogger(__name__)


class BeginsSteps(Protocol):
    """A component that is called at the start of each step."""

    def begin(self, step: PlannedStep) -> None:
        """Begin a step; the replica has already cleared the gradients."""
        ...


class FollowsUpdates(Protocol):
    """A component that is called after each update."""

    def after_update(self, *, is_used: torch.Tensor | bool) -> None:
        """Process an update or a skipped step; with deferred results, ``is_used`` is a tensor of shape []."""
        ...


class TorchReplica(ReplicaBase):
    """The model and optimizer of one rank.

    Args:
        model: The model, on its device.
        optimizer: Optimizer of the model's parameters.
        strategy: Parallelism strategy, bound to model and optimizer.
        data_ranks: The data-parallel group: the ranks that read different samples.
        all_ranks: All ranks of the job; None: ``data_ranks``. Differs under tensor and pipeline parallelism.
        train: The job's ``train`` section.
        task: Computes loss and metrics; None: the user's own loop computes them.
        forward_model: The compiled model that the task calls; None: ``model``.
        flops: FLOP counter; None: FLOPs are not counted.
        health: With ``non_finite: skip``, gradients are checked before each update, and running statistics of
            a skipped step are restored.
        lag_steps: Steps by which reading a step's result is delayed; None: 0 on a CPU, more on a device.
        averaging: How weights are averaged; None: they are not.
        noise: Meter of the gradient noise scale, which the strategy has, too; None: it is not measured.
    """

    one_process: object | None = None
    is_training = False

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy,
        data_ranks: Communicator,
        train: Train,
        task: TorchTask | None = None,
        forward_model: torch.nn.Module | None = None,
        flops: FlopCounter | None = None,
        health: Health | None = None,
        lag_steps: int | None = None,
        all_ranks: Communicator | None = None,
        averaging: Averaging | None = None,
        noise: NoiseMeter | None = None,
    ) -> None:
        self.model, self.optimizer, self.strategy, self.task, self.train = (
            model, optimizer, strategy, task, train,
        )  # fmt: skip
        self.data_ranks, self.all_ranks = data_ranks, all_ranks or data_ranks
        self.forward_model = model if forward_model is None else forward_model
        self._flops = flops or FlopCounter(is_enabled=False)
        self._health = health or Health()
        self._guard_gradients = self._health.non_finite == "skip"
        # Parameters that other ranks own are meta tensors.
        self.device = next(p.device for p in model.parameters() if not p.is_meta)
        self.loss = StepLoss(strategy, data_ranks, self.all_ranks, self.device, self._with_gradients)
        self.noise = self.loss.noise = noise
        self.scaler: torch.amp.GradScaler = DeviceScaler(self.device.type, enabled=train.precision == "fp16")
        self.loss.scale = self.scaler.get_scale
        self.statistics = RunningStatistics(model)
        self.equality = Equality(model, strategy, self.statistics, data_ranks, self.all_ranks)
        self.averaged = AveragedWeights(model, optimizer, strategy, averaging)
        self.saved_state = SavedState(
            model, optimizer, strategy, self.scaler, self.averaged, prints_notices=self.all_ranks.rank == 0
        )
        self.gathering = self.loss.gathering = Gathering(strategy, data_ranks)
        self.first_steps = FirstSteps([self.equality.check, self.saved_state.check])
        self._task = cast("TorchTask", task)  # None in a user's own loop, which computes its loss itself
        self.gradient_watch = GradientWatch(model, strategy, self._with_gradients)
        self._task_after_update = TaskAfterUpdate(task, model, strategy)
        self.lag_steps = self._lag_steps(lag_steps)
        self._timer: CudaTimer | HostTimer | None = None
        if self.lag_steps or self.device.type != "cpu":
            self._timer = CudaTimer() if self.device.type == "cuda" else HostTimer()
        if self.lag_steps:
            strategy.defer_results()
        buffers = AveragedBuffers(model, train.average_buffers, data_ranks)
        self._parts: list[BeginsSteps] = [strategy, self.loss, buffers, self.gathering, self.averaged]
        if noise is not None:
            self._parts.append(noise)
        if self._guard_gradients or self.lag_steps:  # later steps start before this result is known
            self._parts.append(self.statistics)
        self._after_update: list[FollowsUpdates] = [buffers, self._task_after_update, self.averaged]
        self._on_host, self._on_device = self._make_updates()
        self._not_optimized: list[torch.nn.Parameter] = []
        self._graphs: StepGraphs | None = None
        self._scheduled = ScheduledArguments(optimizer)
        self.draws = draws_of(train, self.device)

    def _lag_steps(self, wanted: int | None) -> int:
        may_skip = self._guard_gradients or self.train.precision == "fp16"
        if not self.strategy.capabilities.deferred_results or (self._task_after_update.exists and may_skip):
            return 0
        return deferred.lag_steps_of(self.device) if wanted is None else wanted

    def _make_updates(self) -> tuple[UpdateOnHost, UpdateOnDevice]:
        scaler, limit = self.scaler, self.train.clip_grad_norm
        assert isinstance(scaler, DeviceScaler)
        return (
            UpdateOnHost(self.optimizer, self.strategy, scaler, limit, self._health),
            UpdateOnDevice(self.optimizer, self.strategy, scaler, limit, self._health, self.device),
        )

    # -- one step

    def step(self, step: PlannedStep, lr: float, *, want_norm: bool) -> Outcome:
        """Perform one optimizer step; on a CPU, a synchronous strategy waits for all ranks."""
        with self.first_steps.checked(step) as step_to_run:
            clock = self.new_clock()
            self.begin(step_to_run)
            with self._flops.counting(step.share.num_local_samples):
                self.run_schedule(step_to_run, clock)
            return self.finish(clock, lr, want_norm=want_norm)

    def trial(self, step: PlannedStep) -> torch.Tensor:
        """Compute loss and gradients of a step that is not made; ``discard`` must follow. Collective.

        Returns:
            The loss over all ranks, shape []; gradients are those of the strategy.
        """
        graphs, noise, parts = self._graphs, self.noise, self._parts
        self._graphs = self.loss.noise = self.strategy.noise = None
        self._parts = [self.strategy, self.loss, self.gathering]
        try:
            self.begin(step)
            self.run_schedule(step, StepClock())
            return self.loss.complete(StepClock())
        finally:
            self._graphs, self.loss.noise, self.strategy.noise, self._parts = graphs, noise, noise, parts

    def discard(self) -> None:
        """Discard the gradients of a trial."""
        self.strategy.after_update(is_used=False)
        for parameter in self._with_gradients():
            parameter.grad = None

    def new_clock(self) -> StepClock:
        """Start a clock that measures the phases of a step."""
        return DeviceClock(self._timer, synchronizes=not self.lag_steps) if self._timer else StepClock()

    def begin(self, step: PlannedStep) -> None:
        """Begin a step: set training mode, and clear gradients."""
        if not (self.is_training and self.forward_model.training):
            self._begin_training()
        for parameter in self._with_gradients():
            parameter.grad = None
        for part in self._parts:
            part.begin(step)

    def _with_gradients(self) -> list[torch.nn.Parameter]:
        return [*(p for group in self.optimizer.param_groups for p in group["params"]), *self._not_optimized]

    def run_schedule(self, step: PlannedStep, clock: StepClock) -> None:
        """Run the forward and backward passes of a step."""
        if self.strategy.capabilities.owns_schedule:
            self.loss.add(self.scheduled_loss(step, clock))
            return
        for number, (micro_batch, batch) in enumerate(step, 1):
            clock.end_phase("data")
            if not (self._graphs and self._try_replay(self._graphs, batch, micro_batch.share, clock)):
                self._run_passes(batch, micro_batch, step.epoch, clock, is_last=number == len(step))

    def _run_passes(
        self, batch: object, micro_batch: MicroBatch, epoch: int, clock: StepClock, *, is_last: bool
    ) -> None:
        """Run forward and backward pass of a micro-batch."""
        self.strategy.prepare_backward(is_last=is_last)
        with self.draws.micro_batch(epoch, micro_batch), self.passes_of(micro_batch.share):
            with self.forward_context(micro_batch.share):
                loss = self._task.loss(self.forward_model, batch)
            clock.end_phase("forward")
            self._add_gradient(loss, micro_batch.share)
        clock.end_phase("backward")

    def _add_gradient(self, loss: object, share: float) -> None:
        weighted = self.loss.add_micro_batch(loss, share)
        self.strategy.backward(self.scaler.scale(weighted))

    def finish(self, clock: StepClock, lr: float, *, want_norm: bool = False) -> Outcome:
        """Complete a step: finish reducing the gradients, and update the weights.

        On a device, this returns before the device has finished: the result is read later.

        Args:
            clock: Clock of this step; records the all-reduce wait and the update.
            lr: Learning rate of this step; a parameter group's ``lr_scale`` multiplies it.
            want_norm: Compute the gradient norm even without clipping.

        Raises:
            PeerError: Another rank was lost.
        """
        loss = self.loss.complete(clock)
        self.first_steps.after_reduce(loss)
        numbers = self.update(loss, lr, want_norm=want_norm)
        clock.end_phase("optimizer")
        self.first_steps.after_update(lr, want_norm=want_norm)
        return self.outcome_of(numbers, clock, self.strategy)

    def set_arguments(self, values: Mapping[str, float]) -> None:
        """Set arguments of the optimizer, such as ``momentum``, for the next step."""
        self._scheduled.set(values)
        self.first_steps.set_arguments(values)

    def update(self, loss: torch.Tensor, lr: float, *, want_norm: bool) -> Mapping[str, Number] | Packed:
        """Update the weights with the complete gradients; return the numbers of the step."""
        set_rates(self.optimizer, lr, float if self._graphs is None else rate_of_graphs)
        packed = self._replayed_update(loss, want_norm) if self._graphs else None
        updated = Updated(is_used=True) if packed else self._update_weights(loss, want_norm=want_norm)
        for part in self._after_update:  # with CUDA graphs, none of these parts reads is_used
            part.after_update(is_used=updated.is_used)
        return packed or updated.numbers

    def _update_weights(self, loss: torch.Tensor, *, want_norm: bool) -> Updated:
        """Update the weights, or skip the update and restore the statistics."""
        updated = self._update(loss, want_norm=want_norm)
        for part in (self.strategy, self.statistics):
            part.after_update(is_used=updated.is_used)
        return updated.with_numbers(**self.loss.numbers(), **self.strategy.numbers())

    @property
    def _update(self) -> Update:
        """The current update: on the device only if results are deferred and the optimizer can skip there."""
        return self._on_device if self.lag_steps and can_be_masked(self.optimizer) else self._on_host

    def outcome_of(
        self, numbers: Mapping[str, Number] | Packed, clock: StepClock, strategy: Strategy
    ) -> Outcome:
        """Return the outcome of a step; on a GPU, its numbers are read when they are first needed."""
        of_host = {"sent_bytes": float(strategy.sent_bytes), "flops": self._flops.of_step()}
        return deferred.outcome_of(numbers, of_host, clock, self.data_ranks)

    # -- less frequent parts of a step

    def _begin_training(self) -> None:
        """Set training mode, and list the parameters that are not in the optimizer, to clear their gradients.

        This is not done in each step, because traversing all modules takes a millisecond.
        """
        self.forward_model.train()
        self.is_training = True
        optimized = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        self._not_optimized = [p for p in self.model.parameters() if id(p) not in optimized]

    def backward(self, loss: torch.Tensor, share: float, *, is_last: bool) -> None:
        """Add the gradient of one micro-batch.

        The gradient of a step is that of the mean loss over its N samples. A micro-batch of m samples with
        mean loss L contributes L * m/N; contributions are summed over micro-batches and ranks.

        Args:
            loss: Mean loss over the micro-batch, shape [].
            share: Samples of the micro-batch divided by samples of the step over all ranks.
            is_last: This rank's last micro-batch of the step: buckets are reduced when complete.

        Raises:
            UserError: The loss is not a scalar that depends on the trained parameters.
        """
        self.strategy.prepare_backward(is_last=is_last)
        self._add_gradient(loss, share)

    def gradients_by_name(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yield the gradients of the model's parameters."""
        yield from ((name, parameter.grad) for name, parameter in self.model.named_parameters())

    # -- CUDA graphs

    def record_steps(self, recorder: Recorder, *, only_if_faster: bool) -> None:
        """Use CUDA graphs (see ``graphs.py``) in later steps; if ``only_if_faster``, measure steps first."""
        if self._update is not self._on_device:
            who = type(self.optimizer if self.lag_steps else self.strategy).__name__
            log.warning("train.cuda_graph is ignored: %s requires a decision of the host in each step", who)
            return
        if self._task_after_update.exists or self.averaged.exist:
            log.warning(
                "train.cuda_graph is ignored: weights are averaged, or passed to after_update, in each step"
            )
            return
        assert isinstance(self.scaler, DeviceScaler)
        self._graphs = StepGraphs(
            recorder,
            self.optimizer,
            self._with_gradients,
            self._graph_key,
            self.scaler.reset,
            self.data_ranks.allreduce_sum if only_if_faster else None,
        )
        self.gathering.is_in_graphs = True
        self._parts.append(self._graphs)

    def _graph_key(self) -> Hashable:
        groups = self.optimizer.param_groups
        settings = [{k: v for k, v in group.items() if k not in {"params", "lr"}} for group in groups]
        trained = [[p.requires_grad and p.data_ptr() for p in group["params"]] for group in groups]
        return repr((settings, trained, self.strategy.layout_version, self._update is self._on_device))

    def _try_replay(self, graphs: StepGraphs, batch: object, share: float, clock: StepClock) -> bool:
        """Replay the graph of a micro-batch's forward and backward; return False if there is none."""

        def forward_and_backward(static: object) -> bool:
            with self.autocast(), self.gathering.passes(share):
                loss = self._task.loss(self.forward_model, static)
            if is_sum_and_count(loss):
                raise UserError(
                    "train.cuda_graph: does not support a loss that is a sum and a count, because its "
                    "count would not change",
                    hint="leave train.cuda_graph out",
                )
            self.strategy.prepare_backward(is_last=False)
            self._add_gradient(loss, share)  # gradients are reduced when all are complete
            return True

        is_done = bool(graphs.run(("backward", share), batch, forward_and_backward))
        if is_done:
            clock.end_phase("compute")
        return is_done

    def _replayed_update(self, loss: torch.Tensor, want_norm: bool) -> Packed | None:
        """Update the weights by replaying a graph; return None if there is none."""
        assert self._graphs is not None
        # A graph reads gradients at fixed addresses: other addresses need another graph.
        places = tuple(0 if p.grad is None else p.grad.data_ptr() for p in self._with_gradients())
        packed: Packed | None = self._graphs.run(
            ("update", want_norm, places),
            (),
            lambda _: pack(self._update_weights(loss, want_norm=want_norm).numbers),
        )
        return packed

    # -- between steps

    @property
    def replicas_identical(self) -> bool:
        """Whether all ranks have identical weights and optimizer state now."""
        return self.strategy.replicas_identical

    @property
    def requires_equal_micro_batches(self) -> bool:
        """True: each pass changes buffers and Python state, which must be identical on all ranks."""
        return True

    @property
    def passes_are_collective(self) -> bool:
        """Whether all ranks must run the same number of forward passes in an evaluation, too."""
        return self.strategy.capabilities.collective_passes

    def resume_updates(self) -> None:
        """Allow updates again after a non-finite step has stopped training."""
        self._on_host.resume_updates()
        self._on_device.resume_updates()

    def load_state(self, state: ReplicaState) -> None:
        """Load a state; the optimizer's settings (decay, momentum, ...) remain those of the job.

        Raises:
            CheckpointError: The state belongs to another model or optimizer.
        """
        super().load_state(state)
        self.resume_updates()
        if self._graphs is not None:
            self._graphs.discard()
