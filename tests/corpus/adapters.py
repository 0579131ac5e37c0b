"""Cases of the corpus as tasks of Lightning and of Transformers: the same models, in loops of others."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

from corpus.base import Case
from corpus.norms import SYNC

NEEDS_OUR_LOOP = ("param_groups", "after_update")
RELIES_ON_TRAIN = {"BnEval"}
"""Has a ``train()`` of its own, which a loop of PyTorch calls, and Lightning does not."""
COLUMNS = ("x", "t", "lengths", "y", "i")


def fits(case: type[Case]) -> bool:
    """Whether a case is a model and a mean over samples, without what jobs of PyTorch alone have."""
    return not (
        (case.job and case.job != SYNC)
        or case.splits
        or case.__name__ in RELIES_ON_TRAIN
        or case.is_refused
        or any(hasattr(case, name) for name in NEEDS_OUR_LOOP)
        or case.__module__ in {"corpus.averages", "corpus.random_numbers", "corpus.tasks_with_state"}
    )


class Lightning:
    """A case as a task of Lightning."""

    def __init__(self, case: str, *, double: bool = True) -> None:
        self.case = of_name(case)(double=double)

    def model(self) -> Any:
        import lightning

        case = self.case

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = case.model()
                case.gather = lambda z: self.all_gather(z, sync_grads=True).flatten(0, 1)

            def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
                return case.loss(self.net, batch)

        return Module()

    def train_data(self) -> Any:
        return self.case.train_data()


class Transformers(Lightning):
    """A case as a task of Transformers: the model takes a batch by names, and returns its loss."""

    def model(self) -> nn.Module:
        case = self.case

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = case.model()

            def forward(self, x: Any, t: Any, lengths: Any, y: Any, i: Any) -> dict[str, torch.Tensor]:
                return {"loss": case.loss(self.net, (x, t, lengths, y, i))}

        return Model()

    def collate(self, samples: list[Any]) -> dict[str, torch.Tensor]:
        return dict(zip(COLUMNS, default_collate(samples), strict=True))


def of_name(name: str) -> type[Case]:
    from corpus.run import cases

    return cases()[name]
