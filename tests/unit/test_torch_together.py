"""PyTorch on several ranks, which are threads: the framework, its world and its exchanges as they are."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from programs.cases import CASES
from support.reference import joint_batch_weights
from support.torch_threads import Task, TorchThreads, on_torch_ranks, run_of, weights_of
from support.worlds import Board
from torch import nn

from horovod_train.collectives.base import CollectiveLog, Mesh, SingleRank
from horovod_train.config.data import Data
from horovod_train.config.schema import Health, Job
from horovod_train.data.shard import MicroBatch
from horovod_train.errors import LostError, PeerError, UserError, WorldError
from horovod_train.frameworks import devices as join_module
from horovod_train.frameworks.devices import join
from horovod_train.frameworks.reader import mix
from horovod_train.frameworks.torch.comm import allreduce_benchmark as benchmark
from horovod_train.frameworks.torch.comm.collectives import Exchange, TorchCommunicator
from horovod_train.frameworks.torch.framework import TorchFramework, optimizer_of
from horovod_train.frameworks.torch.step.replica import TorchReplica
from horovod_train.frameworks.torch.strategies.allreduce.strategy import AllreduceStrategy, make_allreduce
from horovod_train.frameworks.torch.task import Placement, TorchReader
from horovod_train.health.comparisons import fingerprints
from horovod_train.tasks.digits import Digits
from horovod_train.training.loop import evaluate, train

TASK = "support.torch_threads:Task"
pytestmark = pytest.mark.usefixtures("one_thread")
HERE = [case for case in CASES if case.compile is None]


def trained(case, size):
    """Train on ranks; return what each has in the end."""
    Task(**case.task_args).model()

    def rank(world):
        _, run = run_of(world, case.job(TASK))
        with torch.no_grad():
            for parameter in run.replica.model.parameters():
                parameter.add_(world.rank)  # a task that draws its weights on each rank
        run.replica.broadcast()
        train(run)
        return {
            "weights": weights_of(run.replica.model),
            "fingerprints": shared_fingerprints(run.replica.state(copy=False)),
            "metrics": evaluate(run),
        }

    return on_torch_ranks(size, rank)


def shared_fingerprints(state):
    """Of what all ranks have: where they share the optimizer's state, of the weights."""
    of_weights = {"model": state.model, "optimizer": {}, "optimizer_tree": None}
    return fingerprints(replace(state, **of_weights) if state.is_sharded else state)


@pytest.mark.parametrize(("num_data", "num_copies"), [(2, 2), (3, 2), (1, 2)])
def test_gradients_are_summed_over_the_ranks_that_share_the_samples_alone(num_data, num_copies):
    """As with tensor parallelism, where more ranks make a step than read different samples."""
    case = HERE[0]
    Task(**case.task_args).model()
    boards = [Board(num_data) for _ in range(num_copies)]

    def rank(world):
        place, copy = divmod(world.rank, num_copies)
        _, run = run_of(world, case.job(TASK), data=TorchThreads(place, boards[copy]))
        train(run)
        return weights_of(run.replica.model)

    found = on_torch_ranks(num_data * num_copies, rank)

    expected, _ = joint_batch_weights(case, num_data)
    for weights in found:
        assert float((weights - expected).abs().max()) <= case.tolerance


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("case", HERE, ids=lambda case: case.name)
def test_ranks_train_like_one_process_with_the_joint_batch(case, size):
    weights, metrics = joint_batch_weights(case, size)

    found = trained(case, size)

    assert float((found[0]["weights"] - weights).abs().max()) <= case.tolerance
    assert all(rank["fingerprints"] == found[0]["fingerprints"] for rank in found)
    if case.tolerance <= 1e-6:
        assert found[1]["metrics"]["accuracy"] == metrics["accuracy"]
        assert found[1]["metrics"]["loss"] == pytest.approx(metrics["loss"], abs=2e-6)


