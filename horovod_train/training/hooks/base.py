"""What a hook is, and what it is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from horovod_train.checkpoint.manager import CheckpointManager
from horovod_train.collectives.base import Communicator
from horovod_train.config.schema import Job
from horovod_train.events.wire import Reporter
from horovod_train.frameworks.base import Framework
from horovod_train.registry import HOOKS
from horovod_train.telemetry.recorder import Recorder
from horovod_train.training.actions import Action
from horovod_train.training.readings import StepReport
from horovod_train.training.run import Run


@dataclass(frozen=True)
class HookParts:
    """What the hooks of a run are made of.

    Attributes:
        job: The job.
        world: Its ranks.
        framework: What it trains with.
        manager: Of its checkpoints.
        recorder: Of this rank's metrics.
        reporter: Tells people.
        is_asked_to_leave: Whether this rank was asked to.
        report_interval_s: Time between two reports of progress, in seconds.
    """

    job: Job
    world: Communicator
    framework: Framework
    manager: CheckpointManager
    recorder: Recorder
    reporter: Reporter
    is_asked_to_leave: Callable[[], bool]
    report_interval_s: float


class Hook:
    """Does nothing; others override what they need.

    A hook is a class in a file of its own and a row of ``registry.HOOKS``, whose order is theirs.
    """

    @classmethod
    def of(cls, parts: HookParts) -> Hook | None:  # noqa: ARG003
        """Return the hook of a run; None: its job does without."""
        return cls()

    def on_start(self, run: Run) -> None:
        """Training begins."""

    def on_reading(self, run: Run, report: StepReport) -> Action | None:
        """It is known what a step did."""
        return None

    def on_step(self, run: Run) -> Action | None:
        """An optimizer step was made."""
        return None

    def on_epoch(self, run: Run, *, evaluated: bool) -> Action | None:
        """An epoch is complete."""
        return None

    def on_end(self, run: Run) -> None:
        """Training is complete."""


def make_hooks(parts: HookParts) -> list[Hook]:
    """Return the hooks of a run, in their order."""
    made = (HOOKS.load(name).of(parts) for name in HOOKS.builtin)
    return [hook for hook in made if hook is not None]
