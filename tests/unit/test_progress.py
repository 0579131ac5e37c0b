"""Where training stands, and where it may go on."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest

from horovod_train.data.order import DataOrder
from horovod_train.errors import UserError
from horovod_train.training.run import Progress

ORDER = DataOrder(num_samples=10, seed=3, shuffle=True)


def test_steps_and_epochs_are_counted():
    progress = Progress(ORDER)
    for _ in range(2):
        progress.advance(4, 0.0)

    assert (progress.step, progress.epoch, progress.cursor) == (2, 0, 8)
    assert progress.epochs_passed == 0.8
    progress.advance(2, 0.0)
    progress.finish_epoch()
    assert (progress.step, progress.epoch, progress.cursor) == (3, 1, 0)
    assert progress.epochs_passed == 1.0


def test_a_beginning_is_noted_as_one():
    assert Progress(ORDER).to_json() == {
        "order": {"num_samples": 10, "seed": 3, "shuffle": True},
        "step": 0,
        "epoch": 0,
        "cursor": 0,
        "metrics": {},
        "metrics_step": -1,
        "evaluation": {"interval": "", "number": 0},
        "epochs_of_steps": {},
        "best_metric": None,
        "num_without_improvement": 0,
        "stopped_early": False,
        "plateau": {"factor": 1.0, "best": None, "num_without_improvement": 0, "cooldown": 0},
        "noise": {"covariances": [], "square_norms": [], "num_measured": 0},
        "scaled_epochs": 0.0,
    }


def test_what_an_evaluation_found_is_of_the_weights_of_that_step():
    progress = Progress(ORDER, metrics={"loss": 0.5}, metrics_step=0)
    assert progress.current_metrics == {"loss": 0.5}

    progress.advance(1, 0.0)

    assert progress.current_metrics == {}


def test_it_goes_on_where_a_checkpoint_stands():
    stood = Progress(ORDER, step=7, epoch=2, cursor=4, metrics={"loss": 0.5}, metrics_step=7, best_metric=0.4)
    progress = Progress(ORDER)

    progress.restore(stood.to_json())

    assert progress == stood


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (replace(ORDER, seed=4), "seed was 3 and is 4"),
        (replace(ORDER, num_samples=11), "num_samples was 10 and is 11"),
        (replace(ORDER, shuffle=False), "shuffle was True and is False"),
        (replace(ORDER, num_samples=11, seed=4), "num_samples was 10 and is 11; seed was 3 and is 4"),
    ],
)
def test_a_half_used_epoch_does_not_go_on_in_another_order(now, said):
    progress = Progress(now)

    with pytest.raises(UserError, match="another order of samples") as caught:
        progress.restore(Progress(ORDER, step=1, cursor=1).to_json())

    assert caught.value.message.endswith(f"with another order of samples: {said}")
    assert "until the epoch is complete" in caught.value.hint
    assert progress == Progress(now), "nothing was taken over"


def test_a_whole_epoch_is_followed_by_one_in_any_order():
    now = replace(ORDER, seed=4)
    progress = Progress(now)

    progress.restore(Progress(ORDER, step=5, epoch=1).to_json())

    assert (progress.epoch, progress.step, progress.order) == (1, 5, now)


def test_what_fixes_the_order_of_samples_is_fixed():
    with pytest.raises(FrozenInstanceError):
        ORDER.seed = 4
