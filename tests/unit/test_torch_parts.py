"""What the PyTorch framework is made of, one part at a time: devices, readers, states, cores, loaders."""

from __future__ import annotations

import itertools
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import types
from collections import namedtuple
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.torch_threads import on_torch_ranks
from torch import nn
from torch.utils._pytree import tree_leaves, tree_structure

from horovod_train.checkpoint.arrays import ArrayBlob
from horovod_train.collectives.base import SingleRank
from horovod_train.config.data import Data
from horovod_train.config.schema import Allreduce, Job
from horovod_train.data.shard import MicroBatch
from horovod_train.errors import UserError
from horovod_train.events.types import PairTime
from horovod_train.frameworks.reader import NumpyReader, start_loader_server
from horovod_train.frameworks.torch import framework as module
from horovod_train.frameworks.torch import task as reader_module
from horovod_train.frameworks.torch.comm import allreduce_benchmark as benchmark
from horovod_train.frameworks.torch.comm import collectives as collectives_module
from horovod_train.frameworks.torch.comm.collectives import (
    TorchCommunicator,
    share_cores,
    tensor_communicator,
)
from horovod_train.frameworks.torch.framework import (
    TorchFramework,
    choose_device,
    recompute_activations,
)
from horovod_train.frameworks.torch.state import local
from horovod_train.frameworks.torch.state.model import _scaler_state
from horovod_train.frameworks.torch.strategies.allreduce.strategy import SingleRankStrategy, make_allreduce
from horovod_train.frameworks.torch.task import Placement, TorchReader


def job(**sections):
    return Job.model_validate({"name": "j", "task": "digits", **sections})


class TestConnecting:
    @pytest.fixture
    def calls(self, monkeypatch):
        calls = []
        monkeypatch.setattr(module, "connect", lambda world, job: calls.append(("connect", world)))
        monkeypatch.setattr(module, "start_loader_server", lambda name: calls.append(("server", name)))
        monkeypatch.setattr(torch, "set_num_threads", lambda count: calls.append(("threads", count)))
        return calls

    def test_joins_the_ranks_and_does_nothing_else(self, calls):
        TorchFramework().connect(job())

        assert calls == [("connect", TorchCommunicator)]

    def test_has_as_many_threads_as_the_job_says(self, calls):
        TorchFramework().connect(job(launch={"threads_per_rank": 3}))

        assert ("threads", 3) in calls

    def test_starts_the_server_of_loader_processes_before_there_are_threads(self, calls):
        TorchFramework().connect(job(data={"num_workers": 1}))

        assert [name for name, _ in calls] == ["server", "connect"]
        assert calls[0][1] == reader_module.__name__


class TestTheLoaderServer:
    PROGRAM = """
import multiprocessing.forkserver as server
from horovod_train.frameworks.reader import start_loader_server
start_loader_server("json")
print(open(f"/proc/{server._forkserver._forkserver_pid}/status").read())
"""

    def test_and_its_loaders_block_the_signals_that_ask_ranks_to_leave(self):
        """Kubernetes and Slurm send them to all processes."""
        done = subprocess.run(
            [sys.executable, "-c", self.PROGRAM], stdout=subprocess.PIPE, check=True, text=True
        )

        (blocked,) = [
            int(line.split()[1], 16) for line in done.stdout.splitlines() if line.startswith("SigBlk")
        ]
        assert {number for number in signal.valid_signals() if blocked >> (number - 1) & 1} == {
            signal.SIGTERM,
            signal.SIGUSR1,
        }

    def test_is_refused_where_its_sockets_would_have_too_long_names(self, monkeypatch, tmp_path):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 70)))

        with pytest.raises(UserError, match="TMPDIR has .* bytes, and at most"):
            start_loader_server("json")


