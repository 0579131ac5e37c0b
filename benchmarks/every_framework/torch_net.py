"""The network in PyTorch; the loop by hand is for Lightning and Transformers, too. usage: STEPS."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.nn import functional
from vectors import LR, MOMENTUM, NUM_CLASSES, NUM_LAYERS, WIDTH, batches


def network() -> nn.Module:
    """Return the network."""
    torch.manual_seed(0)
    hidden = [layer for _ in range(NUM_LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, NUM_CLASSES))


def by_hand(num_steps: int) -> None:
    """Train with Horovod alone."""
    import horovod.torch as hvd

    hvd.init()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), LR * hvd.size(), MOMENTUM)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    model.train()
    for x, y in batches(hvd.rank(), hvd.size(), num_steps):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(torch.from_numpy(x)), torch.from_numpy(y))
        loss.backward()
        optimizer.step()
        loss.item()


if __name__ == "__main__":
    by_hand(int(sys.argv[1]))
