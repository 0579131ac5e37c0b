"""The training step: forward, backward, the sum over ranks, the update."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from horovod_train.checkpoint.arrays import ArrayBlob, ReplicaState
from horovod_train.collectives.base import Communicator, any_rank
from horovod_train.collectives.log import DeviceWork
from horovod_train.config.schema import Ema, Health, Train
from horovod_train.data.planned_step import PlannedStep
from horovod_train.errors import UserError
from horovod_train.frameworks.base import StepClock, add_metric
from horovod_train.frameworks.reader import batch_length
from horovod_train.frameworks.torch import late
from horovod_train.frameworks.torch.averaged import AveragedWeights
from horovod_train.frameworks.torch.buffers import AveragedBuffers
from horovod_train.frameworks.torch.collectives import broadcast_model, sum_over, with_tensors
from horovod_train.frameworks.torch.device_clock import CudaTimer, DeviceClock, HostTimer
from horovod_train.frameworks.torch.flops import FlopCounter
from horovod_train.frameworks.torch.graphs import Recorder, StepGraphs, rate_of_graphs
from horovod_train.frameworks.torch.equality import check_buffers, check_weights
from horovod_train.frameworks.torch.late import LateOutcome, Number, Outcome, Packed, outcome_from, pack
from horovod_train.frameworks.torch.saved_state import SavedState
from horovod_train.frameworks.torch.state import blobs_of, from_blob
from horovod_train.frameworks.torch.statistics import RunningStatistics
from horovod_train.frameworks.torch.strategies.base import Loop, Strategy
from horovod_train.frameworks.torch.sync_batch_norm import not_counted
from horovod_train.frameworks.torch.task import TorchTask, checked_loss, is_sum_and_count
from horovod_train.frameworks.torch.update import (
    DeviceScaler,
    Update,
    UpdateOnDevice,
    UpdateOnHost,
    can_be_masked,
)

if TYPE_CHECKING:
    from horovod_train.frameworks.torch.verification import StrategyVerifier

log = logging.getLogger(__name__)

OWN_STATE = "@"
"""Names of what a strategy keeps for itself begin so, in a checkpoint."""
AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class TorchReplica:
    """The model and optimizer of one rank.

    Args:
        model: On its device.
        optimizer: Over the model's parameters.
        strategy: Keeps the replicas of all ranks in step; bound to model and optimizer.
        world: The ranks that share the samples of a step.
        all_ranks: Those and others, if there are others: ranks may share a model.
        train: The job's ``train`` section.
        task: Gives loss and metrics; None when the user's own loop does.
        forward_model: What the task calls: the model's compiled form; None: the model itself.
        flops: Counts operations; None: nobody wants to know.
        health: Says which steps may be left out. Where all may, every gradient is looked at before it is used
            (a pass over all of them), and running statistics are kept as they were.
        lag_steps: A step is asked for its outcome when so many others were made; None: at once on a CPU,
            later on a device.
        ema: The job's section; None: no average of the weights is kept.
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
        self._all_ranks = all_ranks or world
        self.model = model
        self.forward_model = model if forward_model is None else forward_model
        self.optimizer = optimizer
        self.strategy = strategy
        self._world = world
        self._train = train
        self._flops = flops
        self._health = health or Health()
        self._guard_gradients = self._health.non_finite == "skip"
        self._statistics = RunningStatistics(model)
        self._averaged_buffers = AveragedBuffers(model, train.average_buffers, world)
        self._own_share = 0.0
        self._num_samples = self._num_micro_batches = 1
        self._num_weighed = 0
        self._has_sums: bool | None = None
        self._denominator: torch.Tensor | None = None
        """Of losses that are a sum and a count: this rank's counts, divided by the samples of the step."""
        # What other ranks have of a model has no device.
        self._device = next(p.device for p in model.parameters() if not p.is_meta)
        self._timer = CudaTimer() if self._device.type == "cuda" else HostTimer()
        wanted = late.lag_steps_of(self._device) if lag_steps is None else lag_steps
        self._after_update_of_task = getattr(task, "after_update", None)
        may_skip = self._guard_gradients or train.precision == "fp16"
        is_known_later = strategy.can_be_read_later and not (self._after_update_of_task and may_skip)
        self.lag_steps = wanted if is_known_later else 0
        strategy.reads_later = self.lag_steps > 0
        self._local_loss = torch.zeros((), device=self._device)
        self.scaler: torch.amp.GradScaler = DeviceScaler(self._device.type, enabled=train.precision == "fp16")
        self.averaged = AveragedWeights(model, optimizer, strategy, ema)
        tells = self._all_ranks.rank == 0
        self._saved_state = SavedState(model, optimizer, strategy, self.scaler, self.averaged, tells=tells)
        self._updates = self._make_updates()
        self._is_training = False
        self._has_made_steps = False
        self._not_optimized: list[torch.nn.Parameter] = []
        self._graphs: StepGraphs | None = None
        self.verifier: StrategyVerifier | None = None
        """Compares the first steps with those of the plain model; None: they are not, or were."""

    def _make_updates(self) -> tuple[UpdateOnHost, UpdateOnDevice]:
        scaler, limit = self.scaler, self._train.clip_grad_norm
        assert isinstance(scaler, DeviceScaler)
        return (
            UpdateOnHost(self.optimizer, self.strategy, scaler, limit, self._health),
            UpdateOnDevice(self.optimizer, self.strategy, scaler, limit, self._health, self._device),
        )

    @property
    def _update(self) -> Update:
        """What makes the update now: hooks of an optimizer, which only the host can heed, come and go."""
        on_host, on_device = self._updates
        return on_device if self.lag_steps and can_be_masked(self.optimizer) else on_host

    def new_clock(self) -> StepClock:
        """Return what tells where the time of a step goes; it begins now."""
        is_device = self.lag_steps > 0 or self._device.type != "cpu"
        return DeviceClock(self._timer) if is_device else StepClock()

    def step(self, step: PlannedStep, lr: float, *, want_norm: bool) -> Outcome:
        """Make one optimizer step with this rank's share of it; on a CPU, blocks until all ranks did."""
        if self.verifier is None:
            outcome = self._step(step, lr, want_norm=want_norm)
        else:
            with self.verifier.compared(step) as same:
                outcome = self._step(same, lr, want_norm=want_norm)
            if self.verifier.is_done:
                self.verifier = None
        if not self._has_made_steps:
            self._has_made_steps = True
            self.check_replicas()
            self._saved_state.check()
        return outcome

    def _step(self, step: PlannedStep, lr: float, *, want_norm: bool) -> Outcome:
        clock = self.new_clock()
        self.begin(step)
        with self._counting(step):
            self.make_passes(step, clock)
        return self.finish(clock, lr, want_norm=want_norm)

    def make_passes(self, step: PlannedStep, clock: StepClock) -> None:
        """Make the forward and backward passes of a step that has begun."""
        assert self.task is not None
        if self.strategy.makes_passes:
            self._local_loss += self.strategy.make_passes(step, self._loop(clock))
            return
        for number, (micro_batch, batch) in enumerate(step, 1):
            clock.lap("data")
            if self._replayed(batch, micro_batch.share):
                clock.lap("compute")
                continue
            self._expect(is_last=number == len(step))
            with nullcontext() if micro_batch.share else self._not_counted():
                with self.autocast():
                    loss = self.task.loss(self.forward_model, batch)
                clock.lap("forward")
                self._add_gradient(loss, micro_batch.share)
            clock.lap("backward")

    @contextmanager
    def _not_counted(self) -> Iterator[None]:
        """Make passes of a micro-batch that does not count: statistics are as if there had been none."""
        with self._statistics.kept(), not_counted():
            yield

    def _loop(self, clock: StepClock) -> Loop:
        assert self.task is not None
        return Loop(self.task, self.autocast, clock.lap, self._not_counted, self.weigh)

    def record_steps(self, recorder: Recorder, *, only_if_faster: bool) -> None:
        """Make steps by graphs from now on, where they can be recorded (see ``graphs.py``).

        Args:
            recorder: Records them.
            only_if_faster: Measure both ways, and keep the faster one.
        """
        if self._update is not self._updates[1]:
            who = type(self.optimizer if self.lag_steps else self.strategy).__name__
            log.warning(
                "train.cuda_graph: %s needs the host to decide about each step: they are made without graphs",
                who,
            )
            return
        if self._after_update_of_task is not None or self.averaged.exist:
            log.warning("train.cuda_graph: weights are averaged, or looked at, after each update: steps have no graphs")
            return
        assert isinstance(self.scaler, DeviceScaler)
        self._graphs = StepGraphs(
            recorder,
            self.optimizer,
            self._with_gradients,
            self._what_graphs_depend_on,
            self.scaler.forget,
            self._world.allreduce_sum if only_if_faster else None,
        )

    def _what_graphs_depend_on(self) -> Hashable:
        groups = self.optimizer.param_groups
        settings = [{k: v for k, v in group.items() if k not in {"params", "lr"}} for group in groups]
        trained = [[p.requires_grad and p.data_ptr() for p in group["params"]] for group in groups]
        return repr((settings, trained, self.strategy.layout, self._update is self._updates[1]))

    def _replayed(self, batch: object, share: float) -> bool:
        """Make forward and backward of a micro-batch by a graph, if there is one; return whether."""
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
            self.backward(loss, share, is_last=False)  # gradients leave when all are there
            return True

        return bool(self._graphs.run(("backward", share), batch, forward_and_backward))

    def _counting(self, step: PlannedStep) -> AbstractContextManager[object]:
        return nullcontext() if self._flops is None else self._flops.counting(step.share.num_local_samples)

    @property
    def replicas_identical(self) -> bool:
        """Whether all ranks hold the same weights and optimizer state now."""
        return self.strategy.replicas_identical

    @property
    def needs_equally_many(self) -> bool:
        """Whether all ranks have to read as many micro-batches in a step.

        They always do: a pass changes buffers, and what code keeps in Python, which has to be the same on all ranks.
        """
        return True

    @property
    def passes_are_collective(self) -> bool:
        """Whether ranks make equally many forward passes in an evaluation, too."""
        return self.strategy.passes_are_collective

    def begin(self, step: PlannedStep) -> None:
        """Begin a step: no gradients yet."""
        self.strategy.begin(step)
        self._own_share = sum(micro_batch.share for micro_batch in step.share.micro_batches)
        self._local_loss.zero_()
        self._denominator, self._num_weighed = None, 0
        self._num_samples, self._num_micro_batches = step.share.num_samples, len(step)
        if not (self._is_training and self.forward_model.training):
            self._begin_training()
        self._clear_gradients()
        if self._graphs is not None:
            self._graphs.begin()
        if self._guard_gradients or self.lag_steps:  # others follow before the host knows
            self._statistics.remember()

    def _begin_training(self) -> None:
        """Put all modules into training mode, and note whose gradients are to be cleared besides.

        What the optimizer does not have must not pile up either. Here, and not in each step: to walk through
        all modules takes a millisecond.
        """
        self.forward_model.train()
        self._is_training = True
        optimized = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        self._not_optimized = [p for p in self.model.parameters() if id(p) not in optimized]

    def _with_gradients(self) -> list[torch.nn.Parameter]:
        optimized = (p for group in self.optimizer.param_groups for p in group["params"])
        return [*optimized, *self._not_optimized]

    def _clear_gradients(self) -> None:
        for parameter in self._with_gradients():
            parameter.grad = None

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context in which the job's precision holds for a forward pass."""
        dtype = AUTOCAST_DTYPES.get(self._train.precision)
        return torch.autocast(self._device.type, dtype) if dtype else nullcontext()

    def backward(self, loss: torch.Tensor, share: float, *, is_last: bool) -> None:
        """Add the gradient of one micro-batch.

        The gradient of a step is that of the mean loss over its N samples. A micro-batch of m samples
        with mean loss L adds L * m/N, whatever the sizes are: summed here, and by the all-reduce over ranks.

        Args:
            loss: Mean loss over the micro-batch, shape [].
            share: Samples of the micro-batch divided by samples of the step over all ranks.
            is_last: No other micro-batch of this rank follows in this step: gradients leave as made.

        Raises:
            UserError: The loss is not one number that depends on what is trained.
        """
        self._expect(is_last=is_last)
        self._add_gradient(loss, share)

    def _expect(self, *, is_last: bool) -> None:
        (self.strategy.expect_last if is_last else self.strategy.expect_more)()

    def _add_gradient(self, loss: torch.Tensor, share: float) -> None:
        weighted = self.weigh(loss, share)
        self._local_loss += weighted.detach()
        self.strategy.backward(self.scaler.scale(weighted))

    def weigh(self, loss: object, share: float) -> torch.Tensor:
        """Return what a micro-batch adds to the loss of the step, shape [].

        Args:
            loss: Mean loss over the micro-batch, or a sum and what it is to be divided by.
            share: Samples of the micro-batch divided by samples of the step over all ranks.

        Raises:
            UserError: The loss is neither.
        """
        if not is_sum_and_count(loss):
            if self._denominator is not None and self._num_weighed:
                raise UserError("the task's loss is a mean for one micro-batch, and a sum and a count for another")
            self._num_weighed += 1
            return checked_loss(loss) * share
        if not self.strategy.takes_sums:
            raise UserError(
                "the task's loss is a sum and a count, and this strategy divides by the samples of each rank",
                hint="return the mean loss over the batch, or use another strategy",
            )
        total, count = loss
        if self._denominator is None:
            if self._num_weighed:
                raise UserError("the task's loss is a mean for one micro-batch, and a sum and a count for another")
            self._denominator = torch.zeros((), dtype=torch.float64, device=self._device)
        self._num_weighed += 1
        # By samples first, so that it is about as large as a mean: fp16 could not hold a sum.
        factor = bool(share) / self._num_samples
        denominator = torch.as_tensor(count, dtype=torch.float64, device=self._device) * factor
        if not self.strategy.divides_at_once:
            self._denominator += denominator
            return checked_loss(total) * factor
        if self._num_micro_batches > 1:
            raise UserError(
                "the task's loss is a sum and a count, and this strategy has to know the counts of all micro-batches "
                "before the first backward pass",
                hint="set train.accumulation_steps: 1, return the mean loss over the batch, or use another strategy",
            )
        self._denominator = None
        return checked_loss(total) * factor / self._sum(denominator.reshape(1), "horovod_train.denominator")[0]

    def finish(self, clock: StepClock, lr: float, *, want_norm: bool = False) -> Outcome:
        """Complete a step: wait for the other ranks' gradients and update the weights.

        On a device this returns while it works: what the step turned out to be is read later.

        Args:
            clock: Gets the time of both.
            lr: Learning rate of this step; a parameter group's ``lr_scale`` multiplies it.
            want_norm: Take the gradient norm even when there is nothing to clip.

        Raises:
            PeerError: Another rank was lost.
        """
        loss = self.reduce()
        clock.lap("allreduce_wait")
        if not self.lag_steps and isinstance(clock, DeviceClock):
            # The update asks the device. Here whoever looks on sees what is waited for.
            self._world.wait_in(DeviceWork(clock.phase), late.Sent(loss.reshape(1)).read)
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
        loss = self.strategy.reduce(self._local_loss)
        total = self._total_denominator()
        if total is None:
            return loss
        for dtype in {gradient.dtype for gradient in self.strategy.gradients()}:
            alike = [gradient for gradient in self.strategy.gradients() if gradient.dtype == dtype]
            torch._foreach_div_(alike, total.to(dtype.to_real()))
        return loss / total

    def _total_denominator(self) -> torch.Tensor | None:
        """Return what the sums of this step are to be divided by, shape []; None: losses are means."""
        own, name = self._denominator, "horovod_train.denominator"
        if not self.strategy.makes_passes:
            return None if own is None else self._sum(own.reshape(1), name)[0]
        # Of the ranks that share a model, some alone compute the loss.
        if self._has_sums is None:
            self._has_sums = any_rank(self._all_ranks, flag=own is not None)
        if not self._has_sums:
            return None
        mine = torch.zeros(1, dtype=torch.float64, device=self._device) if own is None else own.reshape(1)
        return sum_over(with_tensors(self._all_ranks), mine, name)[0] / self.strategy.num_loss_copies

    def _sum(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        if self.strategy.sum_in_pass is not None:
            return self.strategy.sum_in_pass(tensor, name)
        return sum_over(with_tensors(self._world), tensor, name)

    def update(self, loss: torch.Tensor, lr: float, *, want_norm: bool) -> Mapping[str, Number] | Packed:
        """Update the weights with gradients that are complete; return what the step turned out to be."""
        self._set_rates(lr)
        numbers = self._complete(loss, want_norm or self._guard_gradients)
        self._averaged_buffers.average(self._own_share)
        if isinstance(numbers, Mapping):  # there are no graphs where something follows an update
            is_used = numbers["is_finite"]
            assert isinstance(is_used, torch.Tensor | bool)
            if self._after_update_of_task is not None and is_used is not False:
                self._after_update_of_task(self.model)
            self.averaged.after_update(is_used=is_used)
        return numbers

    def gradients_by_name(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yield the gradients of the model's parameters."""
        yield from ((name, parameter.grad) for name, parameter in self.model.named_parameters())

    def _set_rates(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            rate = lr * group.get("lr_scale", 1.0)
            group["lr"] = rate if self._graphs is None else rate_of_graphs(rate)

    def _complete(self, loss: torch.Tensor, want_norm: bool) -> Mapping[str, Number] | Packed:
        """Update the weights, by a graph if there is one; return what the step turned out to be."""
        if self._graphs is not None:
            # Graphs read gradients where they lie: another set of them is another kind of update.
            places = tuple(0 if p.grad is None else p.grad.data_ptr() for p in self._with_gradients())
            packed: Packed | None = self._graphs.run(
                ("update", want_norm, places), (), lambda _: pack(self._update_weights(loss, want_norm))
            )
            if packed is not None:
                return packed
        return self._update_weights(loss, want_norm)

    def _update_weights(self, loss: torch.Tensor, want_norm: bool) -> Mapping[str, Number]:
        """Update the weights, or leave all as it was."""
        updated = self._update(loss, want_norm=want_norm)
        self.strategy.after_update(is_used=updated.is_used)
        self._statistics.take_back(is_used=updated.is_used)
        return updated.numbers(self._local_loss)

    def outcome_of(
        self, numbers: Mapping[str, Number] | Packed, clock: StepClock, strategy: Strategy
    ) -> Outcome:
        """Return a step's outcome: at once, or on its way.

        Args:
            numbers: By the names of ``StepOutcome``'s fields, tensors of shape [] or numbers.
            clock: Made by ``new_clock``.
            strategy: Has summed its gradients.
        """
        flops = None if self._flops is None else self._flops.of_step()
        if isinstance(clock, DeviceClock):
            packed = numbers if isinstance(numbers, Packed) else pack(numbers)
            return LateOutcome(packed, clock, self._world, bytes_reduced=strategy.bytes_per_step, flops=flops)
        assert not isinstance(numbers, Packed)
        here = {name: None if value is None else float(value) for name, value in numbers.items()}
        return outcome_from(here, clock, strategy.bytes_per_step, flops)

    def go_on(self) -> None:
        """Make updates again, though a step that was not finite has ended training."""
        for update in self._updates:
            update.go_on()

    @torch.no_grad()
    def evaluate(self, batches: Iterable[object]) -> dict[str, tuple[float, int]]:
        """Return (sum, count) of each metric over this rank's batches."""
        self.forward_model.eval()
        self._is_training = False
        compute = getattr(self.task, "metrics", self._loss_as_metric)
        sums: dict[str, tuple[float, int]] = {}
        with self.averaged.shown():
            for batch in batches:
                self._add_metrics(sums, compute, batch)
        return sums

    def _add_metrics(self, sums: dict[str, tuple[float, int]], compute: Callable[..., Any], batch: object) -> None:
        if self.strategy.makes_passes:
            values = self.strategy.metrics_of(compute, batch, self._loop(StepClock()))
        else:
            with self.autocast():
                values = compute(self.forward_model, batch)
        for name, value in values.items():
            if is_sum_and_count(value):
                total, count = (float(torch.as_tensor(each)) for each in value)
                add_metric(sums, name, total / count if count else 0.0, count)
            else:
                numbers = torch.as_tensor(value).double().cpu()
                add_metric(sums, name, numbers.numpy(), batch_length(batch))

    def _loss_as_metric(self, model: torch.nn.Module, batch: object) -> dict[str, torch.Tensor]:
        assert self.task is not None
        return {"loss": self.task.loss(model, batch)}

    @torch.no_grad()
    def sync_buffers(self) -> None:
        """Average running statistics over ranks; check that all other buffers are equal.

        Raises:
            UserError: Another buffer differs between ranks.
        """
        if self._world.size == 1:
            return
        for buffer in self._statistics.buffers:
            mine = (buffer.detach().double().flatten() / self._world.size).tolist()
            mean = torch.tensor(self._world.allreduce_sum(mine), dtype=torch.float64)
            buffer.copy_(mean.view(buffer.shape))
        check_buffers(self._all_ranks, self.strategy.held(), self._names_of_weights())

    def _names_of_weights(self) -> set[str]:
        return {name for name, _ in self.model.named_parameters(remove_duplicate=False)}

    def check_replicas(self) -> None:
        """Check that what several ranks hold is equal after the first step: weights, and buffers.

        Raises:
            UserError: Something differs.
        """
        if self._all_ranks.size > 1 and self.strategy.replicas_identical:
            averaged = {id(buffer) for buffer in self._statistics.buffers}
            own = {n for n, buffer in self.model.named_buffers(remove_duplicate=False) if id(buffer) in averaged}
            held = {name: each for name, each in self.strategy.held().items() if name not in own}
            check_weights(self._all_ranks, held, self._names_of_weights())
            check_buffers(self._all_ranks, held, self._names_of_weights())

    def broadcast(self) -> None:
        """Take over rank 0's weights and buffers.

        Raises:
            UserError: Ranks have made different models.
        """
        if self.strategy.has_whole_weights:  # others have taken them over when they took their parts
            broadcast_model(self.model, self._world)
        if self.verifier is not None:
            self.verifier.broadcast()

    def is_finite(self) -> bool:
        """Return whether all weights and running statistics are finite numbers: the same on every rank."""
        weights = self._names_of_weights()
        own = [held.tensor for name, held in self.strategy.held().items() if name in weights]
        here = all(bool(tensor.isfinite().all()) for tensor in [*own, *self._statistics.buffers])
        return not any_rank(self._all_ranks, flag=not here) if self.strategy.is_sharded else here

    def state(self, *, copy: bool) -> ReplicaState:
        """Return the state; with ``copy`` it stays as it is until the next copy is taken."""
        return self._saved_state.take(copy=copy)

    def load_state(self, state: ReplicaState) -> None:
        """Take over a state; the optimizer's settings (decay, momentum, ...) stay those of the job.

        Raises:
            CheckpointError: The state belongs to another model or optimizer.
        """
        self._saved_state.load(state)
        if self.verifier is not None:
            self.verifier.reference.load_state(state)
        self.go_on()
        if self._graphs is not None:
            self._graphs.forget()

    def own_state(self) -> Mapping[str, ArrayBlob]:
        """Return what this rank's strategy keeps for itself, under names that say whose it is."""
        kind = f"{OWN_STATE}{self.strategy.state_kind}/"
        return blobs_of({f"{kind}{name}": each for name, each in self.strategy.state().items()}, None, prefix="")

    def load_own_states(self, of_ranks: Sequence[Mapping[str, ArrayBlob]]) -> None:
        """Take over what strategies of all ranks had kept for themselves; that of another kind is dropped."""
        kind = f"{OWN_STATE}{self.strategy.state_kind}/"
        others = {name for state in of_ranks for name in state if name.startswith(OWN_STATE)}
        if dropped := sorted({name.partition("/")[0] for name in others if not name.startswith(kind)}):
            log.warning(
                "the checkpoint holds what %s keeps for itself: it is dropped", dropped[0].removeprefix(OWN_STATE)
            )
        self.strategy.load_state(
            [
                {
                    name.removeprefix(kind): from_blob(blob).to(self._device)
                    for name, blob in state.items()
                    if name.startswith(kind) or not name.startswith(OWN_STATE)  # as versions before wrote it
                }
                for state in of_ranks
            ]
        )

    def device_name(self) -> str:
        """Return where the model lives, for a person."""
        return str(self._device)

    def num_parameters(self) -> int:
        """Return how many numbers are trained."""
        return self.strategy.num_parameters()
