"""A plain Horovod loop on one rank, watched in every second block of steps and as it is in the others.

usage: STEPS
"""

from __future__ import annotations

import io
import statistics
import sys
from time import perf_counter
from typing import Any

import torch
from torch.nn import functional
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from horovod_train.collectives.base import SingleRank
from horovod_train.events.wire import Reporter
from horovod_train.scripts.meter import StepMeter
from horovod_train.scripts.torch_hooks import watch_torch
from horovod_train.telemetry.recorder import Recorder

BLOCK_STEPS = 20
PRE_HOOKS = optimizers._global_optimizer_pre_hooks  # noqa: SLF001  (nothing else takes hooks away)
POST_HOOKS = optimizers._global_optimizer_post_hooks  # noqa: SLF001


class Switch:
    """Puts what watches a script in place, and takes it away."""

    def __init__(self) -> None:
        plain = self._now()
        recorder = Recorder("script", "r", SingleRank(), 1)
        watch_torch(StepMeter("script", 0, 1, recorder, Reporter(0, as_json=True, stream=io.StringIO())))
        self._ways = {True: self._now(), False: plain}

    @staticmethod
    def _now() -> tuple[Any, Any, dict[int, Any], dict[int, Any]]:
        return torch.autograd.backward, _BaseDataLoaderIter.__next__, dict(PRE_HOOKS), dict(POST_HOOKS)

    def turn(self, *, on: bool) -> None:
        """Watch from now on, or do not."""
        backward, following, pre, post = self._ways[on]
        torch.autograd.backward = backward
        _BaseDataLoaderIter.__next__ = following  # type: ignore[method-assign]
        for hooks, wanted in ((PRE_HOOKS, pre), (POST_HOOKS, post)):
            hooks.clear()
            hooks.update(wanted)


def main(num_steps: int) -> None:
    """Train, and print the ratio of neighbouring blocks."""
    torch.set_num_threads(1)
    data = TensorDataset(torch.randn(8192, 784), torch.randint(10, (8192,)))
    hidden = [torch.nn.Linear(784, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024), torch.nn.ReLU()]
    model = torch.nn.Sequential(*hidden, torch.nn.Linear(1024, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    switch, blocks = Switch(), []
    batches = iter(DataLoader(data, batch_size=64))
    for _ in range(num_steps // BLOCK_STEPS):
        switch.turn(on=len(blocks) % 2 == 0)
        times = []
        for _ in range(BLOCK_STEPS):
            begun_s = perf_counter()
            try:
                inputs, labels = next(batches)
            except StopIteration:
                batches = iter(DataLoader(data, batch_size=64))
                inputs, labels = next(batches)
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            times.append(perf_counter() - begun_s)
        blocks.append(statistics.median(times))
    ratios = sorted(on / off for on, off in zip(blocks[2::2], blocks[3::2], strict=False))
    low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
    step_ms = 1000 * statistics.median(blocks)
    print(f"script  {statistics.median(ratios):.4f} [{low:.3f} .. {high:.3f}]  steps of {step_ms:.2f} ms")


if __name__ == "__main__":
    main(int(sys.argv[1]))
