"""The training step: forward, backward, all-reduce, update."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from horovod_train.checkpoint.arrays import ReplicaState
from horovod_train.collectives.base import Communicator
from horovod_train.collectives.log import DeviceWork
from horovod_train.config.schema import Ema, Health, Train
from horovod_train.data.planned_step import PlannedStep
from horovod_train.errors import UserError
from horovod_train.frameworks.base import StepClock
from horovod_train.frameworks.torch.sizes.flops import FlopCounter
from horovod_train.frameworks.torch.state.local_model import LocalModel
from horovod_train.frameworks.torch.state.optimizer import rates_of_groups
from horovod_train.frameworks.torch.state.saved_state import SavedState
from horovod_train.frameworks.torch.step import deferred
from horovod_train.frameworks.torch.step.averaged_buffers import AveragedBuffers
from horovod_train.frameworks.torch.step.averaged_weights import AveragedWeights
from horovod_train.frameworks.torch.step.deferred import (
    DeferredOutcome,
    Number,
    Outcome,
    Packed,
    outcome_from,
    pack,
)
from horovod_train.frameworks.torch.step.device_clock import CudaTimer, DeviceClock, HostTimer
from horovod_train.frameworks.torch.step.gradient_watch import GradientWatch
from horovod_train.frameworks.torch.step.graphs import Recorder, StepGraphs, rate_of_graphs
from horovod_train.frameworks.torch.step.loss import StepLoss
from horovod_train.frameworks.torch.step.statistics import RunningStatistics
from horovod_train.frameworks.torch.step.update import (
    DeviceScaler,
    Update,
    UpdateOnDevice,
    UpdateOnHost,
    can_be_masked,
    may_be_used,
)
from horovod_train.frameworks.torch.strategies.base import Strategy
from horovod_train.frameworks.torch.task import TorchTask, is_sum_and_count
from horovod_train.frameworks.torch.verify.equality import Equality

if TYPE_CHECKING:
    from horovod_train.frameworks.torch.verify.verification import StrategyVerifier

log = logging.getLogger(__name__)


class TorchReplica(LocalModel):
    """The model and optimizer of one rank.

    Args:
        model: On its device.
        optimizer: Over the model's parameters.
        strategy: Parallelism strategy, bound to model and optimizer.
        world: The data-parallel group: the ranks that read different samples.
        all_ranks: All ranks of the job; None: ``world``. They differ under tensor and pipeline parallelism.
        train: The job's ``train`` section.
        task: Computes loss and metrics; None: the user's own loop does.
        forward_model: The compiled model that the task calls; None: ``model``.
        flops: FLOP counter; None: FLOPs are not counted.
        health: With ``non_finite: skip``, gradients are checked before each update, and running statistics of
            a skipped step are restored.
        lag_steps: Steps by which reading a step's result is delayed; None: 0 on a CPU, more on a device.
        ema: The job's ``ema`` section; None: weights are not averaged.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy,
        world: Communicator,
        train: Train,
        task: TorchTask | None = None,
        forward_model: torch.nn.Module | None = None,
        flops: FlopCounter | None = None,
        health: Health | None = None,
        lag_steps: int | None = None,
        all_ranks: Communicator | None = None,
        ema: Ema | None = None,
    ) -> None:
        self.task = task
        self.all_ranks = all_ranks or world
        self.model = model
        self.forward_model = model if forward_model is None else forward_model
        self.optimizer = optimizer
        self.strategy = strategy
        self.data_ranks = world
        self.train = train
        self._flops = flops
        self._health = health or Health()
        self._guard_gradients = self._health.non_finite == "skip"
        self.statistics = RunningStatistics(model)
        self._averaged_buffers = AveragedBuffers(model, train.average_buffers, world)
        self._own_share = 0.0
        # Parameters that other ranks own are meta tensors.
        self.device = next(p.device for p in model.parameters() if not p.is_meta)
        self._timer = CudaTimer() if self.device.type == "cuda" else HostTimer()
        wanted = deferred.lag_steps_of(self.device) if lag_steps is None else lag_steps
        can = strategy.capabilities
        self._gradient_watch = GradientWatch(model, sees_hooks_of_tensors=not can.whole_weights)
        self._after_update_of_task = getattr(task, "after_update", None)
        if self._after_update_of_task is not None and not can.after_update:
            raise UserError(
                "the task has after_update(model), and under this strategy the model of a rank does not hold "
                "each weight",
                hint="choose strategy allreduce, zero, ddp or fsdp, or leave after_update out",
            )
        may_skip = self._guard_gradients or train.precision == "fp16"
        is_known_later = can.deferred_results and not (self._after_update_of_task and may_skip)
        self.lag_steps = wanted if is_known_later else 0
        if self.lag_steps:
            strategy.defer_results()
        self.loss = StepLoss(strategy, world, self.all_ranks, self.device)
        self.scaler: torch.amp.GradScaler = DeviceScaler(self.device.type, enabled=train.precision == "fp16")
        self.equality = Equality(model, strategy, self.statistics, world, self.all_ranks)
        self.averaged = AveragedWeights(model, optimizer, strategy, ema)
        is_first = self.all_ranks.rank == 0
        self.saved_state = SavedState(
            model, optimizer, strategy, self.scaler, self.averaged, prints_notices=is_first
        )
        self._updates = self._make_updates()
        self.is_training = False
        self._has_made_steps = False
        self._not_optimized: list[torch.nn.Parameter] = []
        self._graphs: StepGraphs | None = None
        self.verifier: StrategyVerifier | None = None
        """Compares the first steps with those of the plain model; None: disabled, or done."""

    def _make_updates(self) -> tuple[UpdateOnHost, UpdateOnDevice]:
        scaler, limit = self.scaler, self.train.clip_grad_norm
        assert isinstance(scaler, DeviceScaler)
        return (
            UpdateOnHost(self.optimizer, self.strategy, scaler, limit, self._health),
            UpdateOnDevice(self.optimizer, self.strategy, scaler, limit, self._health, self.device),
        )

    @property
    def _update(self) -> Update:
        """The update to use now: optimizer hooks, which may be added at any time, need the host's."""
        on_host, on_device = self._updates
        return on_device if self.lag_steps and can_be_masked(self.optimizer) else on_host

    def new_clock(self) -> StepClock:
        """Start a clock that measures the phases of a step."""
        is_device = self.lag_steps > 0 or self.device.type != "cpu"
        return DeviceClock(self._timer) if is_device else StepClock()

    def step(self, step: PlannedStep, lr: float, *, want_norm: bool) -> Outcome:
        """Perform one optimizer step; a synchronous strategy on a CPU returns when all ranks did."""
        if self.verifier is None:
            outcome = self._step(step, lr, want_norm=want_norm)
        else:
            with self.verifier.compared(step) as same:
                outcome = self._step(same, lr, want_norm=want_norm)
            if self.verifier.is_done:
                self.verifier = None
        if not self._has_made_steps:
            self._has_made_steps = True
            self.equality.check()
            self.saved_state.check()
        return outcome

    def _step(self, step: PlannedStep, lr: float, *, want_norm: bool) -> Outcome:
        clock = self.new_clock()
        self.begin(step)
        with self._counting(step):
            self.run_schedule(step, clock)
        return self.finish(clock, lr, want_norm=want_norm)

    def run_schedule(self, step: PlannedStep, clock: StepClock) -> None:
        """Run the forward and backward passes of a step."""
        assert self.task is not None
        if self.strategy.capabilities.owns_schedule:
            self.loss.add(self.strategy.run_schedule(step, self.pass_context_of(clock)))
            return
        for number, (micro_batch, batch) in enumerate(step, 1):
            clock.lap("data")
            if self._try_replay(batch, micro_batch.share):
                clock.lap("compute")
                continue
            self._expect(is_last=number == len(step))
            with nullcontext() if micro_batch.share else self.not_counted():
                with self.autocast():
                    loss = self._loss_of(batch, is_part=micro_batch.share < 1)
                clock.lap("forward")
                self._add_gradient(loss, micro_batch.share)
            clock.lap("backward")

    def _loss_of(self, batch: object, *, is_part: bool) -> torch.Tensor:
        """Return the task's loss; if other micro-batches belong to the step, it must not change gradients."""
        assert self.task is not None
        if not is_part:
            return self.task.loss(self.forward_model, batch)
        parameters = self._with_gradients()
        self._gradient_watch.before_loss(parameters)
        self.strategy.is_in_loss = True
        loss = self.task.loss(self.forward_model, batch)
        self.strategy.is_in_loss = False
        self._gradient_watch.after_loss(parameters)
        return loss

    def record_steps(self, recorder: Recorder, *, only_if_faster: bool) -> None:
        """Use CUDA graphs from now on, for what can be captured (see ``graphs.py``).

        Args:
            recorder: Captures the graphs.
            only_if_faster: Measure both ways, and keep the faster one.
        """
        if self._update is not self._updates[1]:
            who = type(self.optimizer if self.lag_steps else self.strategy).__name__
            log.warning("train.cuda_graph is ignored: %s requires a decision of the host in each step", who)
            return
        if self._after_update_of_task is not None or self.averaged.exist:
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

    def _graph_key(self) -> Hashable:
        groups = self.optimizer.param_groups
        settings = [{k: v for k, v in group.items() if k not in {"params", "lr"}} for group in groups]
        trained = [[p.requires_grad and p.data_ptr() for p in group["params"]] for group in groups]
        return repr((settings, trained, self.strategy.layout_version, self._update is self._updates[1]))

    def _try_replay(self, batch: object, share: float) -> bool:
        """Run forward and backward of a micro-batch by a graph; return False if there is none."""
        if self._graphs is None:
            return False

        def forward_and_backward(static: object) -> bool:
            assert self.task is not None
            with self.autocast():
                loss = self.task.loss(self.forward_model, static)
            if is_sum_and_count(loss):
                raise UserError(
                    "train.cuda_graph: the task's loss is a sum and a count, which a graph would keep",
                    hint="leave train.cuda_graph out",
                )
            self.backward(loss, share, is_last=False)  # gradients are reduced when all are complete
            return True

        return bool(self._graphs.run(("backward", share), batch, forward_and_backward))

    def _counting(self, step: PlannedStep) -> AbstractContextManager[object]:
        return nullcontext() if self._flops is None else self._flops.counting(step.share.num_local_samples)

    @property
    def replicas_identical(self) -> bool:
        """Whether all ranks have identical weights and optimizer state now."""
        return self.strategy.replicas_identical

    @property
    def requires_equal_micro_batches(self) -> bool:
        """True: each pass changes buffers and Python state, which have to be the same on all ranks."""
        return True

    @property
    def passes_are_collective(self) -> bool:
        """Whether all ranks must run the same number of forward passes in an evaluation, too."""
        return self.strategy.capabilities.collective_passes

    def begin(self, step: PlannedStep) -> None:
        """Begin a step: clear gradients."""
        self.strategy.begin(step)
        self._own_share = sum(micro_batch.share for micro_batch in step.share.micro_batches)
        self.loss.begin(step)
        if not (self.is_training and self.forward_model.training):
            self._begin_training()
        self._clear_gradients()
        if self._graphs is not None:
            self._graphs.begin()
        if self._guard_gradients or self.lag_steps:  # later steps start before this result is known
            self.statistics.remember()

    def _begin_training(self) -> None:
        """Set training mode, and list the parameters that are not in the optimizer, to clear their gradients.

        Not done in each step, because a walk over all modules takes a millisecond.
        """
        self.forward_model.train()
        self.is_training = True
        optimized = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        self._not_optimized = [p for p in self.model.parameters() if id(p) not in optimized]

    def _with_gradients(self) -> list[torch.nn.Parameter]:
        optimized = (p for group in self.optimizer.param_groups for p in group["params"])
        return [*optimized, *self._not_optimized]

    def _clear_gradients(self) -> None:
        for parameter in self._with_gradients():
            parameter.grad = None

    def backward(self, loss: torch.Tensor, share: float, *, is_last: bool) -> None:
        """Add the gradient of one micro-batch.

        The gradient of a step is that of the mean loss over its N samples. A micro-batch of m samples
        with mean loss L adds L * m/N, whatever the sizes are: summed here, and by the all-reduce over ranks.

        Args:
            loss: Mean loss over the micro-batch, shape [].
            share: Samples of the micro-batch divided by samples of the step over all ranks.
            is_last: This rank's last micro-batch of the step: buckets are reduced as they fill.

        Raises:
            UserError: The loss is not one number that depends on what is trained.
        """
        self._expect(is_last=is_last)
        self._add_gradient(loss, share)

    def _expect(self, *, is_last: bool) -> None:
        self.strategy.set_requires_sync(is_last=is_last)

    def _add_gradient(self, loss: torch.Tensor, share: float) -> None:
        weighted = self.loss.weigh(loss, share)
        self.loss.add(weighted)
        self.strategy.backward(self.scaler.scale(weighted))

    def finish(self, clock: StepClock, lr: float, *, want_norm: bool = False) -> Outcome:
        """Complete a step: wait for the gradients of other ranks, and update the weights.

        On a device, this returns before the device has finished: the result is read later.

        Args:
            clock: Records the time of both.
            lr: Learning rate of this step; a parameter group's ``lr_scale`` multiplies it.
            want_norm: Take the gradient norm even when there is nothing to clip.

        Raises:
            PeerError: Another rank was lost.
        """
        loss = self.reduce()
        clock.lap("allreduce_wait")
        if not self.lag_steps and isinstance(clock, DeviceClock):
            # The update reads from the device; waiting here shows the watchdog the pending work.
            self.data_ranks.wait_in(DeviceWork(clock.phase), deferred.Sent(loss.reshape(1)).read)
        if self.verifier is not None:
            self.verifier.compare_gradients(loss)
        numbers = self.update(loss, lr, want_norm=want_norm)
        clock.lap("optimizer")
        if self.verifier is not None:
            self.verifier.compare_update(lr, want_norm=want_norm)
        return self.outcome_of(numbers, clock, self.strategy)

    def reduce(self) -> torch.Tensor:
        """Complete the gradients of a step; return its loss over all ranks, shape [].

        Raises:
            PeerError: Another rank was lost.
        """
        return self.loss.complete()

    def update(self, loss: torch.Tensor, lr: float, *, want_norm: bool) -> Mapping[str, Number] | Packed:
        """Update the weights with the complete gradients; return the numbers of the step."""
        self._set_rates(lr)
        numbers = self._complete(loss, want_norm or self._guard_gradients)
        self._averaged_buffers.average(self._own_share)
        if isinstance(numbers, Mapping):  # steps with callbacks after an update have no graphs
            is_used = numbers["is_finite"]
            assert isinstance(is_used, torch.Tensor | bool)
            if self._after_update_of_task is not None and may_be_used(is_used):
                with self.strategy.whole_weights():
                    self._after_update_of_task(self.model)
            self.averaged.after_update(is_used=is_used)
        return numbers

    def gradients_by_name(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yield the gradients of the model's parameters."""
        yield from ((name, parameter.grad) for name, parameter in self.model.named_parameters())

    def _set_rates(self, lr: float) -> None:
        rates = rates_of_groups(self.optimizer, lr)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate if self._graphs is None else rate_of_graphs(rate)

    def _complete(self, loss: torch.Tensor, want_norm: bool) -> Mapping[str, Number] | Packed:
        """Update the weights, by a graph if there is one; return the numbers of the step."""
        if self._graphs is not None:
            # A graph reads gradients at fixed addresses: other addresses need another graph.
            places = tuple(0 if p.grad is None else p.grad.data_ptr() for p in self._with_gradients())
            packed: Packed | None = self._graphs.run(
                ("update", want_norm, places), (), lambda _: pack(self._update_weights(loss, want_norm))
            )
            if packed is not None:
                return packed
        return self._update_weights(loss, want_norm)

    def _update_weights(self, loss: torch.Tensor, want_norm: bool) -> Mapping[str, Number]:
        """Update the weights, or skip the update and restore the statistics."""
        updated = self._update(loss, want_norm=want_norm)
        self.strategy.after_update(is_used=updated.is_used)
        self.statistics.take_back(is_used=updated.is_used)
        return {**updated.numbers(self.loss.local), **self.strategy.numbers()}

    def outcome_of(
        self, numbers: Mapping[str, Number] | Packed, clock: StepClock, strategy: Strategy
    ) -> Outcome:
        """Return a step's outcome, or a future of it.

        Args:
            numbers: By the names of ``StepOutcome``'s fields, tensors of shape [] or numbers.
            clock: Made by ``new_clock``.
            strategy: The strategy that summed the gradients.
        """
        of_host: dict[str, float | None] = {"sent_bytes": float(strategy.sent_bytes), "flops": None}
        if self._flops is not None:
            of_host["flops"] = self._flops.of_step()
        if isinstance(clock, DeviceClock):
            packed = numbers if isinstance(numbers, Packed) else pack(numbers)
            return DeferredOutcome(packed.with_known(of_host), clock, self.data_ranks)
        assert not isinstance(numbers, Packed)
        local_numbers = {name: None if value is None else float(value) for name, value in numbers.items()}
        return outcome_from({**local_numbers, **of_host}, clock)

    def resume_updates(self) -> None:
        """Allow updates again after a non-finite step has stopped training."""
        for update in self._updates:
            update.resume_updates()

    def load_state(self, state: ReplicaState) -> None:
        """Load a state; the optimizer's settings (decay, momentum, ...) stay those of the job.

        Raises:
            CheckpointError: The state belongs to another model or optimizer.
        """
        super().load_state(state)
        self.resume_updates()
        if self._graphs is not None:
            self._graphs.discard()
