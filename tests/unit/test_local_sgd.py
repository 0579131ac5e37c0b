"""Local SGD on ranks that are threads: weights are those of the same algorithm, written down once more."""

from __future__ import annotations

import copy

import pytest
import torch
from programs.cases import BATCH_SIZE, NUM_SAMPLES, Case, data
from support.reference import FACTORIES, joint_batch_weights
from support.torch_threads import Task, on_torch_ranks, run_of, weights_of
from support.training import Told, manager_of
from support.worlds import on_ranks
from torch import nn
from torch.nn.utils import clip_grad_norm_

from horovod_train.collectives.base import Mesh
from horovod_train.config.rules import broken_rules
from horovod_train.config.schema import Job
from horovod_train.errors import NumericError
from horovod_train.health.comparisons import fingerprints
from horovod_train.plugins.local_sgd.strategy import LocalSgd, Outer
from horovod_train.training.hooks.base import Hook
from horovod_train.training.hooks.checks import CheckReplicasIdentical
from horovod_train.training.hooks.saving import SaveCheckpoints
from horovod_train.training.loop import train
from horovod_train.worker import resume

TASK = "support.torch_threads:Task"
pytestmark = pytest.mark.usefixtures("one_thread")
ADAMW = {"optimizer": "adamw", "optimizer_args": {"weight_decay": 0.05}, "lr": 2e-3}


def locally(case, every_steps, **args):
    """The job of a case with local SGD."""
    args = {"every_steps": every_steps, **args}
    return {**case.job(TASK), "strategy": {"name": "local_sgd", "args": args}}


def trained(case, size, every_steps, *hooks, **args):
    Task(**case.task_args).model()

    def rank(world):
        _, run = run_of(world, locally(case, every_steps, **args))
        run.hooks = [CheckReplicasIdentical(), *(hook(run) for hook in hooks)]
        train(run)
        return weights_of(run.replica.model), fingerprints(run.replica.state(copy=False))

    return on_torch_ranks(size, rank)


