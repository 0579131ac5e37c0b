"""What a job may ask of a strategy, and what is refused before anything starts."""

from __future__ import annotations

import os
import socket
import types
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from programs.cases import Case
from support.torch_threads import on_torch_ranks, run_of
from torch import nn

from horovod_train.checkpoint.arrays import merge_trees
from horovod_train.collectives.base import Mesh, SingleRank
from horovod_train.config.arguments import axes_of
from horovod_train.config.rules import broken_rules
from horovod_train.config.schema import Job, Strategy
from horovod_train.config.support import Axes, strategy_support
from horovod_train.errors import CheckpointError, EngineError, UserError
from horovod_train.frameworks.torch.comm import groups
from horovod_train.frameworks.torch.comm.groups import choose_address
from horovod_train.frameworks.torch.sizes import units_of
from horovod_train.frameworks.torch.strategies.base import DevicePlacement, make_strategy
from horovod_train.frameworks.torch.strategies.ddp.strategy import TorchDistributed
from horovod_train.frameworks.torch.strategies.fsdp.strategy import Fsdp, num_ranks_of
from horovod_train.frameworks.torch.strategies.tensor_parallel.strategy import TensorParallel
from horovod_train.plugins.mesh.strategy import ShardedLayers
from horovod_train.plugins.pipeline.strategy import Pipeline
from horovod_train.registry import STRATEGIES


def problems(name, args=None, **job):
    fields = {"name": "j", "task": "digits", "strategy": {"name": name, "args": args or {}}, **job}
    return [str(problem) for problem in broken_rules(Job.model_validate(fields))]


@pytest.mark.parametrize("name", STRATEGIES.builtin)
def test_each_strategy_declares_its_arguments(name):
    assert strategy_support(name).arguments is not None


class TestArguments:
    @pytest.mark.parametrize(
        ("name", "args"),
        [
            ("pipeline", {}),
            (
                "pipeline",
                {
                    "pipeline_parallel_degree": 4,
                    "schedule": "interleaved",
                    "virtual_stages_per_rank": 2,
                    "balance": "time",
                },
            ),
            (
                "mesh",
                {
                    "tensor_parallel_degree": 2,
                    "shard_data_parallel": True,
                    "shard_ranks": "host",
                    "units": ["layers.*"],
                },
            ),
            ("mesh", {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2, "schedule": "gpipe"}),
            ("fsdp", {"shard_ranks": 4}),
            ("local_sgd", {"every_steps": 8, "outer": {}}),
            ("parameter_server", {"max_staleness": 0}),
            ("deepspeed", {}),
            ("deepspeed", {"stage": 3, "offload_optimizer": "nvme", "nvme_path": "/scratch"}),
            (
                "deepspeed",
                {"stage": 1, "offload_optimizer": "cpu", "zero_optimization": {"overlap_comm": False}},
            ),
        ],
    )
    def test_that_go_together_are_taken(self, name, args):
        assert problems(name, args) == []

    @pytest.mark.parametrize(
        ("name", "args", "said"),
        [
            ("pipeline", {"schedule": "interleaved"}, "interleaved needs at least 2"),
            (
                "pipeline",
                {"virtual_stages_per_rank": 2},
                "schedule: 1f1b and virtual_stages_per_rank: 2 do not go together",
            ),
            ("pipeline", {"schedule": "zb"}, "schedule"),
            (
                "mesh",
                {"pipeline_parallel_degree": 2, "shard_data_parallel": True},
                "shard_data_parallel: true needs",
            ),
            ("mesh", {"tensor_parallel_degree": 2, "units": ["a"]}, "units would have no effect"),
            ("mesh", {"tensor_parallel_degree": 2, "schedule": "gpipe"}, "schedule would have no effect"),
            ("fsdp", {"shard_ranks": 0}, "shard_ranks"),
            ("tensor_parallel", {"plan": {"a": "sideways"}}, "plan"),
            ("local_sgd", {"every_steps": 8, "outer": {"momentum": 1.0}}, "momentum"),
            ("parameter_server", {"max_staleness": -1}, "max_staleness"),
            ("deepspeed", {"stage": 0}, "stage"),
            ("deepspeed", {"zero_optimization": {"stage": 2}}, "stage is a separate field"),
            ("deepspeed", {"stage": 2, "offload_parameters": "cpu"}, "offload_parameters needs stage: 3"),
            (
                "deepspeed",
                {"stage": 2, "offload_optimizer": "nvme", "nvme_path": "/a"},
                "nvme needs stage: 3",
            ),
            ("deepspeed", {"offload_optimizer": "nvme"}, "nvme_path and offload_optimizer"),
            ("deepspeed", {"nvme_path": "/a"}, "nvme_path and offload_optimizer"),
            ("deepspeed", {"offload_parameters": "nvme"}, "offload_parameters"),
        ],
    )
    def test_that_do_not_are_refused_with_the_reason(self, name, args, said):
        (problem,) = problems(name, args)

        assert problem.lstrip().startswith("strategy.args")
        assert said in problem

    @pytest.mark.parametrize("name", sorted(STRATEGIES.builtin))
    def test_that_are_not_known_are_refused(self, name):
        args = {"every_steps": 2} if name == "local_sgd" else {}
        (problem,) = problems(name, {**args, "no_such": 1})

        assert "strategy.args.no_such" in problem