class TestTheWorld:
    def test_adds_up_and_gathers(self):
        def rank(world):
            return world.allreduce_sum([world.rank, 0.1]), world.allgather(b"x" * world.rank)

        for total, gathered in on_torch_ranks(3, rank):
            assert total == [3.0, pytest.approx(0.3, abs=1e-15)]
            assert gathered == [b"", b"x", b"xx"]

    def test_adds_up_complex_numbers(self):
        def rank(world):
            tensor = torch.tensor([1 + 2j, world.rank * 1j])
            world.wait(world.start_allreduce(tensor, "t"))
            return tensor.tolist()

        assert on_torch_ranks(2, rank) == [[2 + 4j, 1j]] * 2

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.int64, torch.complex64])
    def test_broadcasts_any_type_also_where_it_lies_in_steps(self, dtype):
        def rank(world):
            tensor = torch.full((2, 3), world.rank + 1).to(dtype).t()
            world.broadcast(tensor, "t")
            return tensor.tolist()

        (expected,) = on_torch_ranks(1, rank)
        assert on_torch_ranks(3, rank) == [expected] * 3

    def test_knows_since_when_it_waits(self):
        def rank(world):
            seen = []
            world.call(lambda: seen.append((world.waiting_since_s, str(world.waiting_in))), "t", 2**20)
            return seen[0], world.waiting_since_s, world.waiting_in

        ((during, *after),) = on_torch_ranks(1, rank)
        assert during[0] > 0
        assert during[1] == "t (1.0 MiB)"
        assert after == [None, None]

    def test_remembers_its_last_collectives(self):
        """What has begun and not ended is what a rank is stuck in."""

        def rank(world):
            world.allreduce_sum([1.0, 2.0])
            first = world.start_allreduce(torch.zeros(4), "a")
            world.start_allgather(torch.zeros(2, dtype=torch.uint8), "b")
            world.wait(first)
            world.broadcast(torch.zeros(3), "c")
            return world.log.entries()

        for entries in on_torch_ranks(2, rank):
            assert [(entry.name.rpartition(".")[2], entry.size_bytes) for entry in entries] == [
                ("allreduce_sum", 16),
                ("a", 16),
                ("b", 2),
                ("c", 12),
            ]
            ended = [entry.ended_s for entry in entries]
            assert ended[2] is None
            assert entries[0].begun_s <= ended[0] <= entries[1].begun_s <= ended[1] <= ended[3]

    def test_forgets_the_oldest_ones(self):
        log = CollectiveLog(length=3)
        for number in range(5):
            log.begin(str(number), 1)

        assert [entry.name for entry in log.entries()] == ["2", "3", "4"]

    @pytest.mark.parametrize(
        ("said", "kind", "expected"),
        [
            ("Mismatched allreduce tensor shapes", WorldError, "models and code must be the same"),
            (
                "Horovod has been shut down",
                PeerError,
                "another rank exited, in horovod_train.bucket.0.3 (8.0 MiB): ",
            ),
        ],
    )
    def test_explains_what_a_collective_raises(self, said, kind, expected):
        def rank(world):
            world.lost = (RuntimeError,)

            def collective():
                raise RuntimeError(said)

            world.call(collective, "horovod_train.bucket.0.3", 8 * 2**20)

        (error,) = on_torch_ranks(1, rank)
        assert isinstance(error, kind)
        assert expected in str(error)

    def test_can_be_left_twice(self):
        def rank(world):
            world.close()
            world.close()
            return world.hvd.is_initialized()

        assert on_torch_ranks(2, rank) == [False, False]


STARTED = {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}