def written_down_once_more(case, size, every_steps, allreduce_steps=0, outer=None):
    """Return the weights: a plain loop over models of all ranks, one after the other."""
    models = [Task(**case.task_args).model() for _ in range(size)]
    optimizers = [
        FACTORIES[case.optimizer](model.parameters(), lr=case.lr, **case.optimizer_args) for model in models
    ]
    inputs, labels = data(NUM_SAMPLES, 1)
    batch = BATCH_SIZE * case.accumulation
    anchor = copy.deepcopy(models[0])
    outer_optimizer = outer and torch.optim.SGD(anchor.parameters(), **outer)
    num_made = 0
    for _ in range(case.epochs):
        num_steps, counts = 0, [0] * size
        for start in range(0, NUM_SAMPLES, batch * size):
            step = torch.arange(start, min(start + batch * size, NUM_SAMPLES))
            num_busy = min(size, max(-(-len(step) // batch), len(step) // 2, 1))
            for rank, mine in enumerate([*step.tensor_split(num_busy), *[step[:0]] * (size - num_busy)]):
                optimizers[rank].zero_grad(set_to_none=False)
                loss = sum(p.sum() for p in models[rank].parameters()) * 0.0
                if len(mine):
                    loss = loss + Task(**case.task_args).loss(models[rank], (inputs[mine], labels[mine]))
                loss.backward()
                counts[rank] += len(mine)
            if num_made < allreduce_steps:
                share_gradients(models, counts)
            for model, optimizer in zip(models, optimizers, strict=True):
                if case.clip is not None:
                    clip_grad_norm_(model.parameters(), case.clip)
                optimizer.step()
            num_made += 1
            if num_made <= allreduce_steps:
                counts = [0] * size
                anchor.load_state_dict(models[0].state_dict())
                continue
            num_steps += 1
            if num_steps == every_steps or int(step[-1]) == NUM_SAMPLES - 1:
                average(models, optimizers, counts)
                if outer_optimizer:
                    step_of_the_mean(anchor, outer_optimizer, models)
                num_steps, counts = 0, [0] * size
    return weights_of(models[0])


def share_gradients(models, counts):
    for alike in zip(*(model.parameters() for model in models), strict=True):
        joint = sum(p.grad * count for p, count in zip(alike, counts, strict=True))
        for p in alike:
            p.grad = joint.clone() / sum(counts)


def step_of_the_mean(anchor, optimizer, models):
    for weight, mean in zip(anchor.parameters(), models[0].parameters(), strict=True):
        weight.grad = weight.detach() - mean.detach()
    optimizer.step()
    for model in models:
        model.load_state_dict(anchor.state_dict())


@torch.no_grad()
def average(models, optimizers, counts):
    shares = [count / sum(counts) for count in counts]

    def mean_of(tensors):
        mean = sum(share * tensor.double() for share, tensor in zip(shares, tensors, strict=True))
        for tensor in tensors:
            tensor.copy_(mean)

    for alike in zip(*(model.parameters() for model in models), strict=True):
        mean_of(alike)
        states = [optimizer.state[p] for optimizer, p in zip(optimizers, alike, strict=True)]
        for key in states[0]:
            mean_of([state[key] for state in states])


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    "case",
    [
        Case("momentum, weights of its own", optimizer_args={"momentum": 0.9, "nesterov": True}),
        Case("partly used", task_args={"partly_used": True}, accumulation=3),
    ],
    ids=lambda case: case.name,
)
def test_a_mean_after_every_step_of_sgd_is_the_step_of_the_joint_batch(case, size):
    expected, _ = joint_batch_weights(case, size)

    for weights, _ in trained(case, size, 1):
        assert float((weights - expected).abs().max()) <= 1e-6


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("every_steps", [2, 3, 100])
@pytest.mark.parametrize(
    "case",
    [
        Case("sgd"),
        Case("adamw", **ADAMW),
        Case("clipped", clip=0.3, task_args={"partly_used": True}),
        Case("accumulated", accumulation=3),
    ],
    ids=lambda case: case.name,
)
def test_ranks_train_as_the_algorithm_says(case, every_steps, size, matrix):
    matrix("equals an independent computation: 32 bits", "local_sgd")
    expected = written_down_once_more(case, size, every_steps)

    found = trained(case, size, every_steps)

    for weights, prints in found:
        assert float((weights - expected).abs().max()) <= 1e-6
        assert prints == found[0][1]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    ("case", "outer"),
    [
        (Case("adamw", **ADAMW), {"lr": 0.7, "momentum": 0.9, "nesterov": True}),
        (Case("accumulated", accumulation=3), {"lr": 0.5, "momentum": 0.5, "nesterov": False}),
    ],
    ids=["DiLoCo", "SlowMo"],
)
def test_an_outer_optimizer_makes_a_step_of_each_mean(case, outer, size):
    """The outer optimizer is PyTorch's here."""
    expected = written_down_once_more(case, size, 3, outer=outer)

    found = trained(case, size, 3, outer=outer)

    for weights, prints in found:
        assert float((weights - expected).abs().max()) <= 1e-6
        assert prints == found[0][1]
    without = written_down_once_more(case, size, 3)
    assert float((expected - without).abs().max()) > 1e-4


def test_an_outer_step_of_one_without_momentum_is_the_mean():
    case = Case("sgd")
    for weights, _ in trained(case, 2, 3, outer={"lr": 1.0, "momentum": 0.0, "nesterov": False}):
        assert float((weights - written_down_once_more(case, 2, 3)).abs().max()) <= 1e-6


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("outer", [None, {"lr": 0.7, "momentum": 0.9, "nesterov": True}])
@pytest.mark.parametrize(
    "case", [Case("adamw", **ADAMW), Case("clipped", clip=0.3)], ids=lambda case: case.name
)
def test_the_first_steps_may_sum_gradients(case, outer, size):
    expected = written_down_once_more(case, size, 3, allreduce_steps=4, outer=outer)

    for weights, _ in trained(case, size, 3, allreduce_steps=4, outer=outer):
        assert float((weights - expected).abs().max()) <= 1e-6


def test_it_is_another_algorithm_than_a_sum_of_gradients():
    case = Case("sgd")
    ((weights, _), _) = trained(case, 2, 3)

    assert float((weights - joint_batch_weights(case, 2)[0]).abs().max()) > 1e-4


def test_what_travels_is_the_model_and_its_state_once_in_a_while():
    case = Case("sgd", epochs=1)  # 7 steps on 2 ranks: means after 3, 6, and at the end

    class Bytes(Hook):
        def __init__(self, run):
            self.found = run.replica.bytes = []

        def on_result(self, run, report):
            self.found.append((report.outcome.numbers["sent_bytes"], run.replica.replicas_identical))

    def rank(world):
        _, run = run_of(world, locally(case, 3))
        run.hooks = [Bytes(run)]
        train(run)
        size_bytes = sum(p.numel() * 4 for p in run.replica.model.parameters())
        return run.replica.bytes, size_bytes

    for found, size_bytes in on_torch_ranks(2, rank):
        little, all_of_it = (8, False), (8 + 2 * size_bytes, True)
        assert found == [little, little, all_of_it] * 2 + [all_of_it]


def test_state_of_one_number_becomes_its_mean_too():
    """As the step size that Prodigy learns; what optimizers count is equal, and stays as it is."""

    def rank(world):
        weight = nn.Parameter(torch.ones(2))
        model = nn.Module()
        model.register_parameter("weight", weight)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        optimizer.state[weight] = {"d": torch.tensor(4.0 * world.rank), "step": torch.tensor(3.0)}
        strategy = LocalSgd(Mesh.data_parallel(world), Job(name="j", task="digits"), every_steps=1)
        strategy.bind(model, optimizer)
        strategy._average([0.1, 0.2, 0.7][world.rank])
        return {key: float(value) for key, value in optimizer.state[weight].items()}

    assert on_ranks(3, rank) == [{"d": pytest.approx(0.8 + 5.6), "step": 3.0}] * 3


class TestResume:
    @pytest.mark.parametrize("args", [{}, {"outer": {}, "allreduce_steps": 2}], ids=["plain", "DiLoCo"])
    def test_is_exact_wherever_training_was_interrupted(self, tmp_path, args):
        case = Case("adamw", epochs=2, **ADAMW)

        class Fall(Hook):
            def on_step(self, run):
                if run.progress.step == 6:
                    raise RuntimeError("killed")

        def rank(world, *, falls):
            framework, run = run_of(
                world, locally(case, 3, **args), checkpoint={"every": [1, "2 steps"], "background": False}
            )
            manager = manager_of(tmp_path, run)
            try:
                resume(run, manager, framework, Told().reporter)
                begun = run.progress.step
                run.hooks = [SaveCheckpoints(manager, framework), *([Fall()] if falls else [])]
                train(run)
            finally:
                manager.close()
            return begun, fingerprints(run.replica.state(copy=False))

        Task().model()
        undisturbed = trained(case, 2, 3, **args)
        assert [str(error) for error in on_torch_ranks(2, lambda world: rank(world, falls=True))] == [
            "killed"
        ] * 2

        # Due after 2 and 4, saved where replicas are identical.
        saved = (2, 5) if args else (3, 6)
        assert sorted(path.name for path in tmp_path.glob("step-*")) == [f"step-{n:012d}" for n in saved]
        for begun, prints in on_torch_ranks(2, lambda world: rank(world, falls=False)):
            assert begun == saved[-1]
            assert prints == undisturbed[0][1]


class TestAStepThatIsNotFinite:
    def trained(self, poison, **health):
        """Two ranks; the gradient of one becomes poisoned in its second step."""

        def rank(world):
            _, run = run_of(
                world, locally(Case("sgd", epochs=1), 3), health=health, metrics={"grad_norm_every_steps": 1}
            )
            seen = []
            loss = run.replica.task.loss

            def poisoned(model, batch):
                seen.append(weights_of(model))
                found = loss(model, batch)
                return poison(found) if world.rank == 1 and len(seen) == 2 else found

            run.replica.task.loss = poisoned
            train(run)
            return seen

        return on_torch_ranks(2, rank)

    @pytest.mark.parametrize(
        "poison",
        [
            lambda loss: loss * float("nan"),
            lambda loss: loss + (loss - loss.detach()).abs().sqrt(),  # finite, its gradient is not
        ],
        ids=["loss", "gradient"],
    )
    def test_is_left_out_on_all_ranks(self, poison):
        for seen in self.trained(poison, non_finite="skip"):
            assert not torch.equal(seen[0], seen[1])
            assert torch.equal(seen[1], seen[2])
            assert not torch.equal(seen[2], seen[3])

    def test_ends_the_job_on_all_ranks(self):
        errors = self.trained(lambda loss: loss * float("nan"))

        assert all(isinstance(error, NumericError) for error in errors)
        assert all("because of rank 1" in str(error) for error in errors)


class TestWhatItRefuses:
    def problems(self, args, **job):
        fields = {"name": "j", "task": "digits", "strategy": {"name": "local_sgd", "args": args}, **job}
        return [str(problem) for problem in broken_rules(Job.model_validate(fields))]

    @pytest.mark.parametrize("every_steps", [0, -1, 1.5, "4", True, None])
    def test_is_what_is_no_number_of_steps(self, every_steps):
        (problem,) = self.problems({"every_steps": every_steps})

        assert problem.startswith("  strategy.args.every_steps")

    @pytest.mark.parametrize(
        ("args", "said"),
        [
            ({}, "strategy.args.every_steps\n      is required"),
            ({"every_steps": 4, "every_step": 4}, "hint: did you mean 'every_steps'?"),
            ({"every_steps": 4, "more": 1}, "strategy.args.more = 1\n      is not a known field"),
        ],
    )
    def test_is_what_it_does_not_know(self, args, said):
        (problem,) = self.problems(args)

        assert said in problem

    def test_is_a_loss_scale_of_each_rank(self):
        (problem,) = self.problems({"every_steps": 4}, train={"precision": "fp16"})

        assert "train.precision = 'fp16'\n      is not supported with strategy: local_sgd: fp16" in problem
        assert self.problems({"every_steps": 4}, train={"precision": "bf16"}) == []

    def test_is_rounding_the_weights(self):
        (problem,) = self.problems({"every_steps": 4}, allreduce={"wire_dtype": "fp16"})

        assert "is not supported with strategy: local_sgd: it would round the weights" in problem

    def refused(self, differ):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))

        def rank(world):
            mine = copy.deepcopy(model)
            optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
            job = Job(name="j", task="digits")
            strategy = LocalSgd(Mesh.data_parallel(world), job, every_steps=1)
            strategy.bind(mine, optimizer)
            if world.rank == 1:
                differ(mine, optimizer)
            strategy._average(0.5)

        return on_ranks(2, rank)

    def test_is_ranks_that_train_different_parameters(self):
        for error in self.refused(lambda model, _: model[0].requires_grad_(requires_grad=False)):
            assert "rank 0 trains '0.bias' and rank 1 does not" in str(error)

    def test_is_optimizers_that_differ(self):
        def differ(_, optimizer):
            optimizer.param_groups[0]["momentum"] = 0.5

        for error in self.refused(differ):
            assert "different settings or state" in str(error)


def test_an_outer_optimizer_goes_on_after_a_parameter_has_left_the_optimizer():
    outer = Outer(lr=1.0, momentum=0.0, nesterov=False)
    outer.record({"stays": torch.ones(1), "leaves": torch.ones(1)})
    outer.step("stays", torch.full((1,), 2.0))
    outer.reset()

    outer.record({"stays": torch.full((1,), 2.0)})

    assert outer.step("stays", torch.full((1,), 3.0)).item() == 3.0
    assert list(outer.momenta) == ["stays"]
