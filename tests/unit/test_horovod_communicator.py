"""Joining Horovod's ranks: what goes wrong is said, and what a user has set stays."""

from __future__ import annotations

import os
import sys
from types import ModuleType

import numpy as np
import pytest

from horovod_train.collectives.base import SingleRank
from horovod_train.collectives.horovod import HorovodCommunicator, connect
from horovod_train.config.schema import Job
from horovod_train.errors import EngineError, PeerError, UserError, WorldError
from horovod_train.horovod.mpi import started_by

ONE_OF_TWO = {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}


class LostError(Exception):
    """As Horovod's."""


class Binding(ModuleType):
    """One rank of a world of two in which the other one gives the same."""

    def __init__(self, fails=None):
        super().__init__("horovod.binding")
        self.fails = fails
        self.is_ready = False

    def init(self):
        if self.fails is not None:
            raise self.fails
        self.is_ready = True

    def shutdown(self):
        self.is_ready = False

    def is_initialized(self):
        return self.is_ready

    def rank(self):
        return 0

    def size(self):
        return 2

    def local_rank(self):
        return 0


class Communicator(HorovodCommunicator):
    BINDING = "binding"

    def allreduce_array(self, array, name):
        return array * 2

    def allgather_arrays(self, array, name):
        return np.concatenate([array, array])


@pytest.fixture
def installed(monkeypatch):
    """Make Horovod be there with a binding."""

    def install(fails=None):
        binding, exceptions = Binding(fails), ModuleType("horovod.common.exceptions")
        exceptions.HorovodInternalError = LostError
        for name, module in {
            "horovod": ModuleType("horovod"),
            "horovod.binding": binding,
            "horovod.common": ModuleType("horovod.common"),
            "horovod.common.exceptions": exceptions,
        }.items():
            monkeypatch.setitem(sys.modules, name, module)
        return binding

    return install


@pytest.fixture(autouse=True)
def environment_is_as_before():
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def test_an_engine_that_is_missing_is_said_with_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "horovod.binding", None)

    with pytest.raises(EngineError, match="Horovod for binding is missing") as caught:
        Communicator({})

    assert "engine build" in caught.value.hint


@pytest.mark.parametrize("fails", [RuntimeError("no MPI"), ValueError("no MPI")])
def test_an_engine_that_does_not_start_is_said(installed, fails):
    installed(fails)

    with pytest.raises(EngineError, match="Horovod cannot start: no MPI"):
        Communicator({})


def test_what_a_user_has_set_wins(installed, monkeypatch):
    installed()
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "7")

    Communicator({"HOROVOD_CYCLE_TIME": "1", "HOROVOD_FUSION_THRESHOLD": "0"})

    assert os.environ["HOROVOD_CYCLE_TIME"] == "7"
    assert os.environ["HOROVOD_FUSION_THRESHOLD"] == "0"


def test_a_process_alone_needs_no_engine(monkeypatch):
    monkeypatch.setitem(sys.modules, "horovod.binding", None)

    assert isinstance(connect(Communicator, environ={}), SingleRank)


TORCHRUN = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}
SRUN = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}


def test_processes_of_torchrun_do_not_train_side_by_side(monkeypatch):
    monkeypatch.setitem(sys.modules, "horovod.binding", None)

    with pytest.raises(UserError, match=r"torchrun .* as number 1 of 2 \(WORLD_SIZE\)") as caught:
        connect(Communicator, environ=TORCHRUN)

    assert "horovodrun -np 2" in caught.value.hint


def test_tasks_of_slurm_that_mpi_does_not_join_do_not_train_side_by_side(installed, monkeypatch):
    monkeypatch.setattr(installed(), "size", lambda: 1)

    with pytest.raises(UserError, match=r"srun .* as number 1 of 2 \(SLURM_STEP_NUM_TASKS\)"):
        connect(Communicator, environ=SRUN)


@pytest.mark.parametrize(
    "environ",
    [
        TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"},
        {"WORLD_SIZE": "2"},
        {"WORLD_SIZE": "many", "RANK": "0"},
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
    ],
)
def test_a_process_that_is_the_only_one_trains_alone(environ):
    assert isinstance(connect(Communicator, environ=environ), SingleRank)


def test_a_rank_of_horovod_alone_in_a_step_of_slurm_is_the_only_one():
    assert started_by({"HOROVOD_SIZE": "1", "HOROVOD_RANK": "0", **SRUN}) is None


@pytest.mark.parametrize("num_threads", [None, 3])
def test_a_job_says_with_how_many_threads_ranks_compute(installed, monkeypatch, num_threads):
    installed()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    job = Job(name="x", task="digits", launch={"threads_per_rank": num_threads})

    ranks = connect(Communicator, job, environ=ONE_OF_TWO)

    assert (ranks.rank, ranks.size, ranks.local_rank) == (0, 2, 0)
    assert os.environ.get("OMP_NUM_THREADS") == (None if num_threads is None else "3")


def test_a_script_joins_without_a_job(installed):
    installed()

    assert connect(Communicator, environ=ONE_OF_TWO).size == 2


@pytest.mark.parametrize("data", [b"", b"\0", b"some bytes" * 100])
def test_bytes_of_any_length_are_gathered(installed, data):
    installed()

    assert Communicator({}).allgather(data) == [data, data]


def test_numbers_are_summed_in_double_precision(installed):
    installed()

    assert Communicator({}).allreduce_sum([0.1, 2**53 + 2.0]) == [0.2, 2**54 + 4.0]


def test_the_world_is_left_once(installed):
    binding = installed()
    ranks = Communicator({})
    closed = []
    ranks.at_close.callback(lambda: closed.append(binding.is_ready))

    ranks.close()
    ranks.close()

    assert closed == [True]
    assert not binding.is_ready


@pytest.mark.parametrize(
    ("said", "error"),
    [("Mismatched data types", WorldError), ("a rank has left", PeerError)],
)
def test_what_horovod_raises_is_told_with_the_collective(installed, said, error):
    installed()
    ranks = Communicator({})

    def fails():
        raise LostError(said)

    with pytest.raises(error) as caught:
        ranks.call(fails, "the gradients", 12)

    assert said in str(caught.value)
    assert error is WorldError or "the gradients" in str(caught.value)
    assert ranks.waiting_in is None


def test_a_binding_has_to_say_how_it_handles_arrays(installed):
    installed()

    class Nothing(HorovodCommunicator):
        BINDING = "binding"

    with pytest.raises(NotImplementedError):
        Nothing({}).allreduce_sum([1.0])
    with pytest.raises(NotImplementedError):
        Nothing({}).allgather(b"")
