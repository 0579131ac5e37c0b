"""What ranks decide together before and while they train: are they alike, whose GPU, do they leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.worlds import on_ranks

from horovod_train import tasks
from horovod_train.collectives import base
from horovod_train.collectives.base import SingleRank
from horovod_train.config.launch import Launch
from horovod_train.config.load import load_job
from horovod_train.config.schema import Job, Train
from horovod_train.errors import UserError, WorldError
from horovod_train.frameworks import devices
from horovod_train.frameworks.devices import own_gpu, share_over_nccl
from horovod_train.health.comparisons import MAX_NAMED, check_clocks, check_fingerprints, check_world
from horovod_train.horovod.fingerprint import code_digest, environment_fingerprint, task_files
from horovod_train.training.hooks.base import MAX_STEPS_BETWEEN
from horovod_train.training.hooks.saving import PreemptionAgreement, PreemptionRequest

ENDS_SLOWLY = """
import sys, time
from horovod_train.training.hooks.saving import PreemptionRequest

class Slow:
    def __del__(self, write=sys.__stdout__.write, flush=sys.__stdout__.flush, sleep=time.sleep):
        write("ending\\n"), flush(), sleep(1)

slow = Slow()
PreemptionRequest().listen()
"""
HAS_ANOTHER_HANDLER = """
import atexit, signal
from horovod_train.training.hooks.saving import PreemptionRequest

