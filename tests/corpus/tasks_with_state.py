"""Tasks that keep something themselves, bring batches of their own kinds, or interfere with gradients."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from corpus.base import MLP, Case, F, Samples, nn, torch


class WithMLP(Case):
    """a model of two blocks, the base of the tasks in `tests/corpus/tasks_with_state.py`"""

    def net(self):
        return MLP()


class CountingTensor(WithMLP):
    """the task counts calls in a tensor, in place, and doubles the loss after the fourth call"""

    stateful = True

    def __init__(self, **settings):
        super().__init__(**settings)
        self.calls = torch.zeros((), dtype=torch.int64)

    def loss(self, model, batch):
        self.calls += 1
        return super().loss(model, batch) * (1 + (self.calls > 4))


class CountingClass(WithMLP):
    """the task counts calls in a class attribute, which a copy of the task shares: refused"""

    stateful = True
    is_refused = True
    calls = 0

    def model(self):
        type(self).calls = 0
        return super().model()

    def loss(self, model, batch):
        type(self).calls += 1
        return super().loss(model, batch) * (1 + (type(self).calls > 4))


def growing_weights():
    for number in itertools.count():
        yield 1.0 + 0.1 * number


class WeightsOfAGenerator(WithMLP):
    """weights of losses come from a generator, which cannot be copied"""

    stateful = True

    def __init__(self, **settings):
        super().__init__(**settings)
        self.weights = growing_weights()

    def loss(self, model, batch):
        return super().loss(model, batch) * next(self.weights)


class MemoryBank(WithMLP):
    """a tensor of the task counts how often each sample was seen, and divides its loss by the count"""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.times = torch.zeros(self.num_samples, dtype=self.dtype)

    def loss(self, model, batch):
        x, t, _, y, i = batch
        losses = F.cross_entropy(model(x, t), y, reduction="none")
        self.times[i] += 1
        return (losses / self.times[i]).mean()


class TargetOfTheTask(Case):
    """a target network of the task follows the model in after_update"""

    def __init__(self, **settings):
        super().__init__(**settings)
        with torch.random.fork_rng([]):
            torch.manual_seed(5)
            self.target = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).to(self.dtype)
        self.target.requires_grad_(False)

    def net(self):
        class M(nn.Module):
            def __init__(self):
                super().__init__()
                self.online = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))

            def forward(self, x):
                return self.online(x)

        return M()

    def loss(self, model, batch):
        return F.mse_loss(model(batch[0]), self.target(batch[0].flip(1)))

    def after_update(self, model):
        with torch.no_grad():
            for follower, leader in zip(self.target.parameters(), model.online.parameters(), strict=True):
                follower.lerp_(leader, 0.1)


class Meter:
    def __init__(self):
        self.file = Path(os.devnull).open("w")  # noqa: SIM115
        self.number = 0

    def note(self, value):
        self.number += 1
        self.file.write(f"{value}\n")


class FileMeter(WithMLP):
    """an object with an open file counts losses, and the task reads the count"""

    stateful = True

    def __init__(self, **settings):
        super().__init__(**settings)
        self.meter = Meter()

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        self.meter.note(loss.item())
        return loss * (1 + (self.meter.number > 4))


class OwnBackward(WithMLP):
    """the loss trains a probe of the model by a backward pass of its own: refused"""

    is_refused = True

    def net(self):
        model = MLP()
        model.probe = nn.Linear(6, 1)
        return model

    def loss(self, model, batch):
        getattr(model, "module", model).probe(batch[0]).square().mean().backward()
        return super().loss(model, batch)


class GradientByHand(WithMLP):
    """the loss puts weight decay into .grad itself: refused"""

    is_refused = True

    def loss(self, model, batch):
        for parameter in getattr(model, "module", model).parameters():
            parameter.grad = 0.1 * parameter.detach()
        return super().loss(model, batch)


class CountOfWeights(WithMLP):
    """a sum and a count that both depend on the model: refused"""

    is_refused = True

    def loss(self, model, batch):
        x, t, _, y, _ = batch
        logits = model(x, t)
        weights = torch.sigmoid(logits[:, 0])
        return (weights * F.cross_entropy(logits, y, reduction="none")).sum(), weights.sum()


class LossAndLogs(WithMLP):
    """the loss comes with a dictionary for a logger: refused"""

    is_refused = True

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        return loss, {"loss": loss.item()}


def halve(parameter):
    if parameter.grad is not None:
        parameter.grad.mul_(0.5)


class LateHook(WithMLP):
    """a hook that runs after accumulation is registered in the first loss: refused"""

    stateful = True
    is_refused = True

    def loss(self, model, batch):
        weight = getattr(model, "module", model).up.weight
        if not hasattr(self, "handle"):
            self.handle = weight.register_post_accumulate_grad_hook(halve)
        return super().loss(model, batch)


class UpdateOfAll(WithMLP):
    """after_update shrinks all weights as one vector, to a norm"""

    def after_update(self, model):
        with torch.no_grad():
            vector = nn.utils.parameters_to_vector(model.parameters())
            nn.utils.vector_to_parameters(vector * min(1.0, 3.0 / float(vector.norm())), model.parameters())


class PrunedRows(WithMLP):
    """after_update sets the row with the smallest norm to zero"""

    def after_update(self, model):
        with torch.no_grad():
            weight = model.up.weight
            weight[weight.norm(dim=1).argmin()] = 0.0


class Attributes(dict):
    __getattr__ = dict.__getitem__


class Collated(Samples):
    def __init__(self, make, *arguments):
        super().__init__(*arguments)
        self.make = make

    def collate(self, samples):
        x, t, _, y, _ = torch.utils.data.default_collate(samples)
        return self.make(x, t, y)


class BatchWithAttributes(WithMLP):
    """a batch is of a class derived from dict"""

    def train_data(self):
        return Collated(lambda x, t, y: Attributes(x=x, t=t, y=y), self.num_samples, self.dtype)

    def loss(self, model, batch):
        return F.cross_entropy(model(batch.x, batch.t), batch.y)


class Scaled(list):
    scale = 1.0


def scaled(x, t, y):
    batch = Scaled([x, t, y])
    batch.scale = 3.0
    return batch


class BatchOfAList(WithMLP):
    """a batch is a list with an attribute of its own"""

    def train_data(self):
        return Collated(scaled, self.num_samples, self.dtype)

    def loss(self, model, batch):
        x, t, y = batch
        return F.cross_entropy(model(x, t), y) * batch.scale


class BatchWithAGenerator(WithMLP):
    """a batch has a generator in it, which can be read once"""

    def train_data(self):
        return Collated(lambda x, t, y: (x, t, y, (x * k for k in (1, 2))), self.num_samples, self.dtype)

    def loss(self, model, batch):
        _, t, y, views = batch
        return sum(F.cross_entropy(model(view, t), y) for view in list(views))


class AssignedBuffer(Case):
    """a buffer that is averaged, not saved, and assigned anew in each forward pass"""

    stateful = True
    job = {"train": {"average_buffers": ["norm.mean"]}}

    def net(self):
        class Norm(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("mean", torch.zeros(8), persistent=False)

            def forward(self, h):
                out = h - self.mean
                if self.training:
                    self.mean = torch.lerp(self.mean, h.detach().mean(0), 0.1)
                return out

        class M(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.norm, self.b = nn.Linear(6, 8), Norm(), nn.Linear(8, 4)

            def forward(self, x, t):
                return self.b(torch.tanh(self.norm(self.a(x))))

        return M()


class RecomputedCounter(Case):
    """a recomputed block counts its calls in Python: refused"""

    stateful = True
    is_refused = True
    job = {"train": {"activation_checkpointing": ["block"]}}

    def net(self):
        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.calls = nn.Linear(8, 8), 0

            def forward(self, h):
                self.calls += self.training
                return torch.tanh(self.inner(h)) / (1 + self.calls)

        class M(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.block, self.b = nn.Linear(6, 8), Block(), nn.Linear(8, 4)

            def forward(self, x, t):
                return self.b(self.block(self.a(x)))

        return M()


class SecondDerivativeOfStatistics(Case):
    """a gradient penalty through statistics of all ranks: refused"""

    is_refused = True
    num_samples = 31
    settings = ("easy",)
    job = {"train": {"sync_batch_norm": True}}

    def net(self):
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))

    def loss(self, model, batch):
        x = batch[0].requires_grad_()
        logits = model(x)
        (gradient,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
        return F.cross_entropy(logits, batch[3]) + gradient.square().mean()


class StatisticsInEvaluationMode(Case):
    """batch normalization without running statistics, in evaluation mode, is synchronized too"""

    num_samples = 31
    settings = ("easy",)
    job = {"train": {"sync_batch_norm": True}}

    def net(self):
        class M(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)
                self.norm = nn.BatchNorm1d(8, track_running_stats=False)

            def train(self, mode=True):
                super().train(mode)
                self.norm.eval()
                return self

            def forward(self, x, t):
                return self.b(torch.relu(self.norm(self.a(x))))

        return M()


class IntegersInAnAverage(WithMLP):
    """a frozen integer parameter, in a job that averages weights (`ema`)"""

    job = {"ema": {"decay": 0.7}}

    def net(self):
        model = MLP()
        model.register_parameter("numbers", nn.Parameter(torch.arange(5), requires_grad=False))
        return model


class OptimizerWithAClosure(WithMLP):
    """an optimizer that makes backward passes of its own: refused"""

    is_refused = True
    settings = ("easy",)
    optimizer = ("pytorch_optimizer:SophiaH", {})
