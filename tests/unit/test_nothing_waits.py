"""Between the first line of a step and the last, nothing waits for a device: in each way to train.

A CPU plays the device; a number that is read from it is refused. On a GPU, ``tests/gpu`` lets PyTorch itself
refuse what synchronizes.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.deferred import NUM_STEPS, WAYS, Task, planned, replica_of, worlds
from support.reads import ReadsOfOursError, without_reads
from torch import nn

import horovod_train as ht
from horovod_train.collectives.base import Mesh, SingleRank
from horovod_train.config.schema import Job
from horovod_train.errors import NumericError
from horovod_train.frameworks.base import StepOutcome
from horovod_train.frameworks.torch.step import deferred
from horovod_train.frameworks.torch.step.deferred import DeferredOutcome
from horovod_train.registry import FRAMEWORKS
from horovod_train.training.loop import LoopBridge
from horovod_train.worker import make_run


@pytest.fixture
def late_steps(monkeypatch) -> None:
    monkeypatch.setattr(deferred, "lag_steps_of", lambda _: 2)


def test_a_read_is_seen():
    replica = replica_of(SingleRank(), 0)

    with without_reads(), pytest.raises(ReadsOfOursError, match=r"update\.py:\d+ reads a number"):
        replica.step(planned(SingleRank(), 0), 0.1, want_norm=False)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("way", [*WAYS, "top-k", "fp16 wire"])
def test_in_our_own_loop(way, size):
    fields = {
        **WAYS,
        "top-k": {
            "allreduce": {"codec": {"name": "top-k", "args": {"keep": 0.2}}},
            "health": {"non_finite": "skip"},
        },
        "fp16 wire": {"allreduce": {"wire_dtype": "fp16", "bucket_size_mib": 0.0001}},
    }[way]

    def rank(world):
        replica = replica_of(world, 2, task=Task((3, 0)), **fields)  # of the second step
        readings = []
        for number in range(NUM_STEPS):
            step = planned(world, number, accumulation=2)
            with without_reads():
                readings.append(replica.step(step, 0.1, want_norm=True))
        assert all(isinstance(reading, DeferredOutcome) for reading in readings)
        return [reading.outcome().is_finite for reading in readings]

    for used in worlds(size, rank):
        assert used[0]
        assert not used[1]


class Line:
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.tensor([index / 12]), torch.tensor([2 * index / 12])


class TestInALoopOfOnesOwn:
    def losses(self, late_at_step=-1, poison=-1) -> Iterator[float]:
        torch.manual_seed(0)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
        with ht.init(device="cpu") as session:
            replica = session.prepare(model, optimizer)
            loader = session.loader(Line(), batch_size=2)
            session.metrics(port=0)
            outcomes = []
            for step in loader.epoch(0, replica):
                with without_reads():
                    for x, y in step:
                        loss = (model(x) - y).square().mean()
                        step.backward(loss * float("nan") if step.number == poison else loss)
                    outcomes.append(step.finish(lr=0.1))
            found = session._services.recorder.registry.collect()
            self.steps = [s.value for m in found for s in m.samples if s.name == "horovod_train_steps_total"]
            yield from (outcome.loss for outcome in outcomes)

    def test_nothing_is_read_and_losses_are_those_of_a_cpu(self, monkeypatch):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(deferred, "lag_steps_of", lambda _: 2)
            on_device = list(self.losses())
        import support.reads

        monkeypatch.setattr(support.reads.Watch, "look", lambda *_: None)

        assert on_device == list(self.losses())

    def test_a_bad_step_is_told_two_steps_later_with_its_number(self, late_steps):
        with pytest.raises(NumericError, match="^step 2: the loss is nan because of rank 0"):
            list(self.losses(poison=2))

    def test_a_bad_last_step_is_told_at_the_end_of_the_epoch(self, late_steps):
        with pytest.raises(NumericError, match="^step 6: the loss is nan"):
            list(self.losses(poison=6))

    def test_a_bad_step_is_told_before_anything_is_saved(self, late_steps, tmp_path):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        with ht.init(device="cpu") as session:
            replica = session.prepare(model, optimizer)
            loader = session.loader(Line(), batch_size=2)
            checkpoints = session.checkpoints(tmp_path, replica, loader)
            for step in loader.epoch(0, replica):
                for x, y in step:
                    step.backward((model(x) - y).square().mean() * float("nan"))
                step.finish(lr=0.1)
                with pytest.raises(NumericError, match="^step 1: the loss is nan"):
                    checkpoints.save(wait=True)
                break

        assert not any(path.is_file() for path in tmp_path.rglob("*.json"))

    @pytest.mark.parametrize("what", ["an evaluation", "a resume", "the end"])
    def test_a_bad_last_step_of_an_epoch_that_was_left_is_told_before(self, late_steps, tmp_path, what):
        def leave_early():
            with ht.init(device="cpu") as session:
                model = nn.Linear(1, 1)
                replica = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True))
                loader = session.loader(Line(), batch_size=2)
                for step in loader.epoch(0, replica):
                    for x, y in step:
                        loss = (model(x) - y).square().mean()
                        step.backward(loss * float("nan") if step.number == 3 else loss)
                    step.finish(lr=0.1)
                    if step.number == 4:
                        break
                if what == "an evaluation":
                    session.eval_batches(replica, Line(), batch_size=2)
                if what == "a resume":
                    session.checkpoints(tmp_path, replica, loader).resume()
                assert what == "the end"

        with pytest.raises(NumericError, match="^step 3: the loss is nan"):
            leave_early()

    def test_who_goes_on_may_skip_as_many_steps_as_at_first(self, late_steps):
        """The device counts anew then, and so does the host."""
        model = nn.Linear(1, 1)
        with ht.init(device="cpu") as session:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
            replica = session.prepare(model, optimizer, non_finite="skip")
            loader = session.loader(torch.utils.data.ConcatDataset([Line(), Line()]), batch_size=1)
            raised = []
            for step in loader.epoch(0, replica):
                is_bad = step.number <= 11 or step.number == 16
                for x, y in step:
                    loss = (model(x) - y).square().mean()
                    step.backward(loss * float("nan") if is_bad else loss)
                try:
                    step.finish(lr=0.1)
                except NumericError:
                    raised.append(step.number)

        assert raised == [13]

    def test_an_error_of_the_users_own_is_not_replaced_by_one_of_the_device(self, late_steps, monkeypatch):
        def broken(_):
            raise RuntimeError("CUDA error: told at the end once more")

        def script():
            with ht.init(device="cpu") as session:
                model = nn.Linear(1, 1)
                replica = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True))
                loader, _ = session.loader(Line(), batch_size=2), session.metrics(port=0)
                for step in loader.epoch(0, replica):
                    for x, y in step:
                        step.backward((model(x) - y).square().mean())
                    step.finish(lr=0.1)
                    monkeypatch.setattr(deferred.DeferredOutcome, "outcome", broken)
                    raise ValueError("their own")

        with pytest.raises(ValueError, match="their own"):
            script()

    def test_an_outcome_has_all_that_one_on_a_cpu_has(self, late_steps):
        model = nn.Linear(1, 1)
        with ht.init(device="cpu") as session:
            replica = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True))
            for step in session.loader(Line(), batch_size=2).epoch(0, replica):
                for x, y in step:
                    step.backward((model(x) - y).square().mean())
                outcome = step.finish(lr=0.1)

        assert isinstance(outcome, DeferredOutcome)
        for name in StepOutcome.__slots__:  # a deferred outcome has the same fields
            assert getattr(outcome, name) == getattr(outcome.outcome(), name)


# What Lightning and Transformers read by themselves: (their file, their function).
OWN_READS: dict[str, set[tuple[str, str]]] = {
    "lightning": {
        ("lightning/pytorch/utilities/data.py", "has_len_all_ranks"),  # once, at the start
        ("lightning/fabric/utilities/device_dtype_mixin.py", "cpu"),  # once, at the end
    },
    "transformers": {("transformers/trainer.py", "_finalize_training")},  # once, at the end
}


@pytest.mark.filterwarnings("ignore")  # Lightning's, of the machine
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("framework", ["lightning", "transformers"])
def test_in_a_trainer_of_somebody_else(late_steps, monkeypatch, framework, precision):
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # as Lightning sets it
    job = Job.model_validate(
        {
            "name": "late",
            "framework": framework,
            "task": f"frameworks.{framework}_task:Task",
            "train": {
                "epochs": 1, "max_steps": 5, "batch_size_per_rank": 2, "accumulation_steps": 2,
                "precision": precision, "device": "cpu",
            },
            "metrics": {"enabled": False},
        }
    )  # fmt: skip
    adapter = FRAMEWORKS.load(job.framework)()
    replica, train_reader, _ = adapter.prepare(job, Mesh(SingleRank(), SingleRank()))
    run = make_run(job, Mesh(SingleRank(), SingleRank()), replica, train_reader, None)
    bridge = LoopBridge(run)
    steps, after_step = [], LoopBridge.after_step

    def noted(self, step, reading, lr):
        steps.append(reading)
        after_step(self, step, reading, lr)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoopBridge, "after_step", noted)
        with without_reads() as watch:
            adapter.fit(bridge)

    assert len(steps) == 5
    assert all(isinstance(reading, DeferredOutcome) for reading in steps)
    assert all(0 < reading.loss < 10 for reading in steps)
    assert watch.others == OWN_READS[framework]
