"""What a hook is, and what it is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from horovod_train.checkpoint.manager import CheckpointManager
from horovod_train.collectives.base import Communicator
from horovod_train.config.schema import Job
from horovod_train.events.wire import Reporter
from horovod_train.frameworks.base import Framework
from horovod_train.registry import HOOKS, load_attribute
from horovod_train.telemetry.recorder import Recorder
from horovod_train.training.actions import Action
from horovod_train.training.exchange import PeriodicExchange
from horovod_train.training.pending_steps import StepReport
from horovod_train.training.run import Run


@dataclass(frozen=True)
class HookParts:
    """What the hooks of a run are made of.

    Attributes:
        job: The job.
        run_id: Name of this run of it.
        world: Its ranks.
        framework: The framework; None: a user's own loop.
        manager: Manager of the checkpoints; None: a user's own loop.
        recorder: Of this rank's metrics.
        reporter: Tells people.
        exchange: What ranks tell each other now and then.
        is_preempted: Whether this rank was preempted.
        report_interval_s: Time between two reports of progress, in seconds.
        at_end: What is done when the rank ends, however it does.
    """

    job: Job
    run_id: str
    world: Communicator
    framework: Framework | None
    manager: CheckpointManager | None
    recorder: Recorder
    reporter: Reporter
    exchange: PeriodicExchange
    is_preempted: Callable[[], bool]
    report_interval_s: float
    at_end: ExitStack


class Hook:
    """Looks at training from outside. This one does nothing; others override what they need.

    A hook is a class in its own file and a row of ``registry.HOOKS``, whose order is theirs. All hooks
    run on all ranks, and what one answers is the same on all of them; None: continue.
    """

    @classmethod
    def of(cls, parts: HookParts) -> Hook | None:  # noqa: ARG003
        """Return the hook of a run; None: its job does without."""
        return cls()

    def on_start(self, run: Run) -> None:
        """Training begins, after a resume if there is one."""

    def on_reading(self, run: Run, report: StepReport) -> Action | None:
        """It is known what a step did; ``run.progress`` may be further already."""
        return None

    def on_step(self, run: Run) -> Action | None:
        """An optimizer step was made, the one that ``run.progress`` counts; its outcome may come later."""
        return None

    def on_evaluation(self, run: Run, *, begins: bool) -> None:
        """An evaluation begins, or has ended."""

    def on_epoch(self, run: Run, *, evaluated: bool) -> Action | None:
        """An epoch is complete; ``run.progress.metrics`` is new if it was evaluated."""
        return None

    def on_end(self, run: Run) -> None:
        """Training is complete."""


def make_hooks(parts: HookParts, locations: Sequence[str] = HOOKS) -> list[Hook]:
    """Return the hooks of a run, in their order.

    Args:
        parts: Their parts.
        locations: Import paths of their classes.
    """
    made = (load_attribute(location, what="hook").of(parts) for location in locations)
    return [hook for hook in made if hook is not None]
