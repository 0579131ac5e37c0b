"""What is set for a GPU by itself, and how data gets there."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from horovod_train.collectives.base import SingleRank
from horovod_train.config.data import Data
from horovod_train.config.rules import broken_rules
from horovod_train.config.schema import Job
from horovod_train.errors import UnknownNameError, UserError, WorldError
from horovod_train.frameworks.torch.codecs import fp32
from horovod_train.frameworks.torch.comm.buckets import make_buckets
from horovod_train.frameworks.torch.comm.collectives import let_stream_follow
from horovod_train.frameworks.torch.framework import choose_device, compiled, placement, set_global_options
from horovod_train.frameworks.torch.state.optimizer import is_fused_by_default, optimizer_over
from horovod_train.frameworks.torch.strategies.base import DevicePlacement
from horovod_train.frameworks.torch.task import Placement, TorchReader
from horovod_train.horovod.environment import horovod_settings

CPU = torch.device("cpu")


def job(**fields):
    return Job.model_validate({"name": "j", "task": "own:Task", **fields})


def parameter(*, is_cuda=True, is_real=True):
    return SimpleNamespace(is_cuda=is_cuda, is_floating_point=lambda: is_real)


class TestFusedOptimizers:
    @pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
    def test_are_chosen_on_a_gpu(self, kind):
        assert is_fused_by_default(kind, {"weight_decay": 0.1}, [parameter(), parameter()])
        assert is_fused_by_default(kind, {}, [{"params": [parameter()], "lr_scale": 0.1}])
        assert is_fused_by_default(kind, {}, [("weight", parameter())])

    @pytest.mark.parametrize(
        ("kind", "args", "groups"),
        [
            (torch.optim.SGD, {}, [parameter(is_cuda=False)]),
            (torch.optim.SGD, {}, [parameter(), parameter(is_real=False)]),
            (torch.optim.SGD, {"dampening": 0.1}, [parameter()]),
            (torch.optim.SGD, {}, [{"params": [parameter()], "dampening": 0.1}]),
            (torch.optim.SGD, {}, [{"params": [parameter()], "foreach": True}]),
            (torch.optim.AdamW, {"fused": False}, [parameter()]),
            (torch.optim.AdamW, {"foreach": True}, [parameter()]),
            (torch.optim.AdamW, {"capturable": True}, [parameter()]),
            (torch.optim.Adagrad, {}, [parameter()]),
            (torch.optim.RMSprop, {}, [parameter()]),
            (torch.optim.AdamW, {}, []),
        ],
    )
    def test_are_not_chosen_where_they_do_something_else_or_were_decided_on(self, kind, args, groups):
        assert not is_fused_by_default(kind, args, groups)

    def test_are_not_chosen_on_a_cpu(self):
        made = optimizer_over(job(optimizer={"name": "adamw"}), nn.Linear(2, 2).parameters(), 1)

        assert not made.param_groups[0]["fused"]

    def test_are_asked_of_groups_that_can_be_read_once(self):
        model = nn.Linear(2, 2)
        groups = ({"params": (p for p in [each])} for each in model.parameters())
        made = optimizer_over(job(), groups, 1)

        assert [len(group["params"]) for group in made.param_groups] == [1, 1]

    def test_are_what_a_job_asks_for(self):
        args = {"name": "adamw", "args": {"fused": True}}

        assert optimizer_over(job(optimizer=args), nn.Linear(2, 2).parameters(), 1).param_groups[0]["fused"]


def test_matrix_products_have_the_precision_of_the_job():
    before = torch.get_float32_matmul_precision()
    try:
        set_global_options(job(train={"matmul_precision": "high"}))
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    set_global_options(job())
    assert torch.get_float32_matmul_precision() == "highest"


class TestChannelsLast:
    def net(self):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return nn.Sequential(
                nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.Flatten(), nn.Linear(8, 2)
            )

    def test_is_the_layout_of_model_and_images(self):
        train = job(train={"channels_last": True}).train
        model = DevicePlacement(CPU, train)(self.net())
        images, labels = placement(CPU, train).put((torch.randn(5, 3, 6, 6), torch.zeros(5, 2)))

        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert labels.is_contiguous()

    def test_gradients_lie_as_the_weights_do(self):
        """Optimizers with one kernel for all weights refuse anything else."""
        model = DevicePlacement(CPU, job(train={"channels_last": True}).train)(self.net())
        named = dict(model.named_parameters())

        for bucket in make_buckets(named, 2**20, fp32().message, len(named) + 2):
            for slot in bucket.slots:
                assert slot.gradient.stride() == slot.parameter.stride()
                slot.packed.copy_(torch.arange(slot.parameter.numel()).view(slot.parameter.shape))
                assert torch.equal(
                    slot.gradient.flatten(), torch.arange(slot.parameter.numel(), dtype=torch.float32)
                )

    def test_steps_are_the_same_numbers(self):
        weights = []
        images = torch.randn(5, 3, 6, 6, generator=torch.Generator().manual_seed(1))
        for channels_last in (False, True):
            train = job(train={"channels_last": channels_last}).train
            model = DevicePlacement(CPU, train)(copy.deepcopy(self.net()))
            made = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
            for _ in range(3):
                made.zero_grad()
                model(placement(CPU, train).put(images)).square().mean().backward()
                made.step()
            weights.append([p.detach().contiguous() for p in model.parameters()])

        for found, wanted in zip(weights[1], weights[0], strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)

    def test_cannot_be_had_with_a_codec_that_remembers(self):
        (problem,) = broken_rules(
            job(train={"channels_last": True}, allreduce={"codec": {"name": "top-k", "args": {"keep": 0.1}}})
        )

        assert problem.path == "train.channels_last"


def test_a_compiler_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(UnknownNameError, match=r"'induktor'; known: .*aot_eager.*inductor") as raised:
        compiled(nn.Linear(2, 2), job(train={"compile": {"backend": "induktor"}}).train.compile)

    assert raised.value.hint == "did you mean 'inductor'?"


def test_a_gpu_that_is_asked_of_a_pytorch_for_cpus_is_told_as_that(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)

    with pytest.raises(WorldError, match="no GPU was found, and train.device is cuda") as raised:
        choose_device(job(train={"device": "cuda"}), SingleRank())

    assert "is built for CPUs alone: install one with CUDA" in raised.value.hint


@pytest.mark.parametrize(("current", "waits"), [("side", ["default"]), ("default", [])])
def test_work_on_a_stream_of_ones_own_comes_after_what_horovod_has_queued(monkeypatch, current, waits):
    """Horovod's callback runs in a thread of its own, and tells that thread's stream: the default one."""

    class Stream(str):
        __slots__ = ()

        def wait_stream(self, other):
            waited.append(str(other))

    waited = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream(current))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda _: Stream("default"))

    let_stream_follow(SimpleNamespace(is_cuda=True, device="cuda:0"))
    let_stream_follow(torch.zeros(1))

    assert waited == waits


class TestDataThatIsOnTheDevice:
    """D14: pinning it was a traceback."""

    def test_stays_there_and_the_rest_is_pinned(self, monkeypatch):
        pinned = []
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self.device.type) or self)
        there = Placement(torch.device("meta"))
        batch = there.put({"a": torch.ones(2), "b": [torch.ones(3, device="meta"), "text"]}, pin=True)

        assert pinned == ["cpu"]
        assert batch["a"].device.type == batch["b"][0].device.type == "meta"
        assert batch["b"][1] == "text"

    def test_in_loader_processes_is_an_error_that_says_what_to_do(self, monkeypatch):
        reader = TorchReader(torch.arange(4.0), Data(), 0, Placement(CPU))

        def broken():
            raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
            yield

        with pytest.raises(UserError, match=r"on a GPU already(.|\n)*data\.pin_memory: false"):
            list(reader._arriving(broken()))


def test_sums_on_a_gpu_do_not_hold_the_host_up():
    """D9: for frameworks that wait on the stream."""
    assert horovod_settings(job())["HOROVOD_ENABLE_ASYNC_COMPLETION"] == "1"
    assert "HOROVOD_ENABLE_ASYNC_COMPLETION" not in horovod_settings(job(framework="jax"))


class TestRules:
    @pytest.mark.parametrize(
        ("fields", "path"),
        [
            ({"train": {"compile": {"backend": "aot_eager", "mode": "max-autotune"}}}, "train.compile.mode"),
            ({"train": {"compile": {"mode": "reduce-overhead"}, "cuda_graph": True}}, "train.cuda_graph"),
            ({"framework": "jax", "allreduce": {"wire_dtype": "bf16"}}, "allreduce.wire_dtype"),
        ],
    )
    def test_refuse_what_cannot_go_together(self, fields, path):
        (problem,) = broken_rules(job(**fields))

        assert problem.path == path

    def test_allow_the_rest(self):
        assert not broken_rules(
            job(
                train={"compile": {"mode": "max-autotune-no-cudagraphs"}, "cuda_graph": "auto"},
                allreduce={"wire_dtype": "bf16"},
            )
        )


def test_several_gpus_are_not_several_for_a_trainer_of_transformers(monkeypatch, tmp_path):
    """D10: it spread the model over all of them with DataParallel."""
    transformers = pytest.importorskip("transformers")
    from horovod_train.plugins.transformers.trainer import use_one_device

    taken = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    args = transformers.TrainingArguments(output_dir=str(tmp_path), report_to=[])
    args._n_gpu = 4
    device = torch.device("cuda", 2)
    use_one_device(args, device)

    assert args.device == device
    assert args.n_gpu == 1
    assert taken == [device]


def test_lightning_takes_the_device_that_it_was_given(monkeypatch):
    """D3: cuda:1 for the second rank of a host, though it sees one GPU alone."""
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # as Lightning sets it
    lightning = pytest.importorskip("lightning")
    from horovod_train.plugins.lightning.strategy import HorovodStrategy

    assert lightning
    world = SingleRank(rank=1, local_rank=1)
    alone = HorovodStrategy(parallel_devices=[torch.device("cuda", 0)], world=world)
    all_of_them = HorovodStrategy(parallel_devices=[torch.device("cuda", n) for n in range(4)], world=world)

    assert alone.root_device == torch.device("cuda", 0)
    assert all_of_them.root_device == torch.device("cuda", 1)
    assert HorovodStrategy(world=world).root_device == torch.device("cpu")
