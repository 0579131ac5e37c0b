"""What codecs send, and what they keep for later: compared with the same sums, written down once more."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from programs.cases import Case
from support.reference import joint_batch_weights
from support.torch_threads import Task, on_torch_ranks, run_of, weights_of
from support.training import Told, manager_of
from support.worlds import on_ranks
from torch import nn

from horovod_train.checkpoint.store import list_checkpoints, read_checkpoint
from horovod_train.collectives.base import Mesh, SingleRank
from horovod_train.config.schema import Allreduce, Job
from horovod_train.errors import UserError
from horovod_train.frameworks.torch.codecs import Codec, Dense, make_codec
from horovod_train.frameworks.torch.comm.collectives import tensor_communicator
from horovod_train.frameworks.torch.strategies.allreduce.strategy import AllreduceStrategy, allreduce
from horovod_train.health.comparisons import fingerprints
from horovod_train.plugins.top_k.codec import TopK
from horovod_train.training.hooks.base import Hook
from horovod_train.training.hooks.checks import CheckReplicasIdentical
from horovod_train.training.hooks.saving import SaveCheckpoints
from horovod_train.training.loop import train
from horovod_train.worker import resume

TASK = "support.torch_threads:Task"
pytestmark = pytest.mark.usefixtures("one_thread")
SHAPES = {"a": (5, 4), "b": (7,), "c": ()}


class Model(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))


def bound(ranks, codec, model=None, size_bytes=1):
    """A strategy with a message for each parameter (or one for all), over a model."""
    model = model or Model()
    strategy = AllreduceStrategy(ranks, codec=codec, bucket_size_bytes=size_bytes)
    strategy.bind(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return strategy, model


def gradients_of(num_steps, size, seed=0, dtype=np.float32):
    make = np.random.RandomState(seed)
    return [
        [{name: np.asarray(make.randn(*shape), dtype) for name, shape in SHAPES.items()} for _ in range(size)]
        for _ in range(num_steps)
    ]


def step(strategy, model, gradients, *, is_used=True):
    """Make a step with given gradients; return their sums."""
    strategy.prepare_backward(is_last=True)
    loss = sum((torch.from_numpy(np.asarray(g)) * getattr(model, n)).sum() for n, g in gradients.items())
    loss.backward()
    strategy.reduce(torch.tensor(1.0))
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    strategy.after_update(is_used=is_used)
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("keep", [0.01, 0.3, 1.0])
def test_the_largest_numbers_travel_and_the_rest_is_added_to_the_next_ones(keep, dtype, size):
    steps = gradients_of(6, size, dtype=dtype)

    def rank(world):
        strategy, model = bound(world, TopK(keep=keep), Model(torch.from_numpy(np.zeros(0, dtype)).dtype))
        return [step(strategy, model, gradients[world.rank]) for gradients in steps]

    memory = [{name: np.zeros(shape, dtype).ravel() for name, shape in SHAPES.items()} for _ in range(size)]
    for number, found in enumerate(zip(*on_ranks(size, rank), strict=True)):
        for name, shape in SHAPES.items():
            total = np.zeros(shape, dtype).ravel()
            for rank_memory, gradient in zip(memory, steps[number], strict=True):
                whole = rank_memory[name] + gradient[name].ravel()
                chosen = np.argsort(-np.abs(whole))[: int(np.ceil(keep * whole.size))]
                total[chosen] += whole[chosen]
                whole[chosen] = 0
                rank_memory[name] = whole
            for of_rank in found:
                np.testing.assert_array_equal(of_rank[name].numpy(), total.reshape(shape))


def everything(strategy):
    return {name: piece.double().sum().item() for name, piece in strategy.rank_state().items()}


class TestWhatIsKept:
    def test_is_as_before_when_a_step_is_left_out(self):
        steps = gradients_of(3, 1)

        def rank(world):
            strategy, model = bound(world, TopK(keep=0.2))
            step(strategy, model, steps[0][0])
            before = {name: piece.clone() for name, piece in strategy.rank_state().items()}
            bad = {name: np.full_like(g, np.nan) for name, g in steps[1][0].items()}
            assert step(strategy, model, bad, is_used=False)["a"].isnan().any()
            return before, strategy.rank_state()

        ((before, after),) = on_ranks(1, rank)
        assert before["a"].any()
        assert all(torch.equal(before[name], after[name]) for name in SHAPES)

    def test_comes_in_the_end_though_parameters_are_frozen_and_thawed_on_the_way(self):
        """The sum of all that has come, and of all that is kept, is the sum of all gradients."""
        steps = gradients_of(6, 2)

        def rank(world):
            strategy, model = bound(world, TopK(keep=0.2), size_bytes=10**6)
            came = dict.fromkeys(SHAPES, 0.0)
            for number, gradients in enumerate(steps):
                model.a.requires_grad_(requires_grad=number not in (2, 3))
                model.b.requires_grad_(requires_grad=number != 4)
                mine = {
                    name: g for name, g in gradients[world.rank].items() if getattr(model, name).requires_grad
                }
                for name, total in step(strategy, model, mine).items():
                    came[name] += total.double().sum().item()
            return came, everything(strategy)

        trained = {"a": [0, 1, 4, 5], "b": [0, 1, 2, 3, 5], "c": range(6)}
        found = on_ranks(2, rank)
        for name, numbers in trained.items():
            wanted = sum(
                float(steps[number][rank][name].sum(dtype=float)) for number in numbers for rank in (0, 1)
            )
            kept = sum(kept[name] for _, kept in found)
            assert found[0][0][name] + kept == pytest.approx(wanted, abs=1e-5)
            assert found[0][0][name] == found[1][0][name]

    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_is_shared_out_where_the_number_of_ranks_has_changed(self, size):
        kept = [{"a": torch.randn(20), "b": torch.randn(7), "c": torch.randn(1)} for _ in range(3)]

        def rank(world):
            strategy, _ = bound(world, TopK(keep=0.2))
            strategy.load_rank_states(kept)
            return strategy.rank_state()

        found = on_ranks(size, rank)
        for name in SHAPES:
            total = sum(state[name] for state in found)
            torch.testing.assert_close(total, sum(state[name] for state in kept))
            if size == 3:
                assert all(torch.equal(mine[name], old[name]) for mine, old in zip(found, kept, strict=True))

    @pytest.mark.parametrize("kept", [[], [{"a": torch.ones(20)}]])
    def test_is_that_of_the_checkpoint_when_training_goes_back(self, kept):
        def rank(world):
            strategy, model = bound(world, TopK(keep=0.2))
            step(strategy, model, gradients_of(1, 1)[0][0])
            before = everything(strategy)
            strategy.load_rank_states(kept)
            return before, everything(strategy)

        ((before, after),) = on_ranks(1, rank)
        assert before["a"]
        assert before["b"]
        assert after == {"a": 20.0 if kept else 0.0, "b": 0.0, "c": 0.0}

    def test_of_what_is_frozen_waits_until_it_is_trained(self):
        def rank(world):
            model = Model()
            model.a.requires_grad_(requires_grad=False)
            strategy, _ = bound(world, TopK(keep=0.2), model)
            strategy.load_rank_states(
                [{"a": torch.full((20,), 2.0), "b": torch.zeros(7), "c": torch.zeros(1)}]
            )
            kept = everything(strategy)
            model.a.requires_grad_()
            came = [step(strategy, model, gradients[0])["a"].sum().item() for gradients in gradients_of(9, 1)]
            return kept, came, everything(strategy)

        ((kept, came, left),) = on_ranks(1, rank)
        assert kept["a"] == 40
        given = sum(float(gradients[0]["a"].sum(dtype=float)) for gradients in gradients_of(9, 1))
        assert sum(came) + left["a"] == pytest.approx(40 + given, abs=1e-4)

    def test_is_dropped_with_a_word_by_what_keeps_nothing(self, caplog):
        strategy, _ = bound(tensor_communicator(SingleRank()), Dense(torch.float32))

        strategy.load_rank_states([{"a": torch.ones(20)}])

        assert "rank state is of another strategy or codec; it is dropped" in caplog.text
        caplog.clear()
        strategy.load_rank_states([])
        assert not caplog.text


def test_the_loss_and_what_is_used_travel_as_they_are():
    """A parameter that nobody has used may get something that was kept: its gradient is zeros, not none."""

    def rank(world):
        strategy, model = bound(world, TopK(keep=0.01), size_bytes=10**6)
        strategy.prepare_backward(is_last=True)
        (model.a.sum() * 0.0).backward()
        loss = strategy.reduce(torch.tensor(0.1 + world.rank))
        return float(loss), model.b.grad.tolist()

    assert on_ranks(3, rank) == [(pytest.approx(3.3), [0.0] * 7)] * 3


def case_with(codec, **case):
    found = Case("coded", **case)
    return found, {**found.job(TASK), "allreduce": {"bucket_size_mib": 0.0005, "codec": codec}}


class TestTraining:
    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_with_all_numbers_is_that_of_the_joint_batch(self, size):
        case, fields = case_with({"name": "top-k", "args": {"keep": 1.0}})
        Task().model()

        def rank(world):
            _, run = run_of(world, fields)
            train(run)
            return weights_of(run.replica.model)

        expected, _ = joint_batch_weights(case, size)
        for weights in on_torch_ranks(size, rank):
            assert float((weights - expected).abs().max()) <= 1e-6

    def test_with_few_keeps_replicas_identical_and_is_something_else(self):
        case, fields = case_with({"name": "top-k", "args": {"keep": 0.05}})
        Task().model()

        def rank(world):
            _, run = run_of(world, fields)
            run.hooks = [CheckReplicasIdentical()]
            train(run)
            return weights_of(run.replica.model), fingerprints(run.replica.state(copy=False))

        (weights, prints), (_, others) = on_torch_ranks(2, rank)
        assert prints == others
        assert float((weights - joint_batch_weights(case, 2)[0]).abs().max()) > 1e-4

    @pytest.mark.parametrize("size_after", [2, 3])
    def test_goes_on_where_it_was_interrupted(self, tmp_path, size_after):
        """On as many ranks bit for bit; on others with all that was kept."""
        _, fields = case_with({"name": "top-k", "args": {"keep": 0.05}}, epochs=2)
        Task().model()

        class Fall(Hook):
            def on_step(self, run):
                if run.progress.step == 4:
                    raise RuntimeError("killed")

        def rank(world, hook=None, folder=tmp_path):
            framework, run = run_of(world, fields, checkpoint={"every": [1, "3 steps"], "background": False})
            manager = manager_of(folder, run)
            try:
                resume(run, manager, framework, Told().reporter)
                begun = everything(run.replica.strategy)
                run.hooks = [SaveCheckpoints(manager, framework), *([hook] if hook else [])]
                train(run)
            finally:
                manager.close()
            return begun, fingerprints(run.replica.state(copy=False))

        undisturbed = on_torch_ranks(2, lambda world: rank(world, folder=tmp_path / "other"))
        fallen = on_torch_ranks(2, lambda world: rank(world, Fall()))
        assert list(map(str, fallen)) == ["killed"] * 2
        (saved,) = list_checkpoints(tmp_path)
        assert read_checkpoint(saved.path).arrays["own"].keys() == {"rank.0", "rank.1"}

        found = on_torch_ranks(size_after, rank)

        if size_after == 2:
            assert [prints for _, prints in found] == [prints for _, prints in undisturbed]
        kept = [begun for begun, _ in found]
        assert all(any(of_rank.values()) for of_rank in kept)

    def test_of_whole_numbers_writes_nothing_for_ranks_alone(self, tmp_path):
        def rank(world):
            framework, run = run_of(world, Case("sgd", epochs=1).job(TASK))
            manager = manager_of(tmp_path, run)
            run.hooks = [SaveCheckpoints(manager, framework)]
            train(run)
            manager.close()

        Task().model()
        on_torch_ranks(2, rank)
        (saved,) = list_checkpoints(tmp_path)
        assert not (saved.path / "own.safetensors").exists()


class Halves(Codec):
    """A codec of somebody's own, in one file: the half of every number travels."""

    def message(self, layout):
        message = Dense(layout.dtype).message(layout)
        exchange = message.exchange

        def half(ranks, name):
            message.body.mul_(0.5)
            return exchange(ranks, name)

        message.exchange = half
        return message


