"""The loss of a step: a sum over micro-batches and ranks.

A task returns a mean over the samples of a micro-batch, which is weighted by the micro-batch's part of the
step's samples; or a sum and a count, for a mean over other units (tokens except padding, samples that
``collate`` has retained, class weights). Sums and counts are added over the whole step; at its end, the total
loss and the gradients are divided by the total count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from horovod_train.collectives.base import Communicator, any_rank
from horovod_train.data.planned_step import PlannedStep
from horovod_train.errors import UserError
from horovod_train.events.types import WAIT_PHASE
from horovod_train.frameworks.base import StepClock
from horovod_train.frameworks.torch.comm.collectives import sum_over, tensor_communicator
from horovod_train.frameworks.torch.step.deferred import Number, Sent
from horovod_train.frameworks.torch.step.gathering import Gathering
from horovod_train.frameworks.torch.step.gradient_hooks import GradientHooks
from horovod_train.frameworks.torch.step.noise import NoiseMeter
from horovod_train.frameworks.torch.strategies.base import Strategy
from horovod_train.frameworks.torch.task import check_count, checked_loss, is_sum_and_count

NAME = "horovod_train.denominator"


class StepLoss:
    """Accumulator of the loss of the current step.

    Args:
        strategy: Sums losses and gradients over ranks.
        data_ranks: The data-parallel group.
        all_ranks: All ranks of the job; differs from ``data_ranks`` under tensor and pipeline parallelism.
        device: Device of the losses.
        parameters: Returns the parameters that may have gradients; their hooks see the complete gradients.

    Attributes:
        local: This rank's part of the loss, shape [].
        noise: Receives the weights of micro-batches; None: the gradient noise scale is not measured.
        gathering: Gathered tensors of the passes; None: there are none.
        scale: Returns the loss scale, by which gradients are multiplied.
    """

    def __init__(
        self,
        strategy: Strategy,
        data_ranks: Communicator,
        all_ranks: Communicator,
        device: torch.device,
        parameters: Callable[[], Iterable[torch.Tensor]],
    ) -> None:
        self._strategy, self._data_ranks, self._all_ranks = strategy, data_ranks, all_ranks
        self._device, self._hooks = device, GradientHooks(parameters)
        self.local = torch.zeros((), device=device)
        self._num_samples = 1
        self._kinds: set[bool] = set()
        self._denominator: torch.Tensor | None = None
        self.count: torch.Tensor | None = None  # of the last step, if its loss was a sum and a count
        self.noise: NoiseMeter | None = None
        self.gathering: Gathering | None = None
        self.scale: Callable[[], float | torch.Tensor] = lambda: 1.0
        self._noise_numbers: Mapping[str, Number] = {}
        self._has_sums: bool | None = None

    def begin(self, step: PlannedStep) -> None:
        """Begin a step."""
        self.local.zero_()
        self._num_samples = step.share.num_samples
        self._kinds.clear()
        self._denominator = None
        self._hooks.defer()

    def add(self, weighted: torch.Tensor) -> None:
        """Add a micro-batch's weighted loss, as returned by ``weigh``."""
        self.local += weighted.detach()

    def weigh(self, loss: object, share: float) -> torch.Tensor:
        """Return a micro-batch's contribution to the loss of the step, shape [].

        Args:
            loss: Mean loss over the micro-batch; or a tuple of sum and count.
            share: Samples of the micro-batch divided by samples of the step over all ranks.

        Raises:
            UserError: The loss is neither, or is a sum and the strategy supports only means.
        """
        if self.gathering is not None:
            loss = self.gathering.tied(loss)
        is_sum = is_sum_and_count(loss)
        self._kinds.add(is_sum)
        if len(self._kinds) > 1:
            raise UserError(
                "the task's loss is a mean for one micro-batch, and a sum and a count for another",
                hint="return the same for all batches",
            )
        if not is_sum:
            if self.noise is not None and self.noise.is_due:
                self.noise.add_weight(share)
            return checked_loss(loss) * share
        assert isinstance(loss, tuple)
        return self._weighted_sum(*loss, is_counted=share > 0)

    def _weighted_sum(self, total: object, count: float | torch.Tensor, *, is_counted: bool) -> torch.Tensor:
        if not self._strategy.capabilities.sums:
            raise UserError(
                "the task's loss is a sum and a count, and this strategy divides by the samples of each rank",
                hint="return the mean loss over the batch, or use another strategy",
            )
        check_count(count)
        # Divided by the number of samples first, because a sum could overflow fp16.
        factor = is_counted / self._num_samples
        denominator = torch.as_tensor(count, dtype=torch.float64, device=self._device) * factor
        if self.noise is not None and self.noise.is_due:
            self.noise.add_weight(denominator.float())
        self._denominator = denominator + (0.0 if self._denominator is None else self._denominator)
        return checked_loss(total) * factor

    def add_micro_batch(self, loss: object, share: float) -> torch.Tensor:
        """Add the contribution of a micro-batch to this rank's part of the loss; return it, shape []."""
        weighted = self.weigh(loss, share)
        self.add(weighted)
        return weighted

    def complete(self, clock: StepClock) -> torch.Tensor:
        """Complete loss and gradients of a step; return the loss over all ranks, shape [].

        Raises:
            PeerError: Another rank was lost.
        """
        loss = self._strategy.reduce(self.local)
        total = self.count = self._total_denominator()
        if total is not None:
            self._strategy.divide_gradients(total)
            loss = loss / total
        self._noise_numbers = self._moments(total)
        self._hooks.call()
        clock.lap(WAIT_PHASE)
        clock.settle(self._data_ranks, lambda: Sent(loss.reshape(1)).read())
        return loss

    def numbers(self) -> dict[str, Number]:
        """Return this rank's part of the loss, and the moments of the gradient noise if they are measured."""
        return {"local_loss": self.local, **self._noise_numbers}

    @torch.no_grad()
    def _moments(self, total: torch.Tensor | None) -> Mapping[str, Number]:
        """Return the moments of the step, whose gradients are summed and not clipped."""
        if self.noise is None or not self.noise.is_due:
            return {}
        of_batch = self._strategy.squares_by_group(self.noise)
        return self.noise.numbers(of_batch, total, self._num_samples, self.scale())

    def _total_denominator(self) -> torch.Tensor | None:
        """Return the divisor of this step's loss and gradients, shape []; None: losses are means."""
        own = self._denominator
        if not self._strategy.capabilities.owns_schedule:
            return None if own is None else self._summed(own)
        # In a model-parallel group, only some ranks compute the loss.
        if self._has_sums is None:
            self._has_sums = any_rank(self._all_ranks, flag=own is not None)
        if self._kinds and self._has_sums not in self._kinds:
            raise UserError(
                "the task's loss is a mean in one step, and a sum and a count in another",
                hint="return the same for all batches",
            )
        if not self._has_sums:
            return None
        mine = torch.zeros((), dtype=torch.float64, device=self._device) if own is None else own
        together = sum_over(tensor_communicator(self._all_ranks), mine.reshape(1), NAME)[0]
        return together / self._strategy.capabilities.num_loss_copies

    def _summed(self, number: torch.Tensor) -> torch.Tensor:
        """Return a number's sum over the data-parallel group."""
        if self._strategy.sum_in_pass is not None:
            return self._strategy.sum_in_pass(number.reshape(1), NAME)[0]
        return sum_over(tensor_communicator(self._data_ranks), number.reshape(1), NAME)[0]
