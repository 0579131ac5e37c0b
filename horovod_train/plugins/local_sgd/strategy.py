"""Local SGD: ranks train independently; weights are averaged over ranks every ``every_steps`` steps.

    every_steps times: the gradient of this rank's own samples -> the optimizer's step
    then:              weights and the optimizer's state <- their mean over ranks

The model and the optimizer's state are all-reduced once in ``every_steps`` steps, instead of the gradient
in each step. The loss is all-reduced in each step, so that all ranks make the same decision if it is not
finite. Local SGD is for networks that are slow relative to the size of the model.

A rank's weight in the mean is proportional to the number of samples that it has trained on since the last
mean. With ``every_steps: 1`` and an optimizer that is linear in the gradient (SGD, with momentum or weight
decay), the mean therefore equals the step of the global batch. The last step of an epoch is always followed
by averaging, so that evaluation, checkpoints and comparisons use identical replicas.

With ``outer``, the averaged update is the gradient of an outer optimizer (DiLoCo), which allows more steps
between means. With ``allreduce_steps``, the first steps all-reduce gradients, and local steps follow
(post-local SGD), when weights change more slowly.

Sources: Stich, "Local SGD Converges Fast and Communicates Little", arXiv:1805.09767; mean of momentum: Yu,
Jin and Yang, "On the Linear Speedup Analysis of Communication Efficient Momentum SGD", arXiv:1905.03817;
samples as weights: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized
Data", arXiv:1602.05629; post-local: Lin et al., "Don't Use Large Mini-Batches, Use Local SGD",
arXiv:1808.07217.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from horovod_train.checkpoint.arrays import pack_tree
from horovod_train.collectives.base import Mesh, allgather_json
from horovod_train.config.schema import Job
from horovod_train.data.shard import PlannedStep
from horovod_train.errors import UserError
from horovod_train.frameworks.torch.comm.collectives import Exchange, tensor_communicator, wide_type
from horovod_train.frameworks.torch.state.local import Named, OptimizedParameters, check_same_trained
from horovod_train.frameworks.torch.strategies.base import Capabilities, Strategy


class Outer:
    """SGD optimizer over the averaged weights, with momentum.

    Outer optimizer of local SGD: its gradient is the averaged update between two averaging steps.

        change  = weights after the last mean - mean of the ranks' weights now
        m       = momentum * m + change
        weights = weights after the last mean - lr * (change + momentum * m)   (without nesterov: - lr * m)

    With ``lr: 1`` and no momentum, the weights become their mean. Source: Douillard et al., "DiLoCo:
    Distributed Low-Communication Training of Language Models", arXiv:2311.08105, with lr 0.7 and Nesterov
    momentum 0.9; without Nesterov: Wang et al., "SlowMo", arXiv:1910.00643.

    Attributes:
        momenta: Momentum by parameter name.
    """

    def __init__(self, *, lr: float, momentum: float, nesterov: bool) -> None:
        self._lr = lr
        self._momentum = momentum
        self._nesterov = nesterov
        self._before: dict[str, torch.Tensor] = {}
        self.momenta: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def record(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Store a copy of the weights before the first local step after a mean; later calls do nothing."""
        if not self._before:
            self._before = {name: weight.detach().clone() for name, weight in weights.items()}

    def step(self, name: str, mean: torch.Tensor) -> torch.Tensor:
        """Return the new value of a weight, given its mean over ranks, in the data type of the mean."""
        if name not in self._before:  # the parameter was not trained when weights were stored
            return mean
        before = self._before.pop(name).to(mean.dtype)
        change = before - mean
        momentum = self.momenta.get(name)
        momentum = change if momentum is None else self._momentum * momentum.to(mean.dtype) + change
        self.momenta[name] = momentum
        return before - self._lr * (change + self._momentum * momentum if self._nesterov else momentum)

    def reset(self) -> None:
        """Discard the stored weights: after a mean, and when other weights are loaded."""
        self._before = {}


