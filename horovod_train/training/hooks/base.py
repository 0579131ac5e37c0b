"""Base class of hooks, and the objects from which hooks are created."""

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
    """Objects from which the hooks of a run are created.

    Attributes:
        run_id: Name of this run of the job.
        world: Communicator of all ranks.
        framework: The framework; None: a user's own loop.
        manager: Manager of checkpoints; None: a user's own loop.
        recorder: Recorder of this rank's metrics.
        reporter: Writer of this rank's events.
        exchange: Periodic exchange of data between ranks.
        is_preempted: Returns whether this rank was preempted.
        report_interval_s: Time between two reports of progress, in seconds.
        at_end: Callbacks that run when the rank ends, also after an error.
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
    """Base class of hooks, whose methods do nothing. Subclasses override some of them.

    A hook is a class in its own file and an entry of ``registry.HOOKS``, which determines the order of hooks.
    Hooks run on all ranks, unless ``of`` returns None. They must return the same action on all ranks; None:
    continue.
    """

    @classmethod
    def of(cls, parts: HookParts) -> Hook | None:  # noqa: ARG003
        """Return the hook of a run; None: the job, or this rank, does not require it."""
        return cls()

    def on_start(self, run: Run) -> None:
        """Called once before the first step; a checkpoint to resume from is loaded already."""

    def on_reading(self, run: Run, report: StepReport) -> Action | None:
        """Called with the result of a step, in step order; ``run.progress`` may be some steps ahead."""
        return None

    def on_step(self, run: Run) -> Action | None:
        """Called after each optimizer step, which ``run.progress`` includes; its result may be pending."""
        return None

    def on_evaluation(self, run: Run, *, begins: bool) -> None:
        """Called before and after an evaluation; after it, ``run.progress.metrics`` has the results."""

    def on_epoch(self, run: Run, *, evaluated: bool) -> Action | None:
        """Called after each epoch; ``evaluated``: whether the weights at its end were evaluated."""
        return None

    def on_end(self, run: Run) -> None:
        """Called when training is complete."""


def make_hooks(parts: HookParts, locations: Sequence[str] = HOOKS) -> list[Hook]:
    """Return the hooks of a run, in the order of ``locations``, the import paths of their classes."""
    made = (load_attribute(location, what="hook").of(parts) for location in locations)
    return [hook for hook in made if hook is not None]
