"""Where training stands: plain numbers, all that a resumed job has to know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from horovod_train.errors import UserError


@dataclass(frozen=True)
class DataOrder:
    """Settings that determine the order of samples, which must not change within an epoch."""

    num_samples: int
    seed: int
    shuffle: bool


@dataclass
class Progress:
    """Where training stands.

    Attributes:
        order: What fixes the order of samples.
        step: Optimizer steps made.
        epoch: Epochs completed.
        cursor: Samples of the current epoch used by all ranks together.
        metrics: Result of the last evaluation.
        metrics_step: Optimizer steps made when it was taken.
        best_metric: Best value of the early-stopping metric so far.
        num_without_improvement: Evaluations since then.
        stopped_early: Early stopping has ended the job.
    """

    order: DataOrder
    step: int = 0
    epoch: int = 0
    cursor: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    metrics_step: int = -1
    best_metric: float | None = None
    num_without_improvement: int = 0
    stopped_early: bool = False

    @property
    def epochs_passed(self) -> float:
        """Epochs with the fraction of the current one."""
        return self.epoch + self.cursor / self.order.num_samples

    def advance(self, num_samples: int) -> None:
        """Note one optimizer step over so many samples of all ranks."""
        self.step += 1
        self.cursor += num_samples

    def finish_epoch(self) -> None:
        """Note the end of an epoch."""
        self.epoch += 1
        self.cursor = 0

    @property
    def current_metrics(self) -> dict[str, float]:
        """Result of an evaluation of the current weights; empty: none."""
        return self.metrics if self.metrics_step == self.step else {}

    def to_json(self) -> dict[str, object]:
        """Return plain JSON."""
        return asdict(self)

    def restore(self, document: Mapping[str, Any]) -> None:
        """Go on where a checkpoint stands.

        Raises:
            UserError: It stands in the middle of an epoch with another order of samples.
        """
        fields = dict(document)
        old = DataOrder(**fields.pop("order"))
        if fields["cursor"] > 0 and old != self.order:
            changed = [
                f"{name} was {before} and is {now}"
                for name, before in asdict(old).items()
                if (now := asdict(self.order)[name]) != before
            ]
            raise UserError(
                "the checkpoint stands in the middle of an epoch whose samples came in another order: "
                + "; ".join(changed),
                hint="restore these settings until the epoch is complete, or use another name",
            )
        for name, value in fields.items():
            setattr(self, name, value)