class TestJoining:
    """From a script of the user's own: there may be nobody else who looks after the ranks."""

    @pytest.fixture
    def watches(self, monkeypatch):
        """Those that were made; and what there is to join is a world of threads."""
        watches = []

        class Watch:
            def __init__(self, world, health, warn, end):
                self.world, self.health, self.is_closed = world, health, False
                watches.append(self)

            def close(self):
                self.is_closed = True

        monkeypatch.setattr(join_module, "PeerWatch", Watch)
        monkeypatch.setattr(join_module, "connect", lambda *_: TorchThreads(0, Board(2)))
        monkeypatch.setattr(join_module, "_joined", {})
        return watches

    def test_ranks_look_after_each_other_until_they_leave(self, watches):
        health = Health(stall_warning_s=7)

        world = join(TorchCommunicator, Job(name="j", task="own:Loop", health=health), STARTED)

        (watch,) = watches
        assert (watch.world, watch.health, watch.is_closed) == (world, health, False)
        world.close()
        assert watch.is_closed

    def test_a_second_time_it_is_the_same_world_until_that_is_left(self, watches):
        world = join(TorchCommunicator, None, STARTED)

        assert join(TorchCommunicator, None, STARTED) is world
        assert len(watches) == 1
        world.close()
        again = join(TorchCommunicator, None, STARTED)
        assert again is not world
        assert len(watches) == 2
        again.close()

    def test_after_horovod_was_shut_down_it_is_another_one(self, watches):
        world = join(TorchCommunicator, None, STARTED)
        world.hvd.shutdown()

        again = join(TorchCommunicator, None, STARTED)

        assert again is not world
        assert [watch.is_closed for watch in watches] == [True, False]
        assert join(TorchCommunicator, None, STARTED) is again
        again.close()

    def test_where_a_launch_looks_after_them_they_need_not(self, watches):
        join(TorchCommunicator, None, {**STARTED, "HOROVOD_TRAIN_RUN": "/somewhere"}).close()

        assert watches == []

    def test_alone_there_is_nobody_to_join(self, watches):
        assert isinstance(join(TorchCommunicator, None, {}), SingleRank)
        assert watches == []

    def test_a_script_that_ends_is_not_missed(self, watches, monkeypatch):
        at_exit = []
        monkeypatch.setattr(join_module.atexit, "register", at_exit.append)
        join(TorchCommunicator, None, STARTED)

        (end,) = at_exit
        end()

        assert watches[0].is_closed

    def test_one_that_waits_for_too_long_ends_with_the_code_of_lost_ranks(self, monkeypatch, caplog):
        codes = []
        monkeypatch.setattr(join_module.os, "_exit", codes.append)

        join_module._end(LostError("rank 1 on here has shown no sign of life for 600 s"))

        assert codes == [LostError.exit_code]
        assert "rank 1 on here has shown no sign of life for 600 s" in caplog.text


class TestTheReplica:
    def replica(self, world, model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        job = Job(name="j", task="digits")
        strategy = make_allreduce(world, job.allreduce)
        strategy.bind(model, optimizer)
        return TorchReplica(
            model=model,
            optimizer=optimizer,
            strategy=strategy,
            data_ranks=world,
            train=job.train,
        )

    def test_of_another_model_on_one_rank_is_refused_by_name(self):
        def rank(world):
            self.replica(world, nn.Linear(2, 2 + (world.rank == 1))).broadcast()

        for error in on_torch_ranks(3, rank):
            assert isinstance(error, UserError)
            assert "have different models: [" in str(error)
            assert "'bias (2,) torch.float32', 'bias (3,) torch.float32'" in str(error)

    def test_averages_running_statistics_and_leaves_equal_buffers_alone(self):
        def rank(world):
            model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
            model.register_buffer("own", torch.tensor([5], dtype=torch.bfloat16))
            model[1].running_mean.fill_(float(world.rank))
            replica = self.replica(world, model)
            replica.sync_buffers()
            return model[1].running_mean.tolist(), model.own.tolist()

        assert on_torch_ranks(3, rank) == [([1.0, 1.0], [5.0])] * 3

    def test_sizes_of_buckets_are_the_jobs(self):
        def rank(world):
            replica = self.replica(world, nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))))
            assert isinstance(replica.strategy, AllreduceStrategy)
            return len(replica.strategy.pipeline.buckets)

        assert on_torch_ranks(2, rank) == [2, 2]  # 16 MiB, and biases, in buckets of 8

    def test_is_evaluated_without_dropout(self):
        model = nn.Sequential(nn.Dropout(0.5))
        model.register_parameter("weight", nn.Parameter(torch.zeros(1)))
        replica = self.replica(SingleRank(), model)

        class KeptTask:
            def metrics(self, model, batch):
                return {"kept": model(batch)}

        replica.task = KeptTask()

        assert replica.evaluate([(MicroBatch(0, 64, 0.0), torch.ones(64))]) == {"kept": (64.0, 64)}