atexit.register(lambda: print(*map(signal.getsignal, (signal.SIGTERM, signal.SIGUSR1))))
PreemptionRequest().listen()
signal.signal(signal.SIGTERM, signal.SIG_DFL)
"""
FACTS = {"python": "3.11.7", "torch version": "2.13.0"}


@pytest.mark.parametrize("lengths", [(0, 0, 0), (3, 0, 17), (8, 8, 8)])
def test_rank_0_gathers_what_is_large_in_pieces(monkeypatch, lengths):
    monkeypatch.setattr(base, "CHUNK_BYTES", 8)
    given = [bytes(range(rank, rank + length)) for rank, length in enumerate(lengths)]

    found = on_ranks(3, lambda world: base.gather_to_rank_0(world, given[world.rank]))

    assert found == [given, [], []]


class TestLeaving:
    def leave(self, size, asked_rank, asked_at, step_s=1.0, num_steps=500):
        """Return after which step each rank leaves; one rank is asked before one of its steps."""

        def train(world):
            request, now = PreemptionRequest(), [0.0]
            agreement = PreemptionAgreement(world, lambda: request.is_received, clock=lambda: now[0])
            for step in range(num_steps):
                if world.rank == asked_rank and step == asked_at:
                    request.is_received = True
                now[0] += step_s
                if agreement.reached():
                    return step
            return None

        return on_ranks(size, train)

    def test_one_rank_that_is_asked_takes_all_along_after_the_same_step(self):
        assert self.leave(3, asked_rank=1, asked_at=4) == [4, 4, 4]

    def test_a_wish_before_the_first_step_counts(self):
        assert self.leave(2, asked_rank=0, asked_at=0) == [0, 0]

    def test_nobody_leaves_unasked(self):
        assert self.leave(2, asked_rank=-1, asked_at=0, num_steps=20) == [None, None]

    def test_fast_steps_are_asked_after_about_half_a_second(self):
        (first, *_) = left = self.leave(2, asked_rank=0, asked_at=30, step_s=0.02)

        assert left == [first, first]
        assert 30 <= first <= 30 + 25

    def test_very_fast_steps_do_not_wait_for_ever(self):
        (first, _) = self.leave(2, asked_rank=0, asked_at=100, step_s=1e-6)

        assert 100 <= first <= 100 + MAX_STEPS_BETWEEN

    def test_a_quick_step_among_slow_ones_does_not_delay_it(self):
        """As batches come that were read ahead: each fifth step takes next to no time."""

        def rank(world):
            request, now = PreemptionRequest(), [0.0]
            agreement = PreemptionAgreement(world, lambda: request.is_received, clock=lambda: now[0])
            for step in range(1, 200):
                now[0] += 0.001 if step % 5 == 0 else 0.4
                request.is_received = step >= 20
                if agreement.reached():
                    return step
            return None

        assert on_ranks(2, rank) in ([20, 20], [21, 21], [22, 22])

    def test_one_rank_alone_leaves_at_once(self):
        request = PreemptionRequest()
        agreement = PreemptionAgreement(SingleRank(), lambda: request.is_received)

        assert not agreement.reached()
        request.is_received = True
        assert agreement.reached()

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
    def test_signals_are_noted(self, number):
        before = {sent: signal.getsignal(sent) for sent in (signal.SIGTERM, signal.SIGUSR1)}
        request = PreemptionRequest()
        request.listen()
        try:
            os.kill(os.getpid(), number)
            assert request.is_received
        finally:
            for sent, handler in before.items():
                signal.signal(sent, handler)

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
    def test_a_process_that_ends_anyway_is_not_killed_by_them(self, number):
        """Python hands signals back to the system while it ends; what it clears up last takes its time."""
        with subprocess.Popen(
            [sys.executable, "-c", ENDS_SLOWLY], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout.readline() == "ending\n"
            process.send_signal(number)

            assert process.wait(20) == 0

    def test_a_handler_of_the_user_is_left_as_it_is(self):
        done = subprocess.run(
            [sys.executable, "-c", HAS_ANOTHER_HANDLER], capture_output=True, text=True, check=True
        )

        assert done.stdout == f"{int(signal.SIG_DFL)} {int(signal.SIG_IGN)}\n"


class TestTruth:
    def test_ranks_that_are_alike_may_train(self):
        job = Job(name="j", task="digits")

        assert on_ranks(3, lambda world: check_world(job, world, FACTS)) == [None] * 3

    def test_a_world_of_another_size_is_refused(self):
        job = Job(name="j", task="digits", launch=Launch(num_ranks=4))

        for error in on_ranks(2, lambda world: check_world(job, world, FACTS)):
            assert "the job asks for 4 ranks, but this world has 2" in str(error)

    @pytest.mark.parametrize("size", [2, 3])
    def test_another_job_on_one_rank_is_named_on_all(self, size):
        def check(world):
            job = Job(name="j", task="digits", train=Train(seed=int(world.rank == size - 1)))
            check_world(job, world, FACTS)

        for error in on_ranks(size, check):
            assert isinstance(error, WorldError)
            assert "job: " in str(error)
            assert f"rank {size - 1} (here)" in str(error)

    @pytest.mark.parametrize("num_more", [0, 1, 2 * MAX_NAMED])
    def test_many_differences_are_counted(self, num_more):
        names = [f"package {number:02d}" for number in range(MAX_NAMED + num_more)]

        with pytest.raises(WorldError) as caught:
            check_fingerprints(["a", "b"], [dict.fromkeys(names, "1"), dict.fromkeys(names, "2")])

        assert (f"; and {num_more} more" in str(caught.value)) == (num_more > 0)
        assert str(caught.value).count(" on rank 0 (a)") == MAX_NAMED

    def test_another_version_on_one_rank_is_named_on_all(self):
        job = Job(name="j", task="digits")

        def check(world):
            check_world(job, world, {**FACTS, "torch version": f"2.{world.rank == 1:d}"})

        for error in on_ranks(3, check):
            assert isinstance(error, WorldError)
            assert "torch version: 2.0 on ranks 0, 2 (here); 2.1 on rank 1 (here)" in str(error)

    def test_values_ranks_and_hosts_are_named(self):
        old, new = {"torch version": "2.12"}, {"torch version": "2.13"}

        with pytest.raises(WorldError, match=r"torch version: 2.13 on ranks 0-1 \(a\); 2.12 on rank 2 \(b\)"):
            check_fingerprints(["a", "a", "b"], [new, new, old])

    def test_clocks_that_differ_are_refused(self):
        check_clocks(["a", "b"], [100.0, 104.9], 5)

        with pytest.raises(
            WorldError, match=r"the clock of b \(rank 1\) is 7.0 s ahead of that of a \(rank 0\)"
        ):
            check_clocks(["a", "b"], [100.0, 107.0], 5)

    def test_a_changed_task_changes_its_digest(self, tmp_path):
        (tmp_path / "task.py").write_text("class Task: ...")
        (tmp_path / "part").mkdir()
        (tmp_path / "part" / "__init__.py").write_text("")
        location = f"{tmp_path}/task.py:Task"
        before = environment_fingerprint(location)["task code"]
        (tmp_path / "part" / "__init__.py").write_text("WIDTH = 3")

        assert environment_fingerprint(location)["task code"] != before
        assert len(task_files(location)) == 2

    def test_a_task_in_a_module_is_all_of_its_package(self):
        files = task_files("horovod_train.tasks.digits:Digits")

        assert {file.name for file in files} >= {"digits.py", "worker.py"}
        assert task_files("no_such_module:Task") == []
        assert code_digest([]) != code_digest(files)


class TestGpus:
    def own(self, size, seen, job=None, names=None):
        """What each rank takes, given the GPUs each sees."""
        job = job or Job(name="j", task="digits")
        names = names or ["H100"] * size
        return on_ranks(
            size,
            lambda w: own_gpu(job, w, len(seen[w.rank]), lambda n: seen[w.rank][n], lambda _: names[w.rank]),
        )

    def test_everybody_sees_all_and_takes_its_own(self):
        assert self.own(2, [["u0", "u1"]] * 2) == [0, 1]

    def test_a_launcher_that_shows_each_rank_another_one_has_decided(self):
        assert self.own(3, [["u0"], ["u1"], ["u2"]]) == [0, 0, 0]

    def test_of_different_models_are_told(self, caplog):
        self.own(3, [["u0"], ["u1"], ["u2"]], names=["H100", "A100", "H100"])

        assert "ranks have different GPUs (H100 on ranks 0, 2; A100 on rank 1)" in caplog.text

    def test_of_one_model_are_not(self, caplog):
        self.own(2, [["u0"], ["u1"]])

        assert not caplog.text

    def test_none_is_the_cpu(self):
        assert self.own(2, [[], []]) == [None, None]

    def test_two_ranks_with_one_gpu_are_refused(self):
        errors = self.own(2, [["u0"], ["u0"]])

        assert errors[0] == 0
        assert isinstance(errors[1], UserError)
        assert "has no GPU: 1 found" in str(errors[1])

    def test_unless_they_are_to_share(self, monkeypatch):
        for variable in ("NCCL_HOSTID", "NCCL_SOCKET_IFNAME"):
            monkeypatch.setenv(variable, "as it was")  # and is afterwards
        job = Job(name="j", task="digits", launch=Launch(share_gpus=True))

        assert self.own(2, [["u0"], ["u0"]], job) == [0, 0]

    @pytest.mark.parametrize(("hosts", "interface"), [(1, "lo"), (2, None)])
    def test_those_that_share_are_hosts_of_their_own_to_nccl(self, hosts, interface, caplog):
        def rank(world):
            world.host, world.local_rank = f"h{world.rank % hosts}", world.rank // hosts
            environ = {}
            share_over_nccl(world, "u0" if world.rank < 2 * hosts else "u1", environ)
            return environ

        *sharing, alone = on_ranks(2 * hosts + 1, rank)

        assert len({environ["NCCL_HOSTID"] for environ in sharing}) == 2 * hosts
        assert [environ.get("NCCL_SOCKET_IFNAME") for environ in sharing] == [interface] * 2 * hosts
        assert alone == {}
        assert "share one GPU of h0" in caplog.text

    def test_parts_of_a_gpu_have_identities_of_their_own(self, monkeypatch):
        def get(device, number):
            device._obj.value = number
            return 0

        def uuid_of_the_whole(uuid, device):
            uuid._obj[:] = [7] * 16
            return 0

        def uuid_of_a_part(uuid, device):
            uuid._obj[:] = [device.value + 1] * 16
            return 0

        driver = SimpleNamespace(
            cuInit=lambda _: 0,
            cuDeviceGet=get,
            cuDeviceGetUuid=uuid_of_the_whole,
            cuDeviceGetUuid_v2=uuid_of_a_part,
        )
        monkeypatch.setattr(devices.ctypes, "CDLL", lambda _: driver)

        assert devices.gpu_uuid(0) == "01" * 16
        assert devices.gpu_uuid(1) == "02" * 16

    def test_the_example_trains_on_a_machine_with_one(self):
        """D5: `make train` failed there."""
        job = load_job(Path(tasks.__file__).parent / "digits.yaml")

        assert job.launch.num_ranks == 2
        assert self.own(2, [["u0", "u1"]] * 2, job) == [0, 1]
        assert self.own(2, [[], []], job) == [None, None]

    def test_the_example_shares_the_only_one(self, monkeypatch):
        for variable in ("NCCL_HOSTID", "NCCL_SOCKET_IFNAME"):
            monkeypatch.setenv(variable, "as it was")
        job = load_job(Path(tasks.__file__).parent / "digits.yaml")

        assert self.own(2, [["u0"], ["u0"]], job) == [0, 0]

    def test_a_host_without_gpus_among_others_is_named_on_all_ranks(self):
        for error in self.own(2, [["u0"], []]):
            assert isinstance(error, WorldError)
            assert "rank 1 on here found no GPU, the others did" in str(error)

    def test_gpus_that_were_asked_for_and_are_not_there(self):
        for error in self.own(2, [[], []], Job(name="j", task="digits", train=Train(device="cuda"))):
            assert "no GPU was found, and train.device is cuda" in str(error)
