"""Which tensors in attributes of modules are state: those that a pass reads before it writes them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from horovod_train.frameworks.torch.verify.untouched import names_read, traceless


class Net(nn.Module):
    """A layer, and a tensor that is not a buffer."""

    def __init__(self, use):
        super().__init__()
        self.layer, self.use = nn.Linear(3, 2), use
        self.kept = torch.ones(4, 2)

    def forward(self, x):
        return self.use(self, self.layer(x))


def appended(net, z):
    """A queue of embeddings, which is replaced."""
    found = z @ net.kept.T
    net.kept = torch.cat([net.kept[len(z) :], z.detach()])
    return found


def filled(net, z):
    """A queue of embeddings, which is written in place."""
    found = z @ net.kept.clone().T
    net.kept[: len(z)] = z.detach()
    return found


def hidden_state(net, z):
    """The state of a recurrent network, which continues over batches."""
    z = z + net.kept[: len(z)]
    net.kept = z.detach()
    return z


def average(net, z):
    """A running mean, such as the centre of DINO."""
    found = z - net.kept[0]
    net.kept.mul_(0.9).add_(z.detach().mean(), alpha=0.1)
    return found


def only_updated(net, z):
    """It is read to be updated."""
    net.kept.lerp_(z.detach().mean().expand(4, 2), 0.1)
    return z


def activation(net, z):
    """An activation, for a look at it."""
    net.kept = z.detach()
    return z


def scratch(net, z):
    """Memory that is used again in each pass."""
    net.kept[: len(z)] = z.detach()
    return z + net.kept[: len(z)]


def shape_only(net, z):
    """Its numbers are not read."""
    return z * net.kept.shape[0] + net.kept.view(-1).numel()


@pytest.mark.parametrize(
    ("use", "is_read"),
    [
        (appended, 1),
        (filled, 1),
        (hidden_state, 1),
        (average, 1),
        (only_updated, 1),
        (activation, 0),
        (scratch, 0),
        (shape_only, 0),
    ],
)
def test_are_read_before_they_are_written(use, is_read):
    net = Net(use)
    kept, before = net.kept, net.kept.clone()
    with traceless(net, [kept]) as mode:
        net(torch.ones(2, 3)).sum().backward()
        names = names_read({"model.kept": kept, "other": torch.ones(1)}, mode.read)

    assert names == ["model.kept"] * is_read
    assert torch.equal(kept, before)
