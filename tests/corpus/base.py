"""What a case of the corpus is: a small task with deterministic weights, that no code of the product has a
part in.

Each is trained by ranks under every strategy, and by a plain loop over the joint batch in one process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["MLP", "Case", "F", "Samples", "case_of", "nn", "torch"]


class Samples:
    """Numbers x, tokens t, lengths, labels y and indices."""

    def __init__(self, num: int, dtype: torch.dtype, seed: int = 7) -> None:
        make = torch.Generator().manual_seed(seed)
        self.x = torch.randn(num, 6, generator=make, dtype=torch.float64).to(dtype)
        self.t = torch.randint(0, 20, (num, 5), generator=make)
        self.lengths = torch.randint(1, 6, (num,), generator=make)
        self.y = torch.randint(0, 4, (num,), generator=make)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]:
        return self.x[i], self.t[i], self.lengths[i], self.y[i], i


class Case:
    """A task; a batch is x [B, 6], t [B, 5], lengths [B], y [B], i [B].

    Attributes:
        stateful: A forward pass changes state: there is one for each step, so that there is one in one
            process.
        splits: The loss of a batch is not the mean of those of its parts: one process computes with the
            parts that ranks have.
        is_random: It draws random numbers of each rank's own.
        plan: How layers are shared under ``tensor_parallel``; None: it is not tried.
        job: Sections of the job besides those of the corpus.
        only: Strategies it is meant for; None: all.
        is_refused: A job refuses it under all strategies, or under all that see it: the message is tested.
        optimizer: Name and arguments; None: that of the settings.
        settings: How it is trained: by SGD, or by AdamW with accumulation and clipping.
        tolerance: Largest difference of a weight; None: that of its type.
    """

    stateful: ClassVar[bool] = False
    splits: ClassVar[bool] = False
    is_random: ClassVar[bool] = False
    plan: ClassVar[Any] = None
    job: ClassVar[Mapping[str, Any]] = {}
    only: ClassVar[Any] = None
    is_refused: ClassVar[bool] = False
    tolerance: ClassVar[float | None] = None
    optimizer: ClassVar[Any] = None
    settings: ClassVar[Any] = ("easy", "hard")
    num_samples: ClassVar[int] = 29  # no global batch divides it: the last step of an epoch is short

    def __init__(self, *, double: bool = True) -> None:
        self.dtype = torch.float64 if double else torch.float32

    @classmethod
    def optimized(cls, settings: Any) -> Any:
        """The settings with an optimizer of the case's own."""
        return (
            settings
            if cls.optimizer is None
            else replace(settings, optimizer=cls.optimizer[0], args=cls.optimizer[1])
        )

    def net(self) -> nn.Module:
        raise NotImplementedError

    def model(self) -> nn.Module:
        with torch.random.fork_rng([]):
            torch.manual_seed(1234)
            model = self.net()
        return model.to(self.dtype)

    def train_data(self) -> Any:
        return Samples(self.num_samples, self.dtype)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, t, _, y, _ = batch
        return F.cross_entropy(model(x, t), y)


def case_of(net: type[nn.Module]) -> type[Case]:
    """Return the case of a classifier of x and t, under the name and with the docstring of its module."""
    settings = {"net": lambda self: net(), "__doc__": net.__doc__, "__module__": net.__module__}
    return type(net.__name__, (Case,), settings)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(6, 8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.out = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.inp(x))
        h = h + self.down(torch.tanh(self.up(h)))
        return self.out(h)