class LocalSgd(Strategy):
    """Strategy that averages weights and optimizer state over ranks, instead of gradients.

    Clipping applies to each rank's own gradient. A parameter that a rank does not use in a step has a zero
    gradient on this rank, so that the optimizer states of all ranks have the same layout. The job's bucket
    size limits the size of messages. Arguments are described in ``Arguments`` of this package.
    """

    capabilities = Capabilities(
        sum_and_count_loss=False,
        deferred_results=False,  # ranks exchange their losses in each step
        rank_state_kind="local_sgd",
    )

    def __init__(
        self,
        mesh: Mesh,
        job: Job,
        *,
        every_steps: int,
        allreduce_steps: int = 0,
        outer: Mapping[str, Any] | None = None,
    ) -> None:
        self._ranks = ranks = tensor_communicator(mesh.data)
        self._every_steps = every_steps
        self._exchange = Exchange(ranks, int(job.allreduce.bucket_size_mib * 2**20))
        self._allreduce_steps = allreduce_steps
        self._outer = None if outer is None else Outer(**outer)
        self._num_made = 0  # since the start of training
        self._num_steps = 0  # since the last mean
        self._samples = [0, 0]  # numbers of samples since the last mean: of this rank, and of all ranks

    def bind(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().bind(model, optimizer)
        self._trains = OptimizedParameters(model, optimizer)

    def begin(self, step: PlannedStep) -> None:
        """Record this rank's part of the step and, for the outer optimizer, the initial weights."""
        self._step = step
        if self._outer is not None and not self._sums_gradients:
            self._outer.record(self._trains.named())

    @property
    def _sums_gradients(self) -> bool:
        return self._num_made < self._allreduce_steps

    def reduce(self, weighted_loss: torch.Tensor) -> torch.Tensor:
        """Rescale the gradient to this rank's samples, or all-reduce it; return the loss of all ranks."""
        for parameter in self._trained():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
        gradients = self.gradients()
        self.sent_bytes = 8 if self._ranks.size > 1 else 0
        if self._sums_gradients:
            self.sent_bytes += self._exchange.bytes_on_wire(gradients)
            for gradient, total in zip(gradients, self._exchange.sum(gradients, "local_sgd"), strict=True):
                gradient.copy_(total)
        elif own_share := self._step.share.local_share:
            torch._foreach_div_(gradients, own_share)
        (loss,) = self._ranks.allreduce_sum([float(weighted_loss)])
        return torch.tensor(loss, dtype=torch.float64)

    def gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self._trained() if parameter.grad is not None]

    def is_finite(self, norm: float) -> bool:
        """Return whether the gradients of all ranks are finite; otherwise, all ranks skip the step."""
        return self._ranks.allreduce_sum([float(not math.isfinite(norm))])[0] == 0

    def after_update(self, *, is_used: torch.Tensor | bool) -> None:
        """Average over ranks after every ``every_steps`` steps, and after the last step of an epoch."""
        sums_gradients = self._sums_gradients
        self._num_made += bool(is_used)
        if sums_gradients:
            return
        if is_used:
            share = self._step.share
            self._num_steps += 1
            self._samples[0] += share.num_local_samples
            self._samples[1] += share.num_samples
            self.replicas_identical = self._ranks.size == 1
        if self._num_steps and (self._num_steps >= self._every_steps or self._step.is_last):
            if self._ranks.size > 1 or self._outer is not None:
                self._average(self._samples[0] / self._samples[1])
            self._num_steps, self._samples = 0, [0, 0]
            self.replicas_identical = True

    def _trained(self) -> list[torch.nn.Parameter]:
        return [p for group in self._optimizer.param_groups for p in group["params"] if p.requires_grad]

    @torch.no_grad()
    def _average(self, weight: float) -> None:
        """Replace weights and optimizer state by their weighted mean; all ranks' ``weight`` sum to 1."""
        named = self._trains.named()
        document = self._optimizer.state_dict()
        settings, state = pack_tree(document, lambda leaf: isinstance(leaf, torch.Tensor))
        self._check_equal(named, settings, state)
        # Scalar counters of optimizers (steps) stay exact if they are equal on all ranks.
        counts = [t for t in state.values() if not t.ndim and t.is_floating_point()]
        whole = [*named.items(), *((None, t) for t in state.values() if t.ndim)]
        numbers = [(name, t) for name, t in whole if t.is_floating_point() or t.is_complex()]
        parts = [t.to(wide_type(t.dtype)) * weight for _, t in numbers]
        self.sent_bytes += self._exchange.bytes_on_wire(parts)
        for (name, tensor), mean in zip(numbers, self._exchange.sum(parts, "local_sgd"), strict=True):
            outer = None if name is None else self._outer
            tensor.copy_(mean if outer is None else outer.step(str(name), mean))
        if self._outer is not None:
            self._outer.reset()  # parameters may have left the optimizer since the weights were recorded
        everyone = allgather_json(self._ranks, [weight, [float(count) for count in counts]])
        for place, count in enumerate(counts):
            values = [(rank_weight, found[place]) for rank_weight, found in everyone]
            if len({value for _, value in values}) > 1:
                count.fill_(math.fsum(rank_weight * value for rank_weight, value in values))

    def rank_state(self) -> Mapping[str, torch.Tensor]:
        """Return the number of steps and the outer momentum, only on rank 0: they are equal on all ranks."""
        if self._ranks.rank or (self._outer is None and not self._allreduce_steps):
            return {}
        momenta = {} if self._outer is None else self._outer.momenta
        return {"steps": torch.tensor(self._num_made)} | {f"outer.{n}": t for n, t in momenta.items()}

    def load_rank_states(self, of_ranks: Sequence[Mapping[str, torch.Tensor]]) -> None:
        saved = of_ranks[0] if of_ranks else {}
        self._num_made = int(saved.get("steps", torch.tensor(0)))
        if self._outer is not None:
            self._outer.reset()
            self._outer.momenta = {
                name.removeprefix("outer."): tensor for name, tensor in saved.items() if name != "steps"
            }

    def _check_equal(self, named: Named, settings: object, state: Mapping[str, torch.Tensor]) -> None:
        """Raise ``UserError`` if ranks train different parameters, or their optimizers differ in layout."""
        trained = [[name, list(p.shape), str(p.dtype)] for name, p in named.items() if p.requires_grad]
        shapes = {name: list(tensor.shape) for name, tensor in state.items()}
        whole = json.dumps([trained, sorted(named), settings, shapes]).encode()
        if len(set(self._ranks.allgather(hashlib.sha256(whole).digest()))) == 1:
            return
        check_same_trained([("", layout) for layout in allgather_json(self._ranks, trained)])
        raise UserError(
            "optimizers of different ranks have different settings or state, which local_sgd cannot average",
            hint="use an optimizer whose settings are the same on all ranks, or strategy: {name: allreduce}",
        )
