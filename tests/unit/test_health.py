"""Ranks that differ are named; numbers that go wrong end the job where they do."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from support.waiting import wait_until
from support.worlds import Board, ThreadCommunicator, on_ranks

from horovod_train.checkpoint.arrays import ArrayBlob, ReplicaState
from horovod_train.checkpoint.manager import keyed
from horovod_train.collectives.base import Collective, DeviceWork, SingleRank
from horovod_train.config.schema import Health
from horovod_train.errors import DesyncError, GpuError, NumericError, PeerError
from horovod_train.health import watches
from horovod_train.health import watches as watches_module
from horovod_train.health.comparisons import (
    FiniteGuard,
    check_before_saving,
    check_replicas_identical,
    digest,
)
from horovod_train.health.watches import DeviceWatch, JoinWatch, PeerWatch


def state(**values):
    blobs = {n: ArrayBlob("float32", (1,), np.float32([v]).tobytes()) for n, v in values.items()}
    return ReplicaState(blobs, {}, None, {})


class TestSync:
    def test_equal_ranks_pass(self):
        assert (
            on_ranks(4, lambda world: check_replicas_identical(world, state(a=1, b=2), "now")) == [None] * 4
        )

    def test_the_odd_rank_and_the_array_are_named_on_every_rank(self):
        def rank(world):
            check_replicas_identical(world, state(a=1, b=3 if world.rank == 2 else 2), "after step 5")

        for error in on_ranks(4, rank):
            assert isinstance(error, DesyncError)
            assert "ranks differ after step 5: rank 2 against the others, in 1 of 3 arrays" in str(error)
            assert "first model.b" in str(error)

    @pytest.mark.parametrize(
        ("values", "who"),
        [
            ([1, 2], "rank 0 against rank 1"),
            ([1, 1, 2, 2], "ranks 0-1 against ranks 2-3"),
            ([1, 2, 3], "rank 0 against rank 1 against rank 2"),
            ([2, 1, 1], "rank 0 against the others"),
            ([1, 2, 3, 4], "rank 0 against rank 1 against rank 2 against rank 3"),
            ([1, 2, 3, 4, 5], "rank 0 against rank 1 against rank 2 against rank 3 against others"),
        ],
    )
    def test_where_there_is_no_majority_nobody_is_called_wrong(self, values, who):
        found = on_ranks(
            len(values), lambda world: check_replicas_identical(world, state(a=values[world.rank]), "now")
        )

        assert all(f"ranks differ now: {who}, in 1 of 2 arrays" in str(error) for error in found)

    def test_one_bit_is_enough(self):
        tiny = np.nextafter(np.float32(1), np.float32(2))

        found = on_ranks(
            2, lambda world: check_replicas_identical(world, state(a=tiny if world.rank else 1), "now")
        )

        assert all(isinstance(error, DesyncError) for error in found)


def arrays(**values):
    blobs = {n: ArrayBlob(str(v.dtype), v.shape, v.tobytes()) for n, v in values.items()}
    return ReplicaState(blobs, {"momentum": blobs["a"]}, {"step": 1}, {"scale": 2.0})


class TestBeforeSaving:
    LARGE = np.arange(3 * 4096 + 5, dtype=np.float64)

    @pytest.mark.parametrize("place", [0, 1, 4095, 4096, 8191, 3 * 4096 - 1, 3 * 4096, 3 * 4096 + 4])
    @pytest.mark.parametrize("bit", [0, 31, 63])
    def test_one_bit_anywhere_makes_another_digest(self, place, bit):
        other = self.LARGE.copy()
        other.view(np.uint64)[place] ^= np.uint64(1) << np.uint64(bit)

        assert digest(keyed(arrays(a=self.LARGE))) != digest(keyed(arrays(a=other)))

    def test_equal_states_have_equal_digests_wherever_they_lie(self):
        assert digest(keyed(arrays(a=self.LARGE))) == digest(keyed(arrays(a=self.LARGE.copy())))

    def test_order_names_types_and_shapes_count(self):
        a, b = np.float32([1, 2]), np.float32([2, 1])
        states = [
            arrays(a=a, b=b),
            arrays(a=b, b=a),
            arrays(a=a, c=b),
            arrays(a=a, b=b.reshape(2, 1)),
            arrays(a=a, b=b.view(np.int32)),
            arrays(a=a[:1], b=b),
            arrays(a=a),
        ]

        assert len({digest(keyed(each)) for each in states}) == len(states)

    @pytest.mark.parametrize("places", [(0, 1), (7, 4095), (4096, 8000)])
    def test_two_words_of_a_row_exchanged_make_another_digest(self, places):
        other = self.LARGE.copy()
        other[list(places)] = other[list(reversed(places))]

        assert digest(keyed(arrays(a=self.LARGE))) != digest(keyed(arrays(a=other)))

    def test_what_is_more_in_one_word_and_less_in_another_makes_another_digest(self):
        other = self.LARGE.copy()
        other.view(np.uint64)[3] += np.uint64(1)
        other.view(np.uint64)[9] -= np.uint64(1)

        assert digest(keyed(arrays(a=self.LARGE))) != digest(keyed(arrays(a=other)))

    def test_two_rows_exchanged_make_another_digest(self):
        rows = self.LARGE[: 2 * 4096].reshape(2, 4096)

        assert digest(keyed(arrays(a=rows))) != digest(keyed(arrays(a=rows[::-1].copy())))

    @pytest.mark.parametrize("part", ["optimizer", "optimizer_tree", "scaler"])
    def test_everything_that_is_saved_is_compared(self, part):
        state = arrays(a=np.float32([1]))
        blob = ArrayBlob("float32", (1,), np.float32([7]).tobytes())
        other = {"optimizer": {"momentum": blob}, "optimizer_tree": {"step": 2}, "scaler": {"scale": 1.0}}

        def rank(world):
            check_before_saving(world, replace(state, **{part: other[part]}) if world.rank else state, 7)

        assert all(isinstance(error, DesyncError) for error in on_ranks(2, rank))

    def test_equal_bytes_of_another_type_or_shape_are_a_difference(self):
        other = {"a": ArrayBlob("int32", (1,), np.float32([1]).tobytes())}

        def rank(world):
            check_before_saving(world, replace(state(a=1), model=other) if world.rank else state(a=1), 7)

        assert all(isinstance(error, DesyncError) for error in on_ranks(2, rank))

    def test_ranks_that_differ_are_named_and_not_saved(self):
        def rank(world):
            check_before_saving(world, state(a=1, b=3 if world.rank == 2 else 2), 7)

        for holders in on_ranks(3, lambda world: check_before_saving(world, state(a=1), 7)):
            assert holders.writers == (0,)
        for error in on_ranks(3, rank):
            assert isinstance(error, DesyncError)
            assert "after step 7, which is therefore not saved: rank 2 against the others" in str(error)


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

    def test_an_overflow_of_the_sum_is_no_ranks_fault(self):
        guard = FiniteGuard(Health(), SingleRank(), scaler_skips=False)

        with pytest.raises(NumericError, match="because of an overflow in the sum over ranks"):
            guard.check(1, is_finite=False, loss=math.inf, local_loss=1e38)

    def test_a_step_in_which_nothing_is_counted_is_named(self):
        guard = FiniteGuard(Health(), SingleRank(), scaler_skips=False)

        with pytest.raises(NumericError, match="because of a count of 0") as caught:
            guard.check(1, is_finite=False, loss=math.nan, local_loss=0.0)
        assert "base_lr" not in caught.value.hint

    def test_skips_when_allowed_until_it_is_too_often(self):
        health = Health(non_finite="skip", max_skipped_steps=2)

        assert self.run(health, [math.nan, math.inf, 1.0, math.nan, math.nan]) == [None, None]
        assert all(isinstance(e, NumericError) for e in self.run(health, [math.nan] * 3))
        assert all(isinstance(e, NumericError) for e in self.run(health, [math.nan, 1.0, *[math.nan] * 3]))

    def test_says_for_how_many_steps_in_a_row(self):
        health = Health(non_finite="skip", max_skipped_steps=1)

        for error in self.run(health, [1.0, math.nan, math.nan]):
            assert error.hint.startswith("2 steps in a row could not be used: lower base_lr")
        for error in self.run(Health(), [1.0, math.nan]):
            assert (
                error.hint
                == "lower base_lr, set clip_grad_norm, or skip such steps with health.non_finite: skip"
            )

    def test_a_loss_scaler_may_look_for_its_scale(self):
        assert self.run(Health(), [-1.0, -1.0, 1.0], scaler=True) == [None, None]
        assert all(isinstance(e, NumericError) for e in self.run(Health(), [-1.0], scaler=False))

    def test_a_loss_scaler_is_no_excuse_for_a_loss_that_is_not_a_number(self):
        assert all(isinstance(e, NumericError) for e in self.run(Health(), [math.nan], scaler=True))


class TestJoining:
    QUICK = Health(stall_warning_s=0.3, stall_shutdown_s=0.6)

    @pytest.fixture(autouse=True)
    def looks_are_quick(self, monkeypatch):
        monkeypatch.setattr(watches_module, "INTERVAL_S", 0.05)
        monkeypatch.setattr(watches_module, "MIN_SHUTDOWN_S", 0.1)

    def join(self, takes_s, health=QUICK, until=lambda told, ended: False):
        """Return what is told, and why the rank ends, while it joins for so long, or until that is enough."""
        told, ended = [], []
        deadline = time.monotonic() + takes_s
        with JoinWatch(health, told.append, ended.append):
            while time.monotonic() < deadline and not until(told, ended):
                time.sleep(0.02)
        return told, ended

    def test_ranks_that_meet_soon_are_told_nothing(self):
        assert self.join(0.05) == ([], [])

    def test_a_rank_that_waits_says_so(self):
        told, ended = self.join(10, Health(stall_warning_s=0.3, stall_shutdown_s=60), lambda told, _: told)

        assert told[0].startswith(
            "this rank has waited for 0 s for the others to join: check that all were started"
        )
        assert ended == []

    def test_a_rank_that_waits_for_too_long_ends(self):
        told, ended = self.join(10, until=lambda _, ended: ended)

        assert len(told) == 1
        assert [error.cause for error in ended] == ["lost"]
        assert ended[0].message.startswith("this rank has waited for 1 s for the others to join; ended after")

    def test_who_reads_packages_from_a_slow_disk_is_waited_for(self, monkeypatch):
        monkeypatch.setattr(watches_module, "MIN_SHUTDOWN_S", 60)

        assert self.join(1.2)[1] == []


class TestPeers:
    """Ranks that watch each other over UDP; each is a thread here, and dies by not sending any more."""

    QUICK = Health(stall_warning_s=0.6, stall_shutdown_s=1.5)

    @pytest.fixture(autouse=True)
    def beats_are_quick(self, monkeypatch):
        monkeypatch.setattr(watches_module, "HEARTBEAT_INTERVAL_S", 0.1)

    def watch(self, size, die, waits=lambda rank: True, seconds=4.0):
        """Return what each rank is told, and why it ends; ``die(rank, watch)`` may do something to it."""

        def rank(world):
            told, ended = [], []
            world.waiting_since_s = time.monotonic() if waits(world.rank) else None
            world.waiting_in = Collective("horovod_train.bucket.0.3", 8 * 2**20, 0.0)
            watch = PeerWatch(world, self.QUICK, told.append, ended.append)
            die(world.rank, watch)
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline and not ended:
                time.sleep(0.05)
            watch.close()
            watch._socket.close()  # of the one that was silenced, too
            return told, ended

        return on_ranks(size, rank)

    def silence(self, rank, watch):
        """Rank 1 is frozen: it neither sends nor looks."""
        if rank == 1:
            watch._over.set()
            watch._thread.join()

    @pytest.mark.parametrize("size", [2, 4])
    def test_one_that_is_silent_is_named_and_then_ends_those_that_wait_for_it(self, size):
        found = self.watch(size, self.silence)

        watchdog_callbacks = [(1 + distance) % size for distance in range(1, min(2, size - 1) + 1)]
        for rank, (told, ended) in enumerate(found):
            if rank in watchdog_callbacks:
                assert len(told) == 1
                assert "rank 1 on here has shown no sign of life" in told[0]
                assert "this rank waits for it in horovod_train.bucket.0.3 (8.0 MiB)" in told[0]
                assert "rank 1 on here has shown no sign of life" in ended[0].message
            else:
                assert not told

    @pytest.mark.parametrize(("controller", "is_killed"), [("gloo", True), ("mpi", False)])
    def test_over_gloo_one_that_was_silent_for_too_long_is_killed(self, monkeypatch, controller, is_killed):
        killed, identities = [], {}
        monkeypatch.setenv("HOROVOD_CONTROLLER", controller)
        monkeypatch.setattr(watches_module, "own_identity", threading.get_ident)
        monkeypatch.setattr(watches_module, "kill", lambda identity: killed.append(identity) or True)

        def silence(rank, watch):
            identities[rank] = threading.get_ident()
            self.silence(rank, watch)

        (_, ended), _ = self.watch(2, silence)

        assert set(killed) == ({identities[1]} if is_killed else set())  # it would end at the first time
        assert ("s and was killed; ended after" in ended[0].message) == is_killed

    def test_one_that_comes_back_and_is_silent_again_is_named_again(self):
        told = []

        def rank(world):
            world.waiting_since_s = time.monotonic()
            warn = told.append if world.rank == 0 else print
            watch = PeerWatch(world, Health(stall_warning_s=0.6, stall_shutdown_s=60), warn, pytest.fail)
            send = watch._send
            for number in (1, 2):
                if world.rank == 1:
                    watch._send = lambda word: None
                wait_until(lambda: len(told) == number)  # noqa: B023  (called before the next)
                watch._send = send
                time.sleep(0.3)  # some beats
            watch.close()

        assert on_ranks(2, rank) == [None, None]
        assert len(told) == 2

    def test_nobody_is_missed_by_those_that_do_not_wait(self):
        assert self.watch(2, self.silence, waits=lambda rank: False, seconds=2.0)[0] == ([], [])

    def test_one_that_says_good_bye_is_not_missed(self):
        def leave(rank, watch):
            if rank == 1:
                watch.close()

        assert self.watch(3, leave, seconds=2.5) == [([], [])] * 3

    def test_as_long_as_all_live_nothing_is_said(self):
        assert self.watch(4, lambda rank, watch: None, seconds=2.5) == [([], [])] * 4

    def test_ranks_of_one_host_listen_on_loopback_only(self):
        def rank(world, hosts):
            world.host = hosts[world.rank]
            watch = PeerWatch(world, self.QUICK, print, print)
            address = watch._socket.getsockname()[0]
            watch.close()
            return address, watch._targets[0][0]

        assert on_ranks(2, lambda world: rank(world, "aa")) == [("127.0.0.1", ["127.0.0.1"])] * 2
        for address, others in on_ranks(2, lambda world: rank(world, "ab")):
            assert address == "0.0.0.0"  # noqa: S104
            assert not any(other.startswith("127.") for other in others)

    @pytest.mark.parametrize(("size", "watched"), [(2, [{1}, {0}]), (4, [{2, 3}, {3, 0}, {0, 1}, {1, 2}])])
    def test_two_before_it_are_watched_and_never_itself(self, size, watched):
        def rank(world):
            watch = PeerWatch(world, self.QUICK, print, print)
            watch.close()
            return set(watch._hosts), len(watch._targets)

        assert on_ranks(size, rank) == [(ranks, len(ranks)) for ranks in watched]

    def test_a_real_sign_of_life_behind_somebody_elses_is_heard(self):
        """Whatever else comes to the port first."""

        def shout(rank, watch):
            if rank == 1:
                place = watch._targets[0]
                for _ in range(200):
                    watch._socket.sendto(b"\xff not ours", (place[0][0], place[1]))

        assert self.watch(2, shout, seconds=2.5) == [([], [])] * 2

    def test_whoever_was_stopped_itself_hears_first_what_came_meanwhile(self, monkeypatch):
        """The others have sent, but this rank could not look."""

        def stop(rank, watch):
            if rank == 0:
                judge = watch._judge

                def late(now_s):
                    time.sleep(2.5)  # longer than anybody may be silent
                    watch._judge = judge

                watch._judge = late

        assert self.watch(2, stop, seconds=4.5)[0] == ([], [])

    def test_somebody_elses_datagrams_are_ignored(self):
        def shout(rank, watch):
            self.silence(rank, watch)
            if rank == 1:
                for address, port in watch._targets:
                    for data in (b"x", b"wrong 1 here", b"\xff" * 80, b"a b c d", b"wrong x y"):
                        watch._socket.sendto(data, (address[0], port))

        told, ended = self.watch(2, shout)[0]

        assert told
        assert ended


class TestTheDevice:
    """A GPU that stands still, as the host sees it: it waits, and knows in which phase the device is."""

    HEALTH = Health(stall_warning_s=0.3, stall_shutdown_s=1.0)

    @pytest.fixture(autouse=True)
    def looks_are_quick(self, monkeypatch):
        monkeypatch.setattr(watches_module, "INTERVAL_S", 0.1)
        monkeypatch.setattr(watches, "COURTESY_S", 0.3)

    def watch(self, blocking, phase, until=lambda told, ended: ended):
        told, ended = [], []
        world = ThreadCommunicator(0, Board(2))
        watch = DeviceWatch(world, self.HEALTH, told.append, ended.append)
        entry = phase if isinstance(phase, Collective) else DeviceWork(lambda: phase)
        deadline = time.monotonic() + 10

        def wait():
            while time.monotonic() < deadline and not until(told, ended):
                time.sleep(0.02)

        blocking(lambda: world.wait_in(entry, wait))
        watch.close()
        return told, ended

    def test_that_hangs_in_its_own_work_is_the_cause(self):
        told, ended = self.watch(lambda wait: wait(), "backward")

        assert len(told) == 1
        assert told[0].startswith("this rank's GPU has been in one step's backward for 0 s: a kernel hangs")
        assert isinstance(ended[0], GpuError)
        assert "ended after health.stall_shutdown_s" in ended[0].message

    def test_that_waits_for_another_one_is_not(self):
        told, ended = self.watch(lambda wait: wait(), "allreduce_wait")

        assert "this rank's GPU has waited in an all-reduce" in told[0]
        assert "another rank's GPU has not started it, or the network" in told[0]
        assert isinstance(ended[0], PeerError)
        assert ended[0].cause == "nccl"

    def test_that_waits_lets_the_cause_speak_first(self, monkeypatch):
        monkeypatch.setattr(watches, "COURTESY_S", 1000.0)
        end_s = time.monotonic() + 2.0

        assert self.watch(lambda wait: wait(), "allreduce_wait", lambda *_: time.monotonic() > end_s)[1] == []

    def test_that_gets_on_is_left_alone(self):
        def many_short_ones(wait):
            for _ in range(20):
                wait()

        assert self.watch(many_short_ones, "backward", lambda *_: time.sleep(0.08) is None) == ([], [])

    def test_is_not_what_a_collective_waits_for(self):
        """That is Horovod's stall inspector's business."""
        end_s = time.monotonic() + 1.5
        entry = Collective("horovod_train.bucket.0.3", 8, 0.0)

        assert self.watch(lambda wait: wait(), entry, lambda *_: time.monotonic() > end_s) == ([], [])
