"""How much memory a job needs: counted on tensors that have none, against those that have."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker

from horovod_train.cli import plan
from horovod_train.config.schema import Job
from horovod_train.config.support import JobSizes, Sizes, first_that_fits, needs
from horovod_train.errors import UserError
from horovod_train.frameworks.torch.memory import sizes_of
from horovod_train.tasks.gpt import Gpt

SMALL = {"layers": 2, "width": 64, "head_width": 16, "length": 32, "num_samples": 16}
MIB = 2**20
SIZES = Sizes(
    weights=100 * MIB,
    trained=80 * MIB,
    buffers=0,
    optimizer=200 * MIB,
    activations=40 * MIB,
    gradients_by_then=10 * MIB,
    update=20 * MIB,
    largest=8 * MIB,
    units=[20 * MIB] * 4,
    process=300 * MIB,
)


def job(task="gpt", task_args=SMALL, **train):
    return Job.model_validate(
        {
            "name": "j",
            "task": task,
            "task_args": task_args,
            "train": {"batch_size_per_rank": 4, **train},
            "optimizer": {"name": "adamw"},
        }
    )


def measured(accumulation):
    """What the same step takes with tensors that have memory."""
    task = Gpt(**SMALL)
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters())
    data = task.train_data()
    batch = torch.stack([data[at] for at in range(4)])
    peaks = []
    for number in range(2):
        tracker = MemTracker()
        tracker.track_external(model, optimizer, batch)
        with tracker:
            for _ in range(accumulation):
                tracker.reset_mod_stats()
                task.loss(model, batch).backward()
            optimizer.step()
        peaks.append(max(found["Total"] for found in tracker.get_tracker_snapshot("peak").values()))
        optimizer.zero_grad()
        assert number < 2
    weights = sum(p.nbytes for p in model.parameters())
    state = sum(value.nbytes for entry in optimizer.state.values() for value in entry.values())
    return weights, state, peaks[-1]


class TestSizes:
    @pytest.mark.parametrize("accumulation", [1, 3])
    def test_are_those_of_a_real_step(self, accumulation):
        weights, state, peak = measured(accumulation)
        found = sizes_of(job(accumulation_steps=accumulation), 1)
        sizes = found.whole

        assert (sizes.weights, sizes.trained, sizes.optimizer) == (weights, weights, state)
        assert needs(found)["allreduce"].peak == pytest.approx(peak, rel=0.02)

    def test_of_a_large_model_take_no_memory(self):
        large = {"layers": 12, "width": 4096, "head_width": 128, "num_samples": 8}
        assert sizes_of(job(task_args=large), 1).whole.weights > 9e9

    def test_on_ranks_that_share_layers_are_those_of_their_parts(self):
        found = sizes_of(job(), 4)
        whole, shared = found.whole, found.of_tensor_rank

        assert sizes_of(job(), 1).of_tensor_rank is None
        blocks = sum(
            p.nbytes for name, p in Gpt(**SMALL).model().blocks.named_parameters() if "norm" not in name
        )
        rows = sum(
            module.bias.nbytes
            for name, module in Gpt(**SMALL).model().named_modules()
            if name.endswith((".o", ".down"))
        )
        assert shared.weights == whole.weights - (blocks - rows) * 3 // 4
        assert shared.activations < whole.activations

    def test_know_models_that_nobody_can_share(self):
        uneven = sizes_of(job(), 5)
        too_few_heads = sizes_of(job(task_args={**SMALL, "head_width": 64}), 4)

        assert uneven.of_tensor_rank is None
        assert too_few_heads.of_tensor_rank is None

    def test_are_smaller_where_activations_are_computed_anew(self):
        again = sizes_of(job(activation_checkpointing=["blocks.*"]), 1).whole
        kept = sizes_of(job(), 1).whole

        assert again.activations < 0.7 * kept.activations

    def test_cannot_be_told_of_a_model_that_reads_numbers(self):
        with pytest.raises(UserError, match="cannot run with fake tensors"):
            sizes_of(job(task=f"{__name__}:Reads", task_args={}), 1)


class Reads:
    def model(self):
        return nn.Linear(2, 2)

    def train_data(self):
        return torch.utils.data.TensorDataset(torch.randn(8, 2))

    def loss(self, model, batch):
        loss = model(batch[0]).sum()
        return loss * 2 if float(loss) > 0 else loss


class TestNeeds:
    def test_are_what_each_strategy_divides(self):
        found = needs(JobSizes(job(accumulation_steps=4), 4, SIZES))

        def of(name):
            need = found[name]
            return [round(value / MIB) for value in (need.weights, need.gradients, need.optimizer, need.peak)]

        assert of("allreduce") == [100, 80, 200, 100 + 200 + 40 + 80]
        assert of("zero 1") == [100, 80, 50, 100 + 50 + 40 + 80]
        assert of("zero") == [100, 20, 50, round(100 + 50 + 40 + 2.5 + 40)]
        assert of("fsdp") == [25, 20, 50, round(25 + 50 + 40 + 2.5 + (20 + 40) + 20)]
        assert of("fsdp without resharding") == [25, 20, 50, round(25 + 50 + 40 + 2.5 + 100 + 20)]
        assert of("pipeline") == [25, 20, 50, round(25 + 50 + 40 + 2.5)]
        assert found["allreduce"].process == found["allreduce"].peak + 300 * MIB

    def test_count_the_optimizers_step_where_that_is_more(self):
        sizes = dataclasses.replace(SIZES, update=150 * MIB)

        assert needs(JobSizes(job(), 1, sizes))["allreduce"].peak == (100 + 200 + 80 + 150) * MIB

    def test_name_the_first_that_fits(self):
        found = needs(JobSizes(job(accumulation_steps=4), 4, SIZES, SIZES))

        assert first_that_fits(found, 800 * MIB) == "allreduce"
        assert first_that_fits(found, 600 * MIB) == "zero 1"
        assert first_that_fits(found, 540 * MIB) == "zero"
        assert first_that_fits(found, 495 * MIB) is None  # a pipeline traces a second, whole model
        assert first_that_fits({"pipeline": found["pipeline"]}, 580 * MIB) == "pipeline"


class TestTheCommand:
    @pytest.fixture(autouse=True)
    def sizes(self, monkeypatch):
        monkeypatch.setattr(plan, "sizes_of", lambda job, num_ranks: JobSizes(job, num_ranks, SIZES))

    def output(self, *options):
        done = CliRunner().invoke(plan.plan_command, ["gpt", "-n", "4", *options], catch_exceptions=False)
        return done.exit_code, done.output

    def test_shows_a_row_for_each_strategy(self):
        code, output = self.output("--memory")

        assert code == 0
        assert "# a rank of 4 needs, in MiB" in output
        assert [line.split()[0] for line in output.splitlines()[2:4]] == ["allreduce", "zero"]

    def test_names_what_fits(self):
        assert "the first that fits 540 MiB: zero\n" in self.output("--device-memory", "540MiB")[1]
        assert "# none fits 200 MiB: more ranks" in self.output("--device-memory", "200MiB")[1]

    def test_without_it_is_what_would_be_started(self):
        assert "horovodrun" in self.output()[1]

    @pytest.mark.parametrize("size", ["16", "16GB", "x GiB", "-1GiB", ""])
    def test_takes_sizes_with_a_unit(self, size):
        code, output = self.output("--device-memory", size)

        assert code != 0
        assert "is not a size; write a number and a unit" in output


def test_a_process_of_its_own_counts():
    found = plan.sizes_of(job(), 2)
    whole = found.whole

    assert whole == dataclasses.replace(sizes_of(job(), 2).whole, process=whole.process)
    assert found.of_tensor_rank.weights < whole.weights
    with pytest.raises(UserError, match="cannot run with fake tensors"):
        plan.sizes_of(job(task=f"{__file__}:Reads", task_args={}), 1)


def test_other_frameworks_are_refused():
    with pytest.raises(UserError, match="is for PyTorch's jobs"):
        plan.sizes_of(job().model_copy(update={"framework": "jax"}), 1)