def test_ranks_are_arranged_as_the_strategy_says():
    def axes(name, args):
        return axes_of(Strategy(name=name, args=args), 8)

    assert axes("allreduce", {}) == Axes(8)
    assert axes("pipeline", {}) == Axes(1, pipeline=8)
    assert axes("pipeline", {"pipeline_parallel_degree": 2}) == Axes(4, pipeline=2)
    assert axes("tensor_parallel", {"tensor_parallel_degree": 4}) == Axes(2, tensor=4)
    assert axes("mesh", {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2}) == Axes(
        2, pipeline=2, tensor=2
    )


@pytest.mark.parametrize(
    ("args", "kind"),
    [
        ({}, TensorParallel),
        ({"shard_data_parallel": True}, ShardedLayers),
        ({"pipeline_parallel_degree": 2}, Pipeline),
    ],
)
def test_a_mesh_is_made_of_what_its_axes_are(args, kind):
    job = Job(name="j", task="digits", strategy=Strategy(name="mesh", args=args))
    axes = Axes(1, pipeline=args.get("pipeline_parallel_degree", 1))

    assert type(make_strategy(job, Mesh(SingleRank(), SingleRank(), axes))) is kind
    assert issubclass(ShardedLayers, Fsdp)


class TestDataParallel:
    FIELDS = Case("sgd").job("support.torch_threads:Task") | {"strategy": {"name": "data_parallel"}}

    def test_needs_two_gpus(self):
        with pytest.raises(UserError, match="this process sees 0"):
            run_of(SingleRank(), self.FIELDS)

    def test_is_one_process(self):
        for error in on_torch_ranks(2, lambda world: run_of(world, self.FIELDS)):
            assert "2 ranks were started" in str(error)


class TestHybridShards:
    @pytest.mark.parametrize(
        ("wanted", "hosts", "expected"),
        [(None, "aabb", 4), (2, "aaaa", 2), (4, "aaaa", 4), ("host", "aabb", 2), ("host", "aaaa", 4)],
    )
    def test_are_as_many_ranks_as_the_job_says(self, wanted, hosts, expected):
        assert num_ranks_of(wanted, len(hosts), list(hosts)) == expected

    @pytest.mark.parametrize(
        ("wanted", "hosts", "said"),
        [
            (3, "aaaa", "3 does not divide 4 ranks"),
            (8, "aaaa", "8 does not divide 4 ranks"),
            ("host", "aaab", "the same number of consecutive ranks: 3 on a, 1 on b"),
            ("host", "abab", "1 on a, 1 on b, 1 on a, 1 on b"),
        ],
    )
    def test_that_cannot_be_are_refused(self, wanted, hosts, said):
        with pytest.raises(UserError, match=said):
            num_ranks_of(wanted, len(hosts), list(hosts))


