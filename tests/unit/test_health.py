"""Ranks that differ are named; numbers that go wrong end the job where they do."""

from __future__ import annotations

import math

import numpy as np
from support.worlds import on_ranks

from horovod_train.checkpoint.arrays import ArrayBlob, ReplicaState
from horovod_train.config.schema import Health
from horovod_train.errors import DesyncError, NumericError
from horovod_train.health.guard import FiniteGuard
from horovod_train.health.sync import check_in_sync


def state(**values):
    blobs = {n: ArrayBlob("float32", (1,), np.float32([v]).tobytes()) for n, v in values.items()}
    return ReplicaState(blobs, {}, None, {})


class TestSync:
    def test_equal_ranks_pass(self):
        assert on_ranks(4, lambda world: check_in_sync(world, state(a=1, b=2), "now")) == [None] * 4

    def test_the_odd_rank_and_the_array_are_named_on_every_rank(self):
        def rank(world):
            check_in_sync(world, state(a=1, b=3 if world.rank == 2 else 2), "after step 5")

        for error in on_ranks(4, rank):
            assert isinstance(error, DesyncError)
            assert "ranks differ after step 5: rank 2 against the others, in 1 of 3 arrays" in str(error)
            assert "first model.b" in str(error)

    def test_one_bit_is_enough(self):
        tiny = np.nextafter(np.float32(1), np.float32(2))

        found = on_ranks(2, lambda world: check_in_sync(world, state(a=tiny if world.rank else 1), "now"))

        assert all(isinstance(error, DesyncError) for error in found)


class TestGuard:
    def run(self, health, losses, *, scaler=False, size=2, bad_rank=1):
        """Feed steps with these losses; the bad rank's own loss carries what is not finite."""

        def rank(world):
            guard = FiniteGuard(health, world, scaler_skips=scaler)
            for step, loss in enumerate(losses, 1):
                local = loss if world.rank == bad_rank else 0.1
                finite = math.isfinite(loss) and loss >= 0  # a negative loss stands for a bad gradient
                guard.check(step, is_finite=finite, loss=loss, local_loss=local)

        return on_ranks(size, rank)

    def test_stops_at_once_and_names_the_rank(self):
        for error in self.run(Health(), [1.0, math.nan]):
            assert isinstance(error, NumericError)
            assert error.exit_code == 3
            assert "step 2: the loss is nan because of rank 1" in str(error)

    def test_skips_when_allowed_until_it_is_too_often(self):
        health = Health(non_finite="skip", max_skipped_steps=2)

        assert self.run(health, [math.nan, math.inf, 1.0, math.nan, math.nan]) == [None, None]
        assert all(isinstance(e, NumericError) for e in self.run(health, [math.nan] * 3))

    def test_a_loss_scaler_may_look_for_its_scale(self):
        assert self.run(Health(), [-1.0, -1.0, 1.0], scaler=True) == [None, None]
        assert all(isinstance(e, NumericError) for e in self.run(Health(), [-1.0], scaler=False))

    def test_a_loss_scaler_is_no_excuse_for_a_loss_that_is_not_a_number(self):
        assert all(isinstance(e, NumericError) for e in self.run(Health(), [math.nan], scaler=True))