def test_a_codec_of_ones_own_is_named_by_its_path():
    steps = gradients_of(1, 2)

    def rank(world):
        section = Allreduce.model_validate({"codec": {"name": "unit.test_codecs:Halves"}})
        strategy, model = bound(world, make_codec(section))
        return step(strategy, model, steps[0][world.rank])

    for found in on_ranks(2, rank):
        for name in SHAPES:
            total = 0.5 * (steps[0][0][name] + steps[0][1][name])
            np.testing.assert_allclose(found[name].numpy(), total, rtol=1e-6, atol=1e-7)


class TestWhatIsRefused:
    def made(self, args, **job):
        fields = {
            "name": "j",
            "task": "digits",
            "allreduce": {"codec": {"name": "top-k", "args": args}},
            **job,
        }
        return allreduce(Mesh.data_parallel(SingleRank()), Job.model_validate(fields))

    @pytest.mark.parametrize("keep", [0, -0.1, 1.5, "1%", True, None, float("nan")])
    def test_is_what_is_no_part(self, keep):
        with pytest.raises(UserError, match="(?s)cannot be created.*keep"):
            self.made({"keep": keep})

    @pytest.mark.parametrize("args", [{}, {"part": 0.1}])
    def test_is_what_it_does_not_know(self, args):
        with pytest.raises(UserError, match="'top-k' cannot be created"):
            self.made(args)

    def test_is_a_scale_that_changes(self):
        with pytest.raises(UserError, match="precision: fp16"):
            self.made({"keep": 0.1}, train={"precision": "fp16"})


def test_a_model_is_not_changed_by_what_is_sent():
    model = Model()
    before = copy.deepcopy(model.state_dict())

    def rank(world):
        strategy, _ = bound(world, TopK(keep=0.5), model)
        step(strategy, model, gradients_of(1, 1)[0][0])

    on_ranks(1, rank)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