class TestTheExchange:
    @pytest.mark.parametrize(("wire_dtype", "total"), [(torch.float32, 2 + 2**-11), (torch.float16, 2.0)])
    def test_rounds_on_the_wire_only_when_it_is_told_to(self, wire_dtype, total):
        def rank(world):
            exchange = Exchange(world, wire_dtype=wire_dtype)
            return [float(summed) for summed in exchange.sum([torch.tensor(1 + 2**-12), torch.ones(())])]

        assert on_torch_ranks(2, rank) == [[total, 2.0]] * 2

    def test_sums_each_type_in_few_pieces(self):
        def rank(world):
            exchange = Exchange(world, bucket_size_bytes=64)
            tensors = [
                torch.full((3,), 1.0 + world.rank),
                torch.full((2, 2), 2.0, dtype=torch.float64),
                torch.full((40,), 0.5),
                torch.full((5,), 1.0, dtype=torch.bfloat16),
                torch.sparse_coo_tensor([[1]], [3.0], (4,), check_invariants=False),
            ]
            return [t.tolist() for t in exchange.sum(tensors)], exchange.seconds >= 0

        expected = [[3.0] * 3, [[4.0] * 2] * 2, [1.0] * 40, [2.0] * 5, [0.0, 6.0, 0.0, 0.0]]
        assert on_torch_ranks(2, rank) == [(expected, True)] * 2

    def test_means_are_sums_divided_by_the_ranks(self):
        def rank(world):
            return [t.tolist() for t in Exchange(world).mean([torch.tensor([3.0 * world.rank])])]

        assert on_torch_ranks(3, rank) == [[[3.0]]] * 3

    def test_counts_what_a_rank_gives_away(self):
        tensors = [torch.zeros(4), torch.zeros(2, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.float64)]

        def rank(world):
            return [
                Exchange(world).bytes_on_wire(tensors),
                Exchange(world, wire_dtype=torch.float16).bytes_on_wire(tensors),
            ]

        assert on_torch_ranks(2, rank) == [[16 + 8 + 8, 8 + 8 + 8]] * 2
        assert Exchange(SingleRank()).bytes_on_wire(tensors) == 0

    def test_alone_is_what_it_was(self):
        tensors = [torch.ones(2)]

        assert Exchange(SingleRank()).sum(tensors)[0] is tensors[0]
        assert Exchange(SingleRank()).mean(tensors)[0].tolist() == [1.0, 1.0]


class TestTheBenchmark:
    @pytest.fixture(autouse=True)
    def short(self, monkeypatch):
        monkeypatch.setattr(benchmark, "SIZES_BYTES", (1024, 4096))
        monkeypatch.setattr(benchmark, "SECONDS_PER_SIZE", 0.001)

    def test_takes_the_median_of_the_slowest_ranks_times(self, monkeypatch):
        clocks = {}

        def rank(world):
            calls = []

            def add_up(size):
                calls.append(size)
                clocks[world.rank] = clocks.get(world.rank, 0.0) + (0.002 if world.rank else 0.001)

            monkeypatch.setattr(benchmark, "perf_counter", lambda: clocks.get(world.rank, 0.0))
            return benchmark.measure(world, "horovod", add_up), calls

        ((rows, calls),) = on_torch_ranks(1, rank)

        assert [row.size_bytes for row in rows] == [1024, 4096]
        assert [row.seconds for row in rows] == [pytest.approx(0.001)] * 2
        assert calls == [1024] * 5 + [4096] * 5  # one to connect, one to estimate, three rounds

    def test_gives_bandwidth_as_a_ring_moves_it(self):
        def rank(world):
            rows = benchmark.measure(world, "horovod", benchmark.horovod_sum(world, torch.device("cpu")))
            assert all(
                world.hvd._counts[f"allreduce_benchmark.cpu.{size}"] >= 5 for size in benchmark.SIZES_BYTES
            )
            return rows

        for rows in on_torch_ranks(4, rank):
            for row in rows:
                moved = row.seconds * row.bytes_per_s
                assert moved == pytest.approx(row.size_bytes * 2 * 3 / 4)

    def test_times_each_pair_of_hosts_once_while_the_others_wait(self):
        exchanged = []

        class Communicator:
            def __init__(self, rank):
                self.rank = rank

            def Barrier(self):  # noqa: N802
                exchanged.append((self.rank, "waits"))

            def Sendrecv(self, _out, other, recvbuf, source):  # noqa: N802
                assert other == source
                assert recvbuf.nbytes == benchmark.PAIR_BYTES
                exchanged.append((self.rank, other))

        def rank(world):
            world.host = "abca"[world.rank]
            return benchmark.exchange_in_pairs(world, Communicator(world.rank))

        for pairs in on_torch_ranks(4, rank):
            assert [pair.hosts for pair in pairs] == [("a", "b"), ("a", "c"), ("b", "c")]
        for pair in ((0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)):
            assert exchanged.count(pair) == benchmark.PAIR_ROUNDS
        assert exchanged.count((3, "waits")) == 3
        assert not any(rank == 3 and other != "waits" for rank, other in exchanged)

    def test_tells_what_it_has_measured_once(self, monkeypatch, capsys):
        def rank(world):
            return world

        (world,) = on_torch_ranks(1, rank)
        monkeypatch.setattr(type(world.hvd), "mpi_enabled", lambda _: False)  # as over Gloo
        monkeypatch.setattr(benchmark, "connect", lambda *_: world)
        benchmark.main()

        lines = capsys.readouterr().out.splitlines()
        assert [line.count('"kind": "allreduce_time"') for line in lines] == [1, 1, 0]
        assert '"kind": "benchmark_done"' in lines[-1]
        assert not world.hvd.is_initialized()


