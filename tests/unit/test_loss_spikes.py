"""Which losses are spikes, and what follows."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest

from horovod_train.collectives.base import SingleRank
from horovod_train.config.rules import broken_rules
from horovod_train.config.schema import Job, LossSpikes
from horovod_train.data.order import DataOrder
from horovod_train.errors import NumericError
from horovod_train.events.wire import Reporter
from horovod_train.training.hooks.spikes import WatchLoss
from horovod_train.training.run import Progress, RestoreCheckpoint

SAMPLES = 100


class Hooked:
    """The hook, and the steps that it is told; a checkpoint every three steps."""

    def __init__(self, **settings):
        manager = SimpleNamespace(steps=lambda: list(range(3, self.step + 1, 3)))
        self.output = io.StringIO()
        reporter = Reporter(0, as_json=False, stream=self.output)
        self.hook = WatchLoss(LossSpikes(window_steps=8, **settings), manager, reporter)
        progress = SimpleNamespace(order=SimpleNamespace(num_samples=SAMPLES))
        self.run = SimpleNamespace(world=SingleRank(), progress=progress)
        self.step = 0

    def after(self, *losses, is_finite=True):
        action = None
        for loss in losses:
            self.step += 1
            outcome = SimpleNamespace(loss=loss, is_finite=is_finite)
            epochs = self.step * 10 / SAMPLES
            self.hook.on_result(
                self.run, SimpleNamespace(step=self.step, outcome=outcome, epochs_passed=epochs)
            )
            action = self.hook.on_step(self.run)
        return action

    @property
    def told(self):
        return self.output.getvalue().splitlines()


USUAL = [1.0, 1.1, 0.9, 1.05, 0.95, 1.0, 1.1]


def test_a_loss_far_above_the_last_ones_is_a_spike():
    hooked = Hooked()
    hooked.after(*USUAL, 1.3)
    assert hooked.told == []
    hooked.after(30.0, 31.0, 1.0)

    assert hooked.told == ["warning: the loss of step 9 is 30 (usual: 1.025)"]


@pytest.mark.parametrize("losses", [[30.0], [1.0, 30.0], [9.0, 5.0, 2.0, 30.0], [1.0] * 8 + [0.0, 1.0005]])
def test_the_first_losses_and_small_changes_are_none(losses):
    hooked = Hooked()
    hooked.after(*losses)

    assert hooked.told == []


def test_losses_that_are_not_finite_are_for_others():
    hooked = Hooked()
    hooked.after(*USUAL)
    hooked.after(float("nan"), float("inf"))
    hooked.after(1e9, is_finite=False)

    assert hooked.told == []


def test_another_level_is_reported_once():
    hooked = Hooked()
    hooked.after(*USUAL, *[10.0] * 20)

    assert len(hooked.told) == 1


def test_training_goes_back_to_the_checkpoint_before_and_skips_to_the_end_of_the_step():
    hooked = Hooked(action="rollback")
    hooked.after(*USUAL, 1.0)
    action = hooked.after(50.0)

    assert action == RestoreCheckpoint(
        6, "the loss of step 9 is 50; its samples are skipped", resume_at=90
    )  # not the checkpoint of step 9
    assert hooked.told == ["warning: the loss of step 9 is 50 (usual: 1); back to the checkpoint of step 6"]


def test_without_a_checkpoint_before_it_a_spike_is_only_reported():
    hooked = Hooked(action="rollback")
    hooked.hook.manager = SimpleNamespace(steps=list)

    assert hooked.after(*USUAL, 50.0) is None
    assert len(hooked.told) == 1


def test_spikes_after_the_same_checkpoint_end_the_job_at_last():
    hooked = Hooked(action="rollback", max_rollbacks=2)
    hooked.hook.manager = SimpleNamespace(steps=lambda: [3])
    hooked.after(*USUAL)
    assert hooked.after(50.0).step == hooked.after(50.0).step == 3
    with pytest.raises(NumericError, match="that is spike 3 after the checkpoint of step 3"):
        hooked.after(50.0)


@pytest.mark.parametrize(
    ("position", "expected"), [(150, (1, 50)), (200, (1, 100)), (201, (2, 1)), (100, (0, 100))]
)
def test_a_skip_is_counted_and_leaves_the_end_of_an_epoch_to_be_completed(position, expected):
    progress = Progress(DataOrder(SAMPLES, 0, shuffle=False), epoch=0, cursor=30, scaled_epochs=0.3)
    progress.skip_to(position, is_scaled=True)

    assert (progress.epoch, progress.cursor) == expected
    assert progress.scaled_epochs == pytest.approx(progress.epochs_passed)
    document = progress.to_json()
    assert document["skipped"] == [[30, position]]
    again = Progress(DataOrder(SAMPLES, 0, shuffle=False))
    assert "skipped" not in again.to_json()
    again.restore(document)
    assert again.skipped == [[30, position]]


@pytest.mark.parametrize(("framework", "is_refused"), [("keras", True), ("torch", False), ("jax", False)])
def test_loops_of_others_cannot_go_back(framework, is_refused):
    job = Job.model_validate(
        {
            "name": "j",
            "task": "own:Task",
            "framework": framework,
            "health": {"loss_spike": {"action": "rollback"}},
        }
    )

    assert any(problem.path == "health.loss_spike.action" for problem in broken_rules(job)) == is_refused