class TestCores:
    @pytest.mark.parametrize(("ranks", "threads"), [(1, 8), (2, 4), (3, 2), (16, 1)])
    def test_are_shared_by_the_ranks_of_a_host(self, monkeypatch, ranks, threads):
        taken = []
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
        monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
        monkeypatch.setattr(torch, "set_num_threads", taken.append)

        share_cores(ranks)

        assert taken == [threads]

    def test_never_become_more_than_torch_would_take(self, monkeypatch):
        taken = []
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
        monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
        monkeypatch.setattr(torch, "set_num_threads", taken.append)

        share_cores(1)

        assert taken == [3]


class TestDevices:
    def test_without_a_gpu_it_is_the_cpu(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)

        assert choose_device(job(), SingleRank()) == torch.device("cpu")

    def test_each_rank_of_a_host_has_a_gpu_of_its_own(self, monkeypatch):
        chosen = []
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)

        assert choose_device(job(), replace(SingleRank(), local_rank=1)) == torch.device("cuda", 1)
        assert chosen == [torch.device("cuda", 1)]


class TestGenerators:
    def test_all_three_are_seeded_and_restored(self):
        framework = TorchFramework()

        def drawn():
            return random.random(), float(np.random.rand()), float(torch.rand(()))

        framework.seed(3, 1, 2)
        tree, arrays = framework.rng_state()
        first = drawn()
        framework.seed(3, 1, 2)
        again = drawn()
        framework.load_rng_state(tree, arrays)

        assert drawn() == again == first

    @pytest.mark.parametrize("other", [(4, 1, 2), (3, 0, 2), (3, 1, 3)])
    def test_each_number_counts(self, other):
        framework = TorchFramework()
        framework.seed(3, 1, 2)
        first = random.random(), float(np.random.rand()), float(torch.rand(()))

        framework.seed(*other)

        second = random.random(), float(np.random.rand()), float(torch.rand(()))
        assert all(a != b for a, b in zip(first, second, strict=True))

    def test_all_ranks_differ(self):
        def drawn(rank):
            TorchFramework().seed(3, rank, 2)
            return random.random(), float(np.random.rand()), float(torch.rand(()))

        generators = zip(*(drawn(rank) for rank in range(50)), strict=True)

        assert [len(set(numbers)) for numbers in generators] == [50, 50, 50]


class TestRecomputedActivations:
    def test_of_modules_that_are_not_there_are_refused_with_those_there_are(self):
        model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(13)))

        with pytest.raises(UserError, match="'body' fits no module") as caught:
            recompute_activations(model, ["body"])

        assert caught.value.hint == f"modules are {', '.join(map(str, range(12)))}, ..."

    def test_are_those_of_the_outermost_module_that_fits(self):
        model = nn.Sequential(nn.Sequential(nn.Linear(1, 1)), nn.Linear(1, 1))

        recompute_activations(model, ["0*"])

        assert "forward" in vars(model[0])
        assert "forward" not in vars(model[0][0])
        assert "forward" not in vars(model[1])