class TestTheAddressOfARank:
    def address(self, ip):
        return types.SimpleNamespace(family=socket.AF_INET, address=ip)

    @pytest.fixture(autouse=True)
    def interfaces(self, monkeypatch):
        found = {
            "lo": [self.address("127.0.0.1")],
            "eth0": [self.address("10.0.0.5")],
            "ib0": [self.address("10.1.0.5")],
            "down": [],
        }
        monkeypatch.setattr(groups.psutil, "net_if_addrs", lambda: found)
        monkeypatch.setattr(groups.socket, "gethostbyname", lambda _: "10.1.0.5")

    def test_is_loopback_on_one_machine(self):
        assert choose_address(["a", "a"], {}) == ("lo", "127.0.0.1")

    def test_is_that_of_the_host_name_on_several(self):
        assert choose_address(["a", "b"], {}) == ("ib0", "10.1.0.5")

    def test_is_the_first_other_where_the_name_stands_for_loopback(self, monkeypatch):
        monkeypatch.setattr(groups.socket, "gethostbyname", lambda _: "127.0.1.1")

        assert choose_address(["a", "b"], {}) == ("eth0", "10.0.0.5")

    @pytest.mark.parametrize("variable", ["GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE"])
    def test_is_the_launchs_if_it_has_chosen_one(self, variable):
        assert choose_address(["a", "a"], {variable: "eth0"}) == ("eth0", "10.0.0.5")

    def test_has_to_be_there(self):
        with pytest.raises(EngineError, match="down has no IPv4 address"):
            choose_address(["a"], {"GLOO_SOCKET_IFNAME": "down"})


class TestUnits:
    def test_are_the_members_of_lists_of_modules(self):
        layer = nn.TransformerEncoderLayer(8, 2, 16)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        model = nn.ModuleDict({"embed": nn.Embedding(4, 8), "encoder": encoder, "head": nn.Linear(8, 4)})

        assert sorted(units_of(model)) == ["encoder.layers.0", "encoder.layers.1"]

    def test_are_parts_of_a_model_without_lists(self):
        class Two(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.act, self.second = nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1)

        assert sorted(units_of(Two())) == ["first", "second"]  # and not what has no weights


@pytest.fixture
def process_groups():
    """PyTorch's may be started; it is ended, with what it has set."""
    with mock.patch.dict(os.environ):
        yield
        dist.destroy_process_group()


@pytest.mark.usefixtures("process_groups")
def test_what_is_trained_may_not_change_where_pytorch_sums():
    job = Job(name="j", task="digits", strategy=Strategy(name="ddp"))
    strategy = TorchDistributed(Mesh.data_parallel(SingleRank()), job)
    model = strategy.wrap(nn.Linear(2, 2), DevicePlacement(torch.device("cpu"), job.train))
    strategy.bind(model, torch.optim.SGD(model.parameters()))
    strategy.reduce(torch.zeros(()))
    model.bias.requires_grad_(requires_grad=False)

    with pytest.raises(UserError, match="strategy ddp: the set of trained parameters has changed"):
        strategy.reduce(torch.zeros(()))


@pytest.mark.parametrize(
    "trees", [({"lr": 1}, {"lr": 2}), ({"betas": [1, 2]}, {"betas": [1]}), ([1, {"a": 1}], [1, {"a": 2}])]
)
def test_ranks_whose_optimizers_differ_are_not_joined_into_one(trees):
    with pytest.raises(CheckpointError, match="different states of the optimizer"):
        merge_trees(trees)