class TestThePartsOfAJob:
    def test_are_drawn_from_the_jobs_seed_alone(self):
        def drawn():
            job = Job.model_validate({"name": "j", "task": "digits", "train": {"seed": 3}})
            replica, _, _ = TorchFramework().prepare(job, Mesh.data_parallel(SingleRank()))
            return torch.cat([p.detach().flatten() for p in replica.model.parameters()])

        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        first = drawn()
        # Rank 0's, before any step: what the job's first checkpoint could be made from again.
        torch.manual_seed(mix(3, 0, 0))
        expected = Digits().model()

        assert torch.equal(drawn(), first)
        assert torch.equal(torch.cat([p.detach().flatten() for p in expected.parameters()]), first)

    def test_are_deterministic_if_the_job_says_so(self, monkeypatch):
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "x")
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
        job = Job.model_validate({"name": "j", "task": "digits", "train": {"deterministic": True}})
        try:
            TorchFramework().prepare(job, Mesh.data_parallel(SingleRank()))

            assert torch.are_deterministic_algorithms_enabled()
            assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        finally:
            torch.use_deterministic_algorithms(False)
            monkeypatch.undo()

    def test_an_optimizer_that_is_none_is_refused(self, monkeypatch):
        job = Job.model_validate({"name": "j", "task": "digits", "optimizer": {"name": "builtins:dict"}})
        monkeypatch.setattr(
            "horovod_train.frameworks.torch.state.optimizer.make_optimizer",
            lambda *_: {"not": "an optimizer"},
        )

        with pytest.raises(UserError, match="is a dict, not a torch optimizer"):
            optimizer_of(job, object(), nn.Linear(1, 1), 1)

    def test_a_parameter_in_two_groups_is_named(self):
        class Task:
            def param_groups(self, model):
                return [{"params": model.parameters()}, {"params": [model.bias]}]

        job = Job.model_validate({"name": "j", "task": "digits"})

        with pytest.raises(UserError, match="returns 'bias' twice"):
            optimizer_of(job, Task(), nn.Linear(1, 1), 1)

    def test_augmentation_depends_on_the_sample_and_not_on_who_reads_it(self):
        class Noisy:
            def __len__(self):
                return 6

            def __getitem__(self, index):
                return float(torch.rand(())) + index

        def read(batches):
            reader = TorchReader(Noisy(), Data(), 4, Placement(torch.device("cpu")))
            order = np.arange(6)
            return torch.cat(list(reader.read(1, order, [MicroBatch(a, b, share=0.0) for a, b in batches])))

        before = torch.get_rng_state()
        first, again = read([(0, 3), (3, 6)]), read([(0, 3), (3, 6)])

        assert torch.equal(first, again)
        assert torch.equal(torch.get_rng_state(), before), "a task's own generator is left alone"
        assert len(set((first % 1).tolist())) == 6
        assert torch.equal(read([(3, 6)]), first[3:])

    def test_the_first_sample_is_a_batch_of_its_own(self):
        data = torch.utils.data.TensorDataset(torch.arange(4.0))
        (first,) = TorchReader(data, Data(), 0, Placement(torch.device("cpu"))).first()

        assert first.tolist() == [0.0]