class TestGradients:
    def test_of_nothing_are_refused(self):
        model = nn.Linear(1, 1).requires_grad_(requires_grad=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        with pytest.raises(UserError, match="the optimizer trains no parameter"):
            make_allreduce(SingleRank(), Allreduce()).bind(model, optimizer)

    def test_of_one_rank_need_no_exchange(self):
        assert isinstance(make_allreduce(SingleRank(), Allreduce()), SingleRankStrategy)


Pair = namedtuple("Pair", ["left", "right"])  # noqa: PYI024  (what tasks have)


class TestBatches:
    @pytest.mark.parametrize(
        "wrap",
        [
            lambda tensor: tensor,
            lambda tensor: {"x": tensor, "y": 3},
            lambda tensor: [tensor, "text"],
            lambda tensor: (tensor, None),
            lambda tensor: Pair(tensor, {"deep": [tensor]}),
        ],
    )
    def test_of_any_shape_go_to_the_device_and_keep_it(self, wrap):
        batch = wrap(torch.ones(2))

        moved = Placement(torch.device("meta")).put(batch)

        assert type(moved) is type(batch)
        assert tree_structure(moved) == tree_structure(batch)
        for before, after in zip(tree_leaves(batch), tree_leaves(moved), strict=True):
            is_tensor = isinstance(before, torch.Tensor)
            assert after.device.type == "meta" if is_tensor else after == before


class Counting:
    """A dataset that reads many samples at once, and tells which."""

    def __init__(self):
        self.asked = []

    def __len__(self):
        return 6

    def __getitem__(self, index):
        raise AssertionError("it would rather be asked for many")

    def __getitems__(self, indices):
        self.asked.append(list(indices))
        return [torch.tensor(float(index)) for index in indices]


class TestReading:
    def test_asks_for_many_samples_at_once_where_that_is_possible(self):
        dataset = Counting()
        reader = TorchReader(dataset, Data(), 0, Placement(torch.device("cpu")))
        micro_batches = [MicroBatch(0, 4, share=0.7), MicroBatch(4, 6, share=0.3)]

        found = list(reader.read(0, np.array([5, 4, 3, 2, 1, 0]), micro_batches))

        assert dataset.asked == [[5, 4, 3, 2], [1, 0]]
        assert [batch.tolist() for batch in found] == [[5, 4, 3, 2], [1, 0]]
        assert len(reader) == 6

    def test_of_a_dataset_that_joins_its_samples_itself_is_left_to_it(self):
        dataset = Counting()
        dataset.collate = lambda samples: {"sum": torch.stack(samples).sum()}
        reader = TorchReader(dataset, Data(), 0, Placement(torch.device("cpu")))

        (batch,) = reader.read(0, np.arange(6), [MicroBatch(0, 6, share=1.0)])

        assert batch == {"sum": torch.tensor(15.0)}
        assert reader.first() == {"sum": torch.tensor(0.0)}

    @pytest.mark.parametrize("kind", ["torch", "numpy"])
    def test_seeds_generators_for_samples_alone(self, kind):
        class Augmented(Counting):
            def __getitems__(self, indices):
                return [torch.tensor(random.random() + np.random.random()) for _ in indices]

        place = Placement(torch.device("cpu"))
        reader = (
            TorchReader(Augmented(), Data(), 0, place)
            if kind == "torch"
            else NumpyReader(Augmented(), Data(), 0)
        )
        random.seed(1)
        expected = [random.random() for _ in range(2)]
        random.seed(1)

        batches = reader.read(0, np.arange(6), [MicroBatch(0, 3, share=0.5), MicroBatch(3, 6, share=0.5)])

        # What a step draws is the user's own sequence, which the reader neither uses up nor sets back.
        assert [random.random() for _ in batches] == expected

    @pytest.mark.parametrize("error", [pickle.PicklingError, AttributeError, TypeError])
    def test_of_a_dataset_that_cannot_be_sent_is_explained(self, monkeypatch, error):
        reader = TorchReader(Counting(), Data(), 0, Placement(torch.device("cpu")))

        def refuse(loader):
            raise error("Can't pickle local object")

        monkeypatch.setattr(type(reader._loader), "__iter__", refuse)

        with pytest.raises(UserError, match="the dataset cannot be sent to loader processes") as caught:
            list(reader.read(0, np.arange(6), [MicroBatch(0, 6, share=1.0)]))

        assert "data.num_workers: 0" in caught.value.hint


class TestStates:
    def test_without_elements_have_a_shape_all_the_same(self):
        tensor = local.from_blob(ArrayBlob("float32", (0, 3), b""))

        assert (tensor.shape, tensor.dtype) == (torch.Size([0, 3]), torch.float32)

    @pytest.mark.parametrize("elements", [3, local.LARGE_PAGE_BYTES // 4, local.LARGE_PAGE_BYTES // 4 + 5])
    def test_copies_of_any_size_are_what_was_copied_and_stay_it(self, elements):
        tensor = torch.arange(elements, dtype=torch.float32).reshape(1, elements)
        kept = {}

        blob = local.blobs_of({"t": tensor}, kept, prefix="model.")["t"]
        expected = tensor.numpy().tobytes()
        tensor.zero_()

        assert bytes(blob.data) == expected
        assert (blob.dtype, blob.shape) == ("float32", (1, elements))

    def test_of_a_loss_scaler_have_whole_numbers_where_torch_wants_them(self):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=5)
        plain = {key: float(value) for key, value in scaler.state_dict().items()}

        found = _scaler_state(plain)

        assert found == scaler.state_dict()
        assert {key for key, value in found.items() if isinstance(value, int)} == {
            "growth_interval",
            "_growth_tracker",
        }


class TestTheBenchmarkWithMpi:
    class Communicator:
        """A world of one of MPI."""

        def __init__(self):
            self.barriers = itertools.count()

        def Allreduce(self, out, into):  # noqa: N802
            into[:] = out

        def Barrier(self):  # noqa: N802
            next(self.barriers)

    def test_is_told_beside_horovods(self, monkeypatch, capsys):
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
        monkeypatch.setattr(benchmark, "connect", lambda *_: SingleRank())
        monkeypatch.setattr(benchmark, "mpi_communicator", self.Communicator)
        monkeypatch.setattr(benchmark, "SIZES_BYTES", (1024,))
        monkeypatch.setattr(
            benchmark, "exchange_in_pairs", lambda *_: [PairTime(hosts=("a", "b"), seconds=0.1)]
        )

        benchmark.main()

        told = capsys.readouterr().out
        assert told.count('"via": "horovod"') == told.count('"via": "mpi4py"') == 1
        assert told.index('"pair_time"') < told.index('"benchmark_done"')

    def test_adds_up_as_many_bytes_as_it_says(self):
        seen = []
        communicator = types.SimpleNamespace(Allreduce=lambda out, into: seen.append((out, into)))

        add_up = benchmark.mpi_sum(communicator)
        for size in benchmark.SIZES_BYTES:
            add_up(size)

        assert [(out.nbytes, into.nbytes) for out, into in seen] == [
            (size, size) for size in benchmark.SIZES_BYTES
        ]
        assert all(out.dtype == into.dtype == np.float32 for out, into in seen)

    def test_through_horovod_adds_up_as_many(self):
        def rank(world):
            seen = []
            world.start_allreduce = lambda tensor, name: seen.append(tensor.numel() * tensor.element_size())
            world.wait = lambda handle: None
            add_up = benchmark.horovod_sum(world, torch.device("cpu"))
            for size in benchmark.SIZES_BYTES:
                add_up(size)
            return seen

        assert on_torch_ranks(2, rank) == [list(benchmark.SIZES_BYTES)] * 2


class TestTensorsOfRanks:
    def test_a_rank_alone_has_every_sum_already(self):
        ranks = tensor_communicator(SingleRank(host="here"))
        tensor = torch.arange(3.0)

        ranks.broadcast(tensor, "weights")

        assert ranks.wait(ranks.start_allreduce(tensor, "a")) is tensor
        assert ranks.wait(ranks.start_allgather(tensor, "b")) is tensor
        assert tensor.tolist() == [0, 1, 2]
        assert ranks.host == "here"

    def test_ranks_of_another_framework_are_refused(self):
        ranks = types.SimpleNamespace(size=2)

        with pytest.raises(TypeError, match="SimpleNamespace does not exchange PyTorch's tensors"):
            tensor_communicator(ranks)

    def test_one_of_two_ranks_of_a_host_computes_on_its_share_of_the_cores(self, monkeypatch):
        binding = types.SimpleNamespace(
            init=lambda: None, rank=lambda: 0, size=lambda: 2, local_rank=lambda: 0, local_size=lambda: 2
        )
        exceptions = types.SimpleNamespace(HorovodInternalError=RuntimeError)
        nothing = types.SimpleNamespace()
        for name, found in [
            ("", nothing),
            (".common", nothing),
            (".common.exceptions", exceptions),
            (".torch", binding),
        ]:
            monkeypatch.setitem(sys.modules, f"horovod{name}", found)
        shared = []
        monkeypatch.setattr(collectives_module, "share_cores", shared.append)
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

        TorchCommunicator({})
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        TorchCommunicator({})

        assert shared == [2]
