"""Progress of training: the plain numbers from which a job resumes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from horovod_train.config.duration import Duration
from horovod_train.errors import UserError
from horovod_train.lr.schedules import PlateauState
from horovod_train.training.noise import NoiseMoments


@dataclass(frozen=True)
class DataOrder:
    """Settings that determine the order of samples, which must not change within an epoch."""

    num_samples: int
    seed: int
    shuffle: bool


@dataclass
class PassedIntervals:
    """How often an interval has passed.

    Attributes:
        interval: The interval, as text; empty: unknown, in checkpoints of previous versions.
        number: How often it has passed.
    """

    interval: str = ""
    number: int = 0


@dataclass
class Progress:
    """Progress of training.

    Attributes:
        order: Settings that determine the order of samples.
        step: Optimizer steps performed.
        epoch: Epochs completed.
        cursor: Samples of the current epoch used by all ranks together.
        metrics: Result of the last evaluation.
        metrics_step: Optimizer steps performed before that evaluation; -1: none.
        best_metric: Best value of the early-stopping metric so far.
        num_without_improvement: Evaluations since ``best_metric``.
        stopped_early: Whether early stopping has ended training.
        plateau: Reductions of the learning rate by ``lr.decay: plateau``.
        noise: Moments of the gradient noise, if they are measured.
        scaled_epochs: Scale-invariant progress under AdaScale; otherwise equal to ``epochs_passed``.
        evaluation: The interval of evaluations, and how often it had passed at the last evaluation.
        epochs_of_steps: Positions in steps, in epochs: one that has passed may belong to other ranks.
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
    plateau: PlateauState = field(default_factory=PlateauState)
    noise: NoiseMoments = field(default_factory=NoiseMoments)
    scaled_epochs: float = 0.0
    evaluation: PassedIntervals = field(default_factory=PassedIntervals)
    epochs_of_steps: dict[str, float] = field(default_factory=dict)

    @property
    def epochs_passed(self) -> float:
        """Epochs completed, with the fraction of the current one."""
        return self.epoch + self.cursor / self.order.num_samples

    def num_passed(self, interval: Duration, *, is_before: bool = False) -> int:
        """Return how often an interval has passed since the start of the training.

        Args:
            interval: The interval.
            is_before: Return it for just before the last step has ended.
        """
        length = self.order.num_samples
        num_samples = self.epoch * length + self.cursor
        return interval.num_passed(
            step=self.step - is_before, num_samples=num_samples - is_before, samples_per_epoch=length
        )

    def advance(self, num_samples: int, scaled_epochs: float) -> None:
        """Count an optimizer step, its samples on all ranks, and its scale-invariant progress in epochs."""
        self.step += 1
        self.cursor += num_samples
        self.scaled_epochs += scaled_epochs

    def finish_epoch(self) -> None:
        """Count a completed epoch."""
        self.epoch += 1
        self.cursor = 0

    @property
    def current_metrics(self) -> dict[str, float]:
        """Metrics of the current weights; empty: they were not evaluated."""
        return self.metrics if self.metrics_step == self.step else {}

    def to_json(self) -> dict[str, object]:
        """Return plain JSON."""
        return asdict(self)

    def restore(self, document: Mapping[str, Any]) -> None:
        """Load the progress of a checkpoint.

        Raises:
            UserError: The checkpoint is within an epoch, and the order of samples has changed.
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
                "the checkpoint was saved within an epoch with another order of samples: "
                + "; ".join(changed),
                hint="restore these settings until the epoch is complete, or use another name",
            )
        for name, kind in (
            ("plateau", PlateauState),
            ("noise", NoiseMoments),
            ("evaluation", PassedIntervals),
            ("epochs_of_steps", dict),
        ):
            found = fields.get(name)  # absent in checkpoints of former versions
            fields[name] = kind() if found is None else kind(**found)
        for name, value in fields.items():
            setattr(self, name, value)
        if fields.get("scaled_epochs") is None:
            self.scaled_epochs = self.epochs_passed
