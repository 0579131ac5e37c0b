"""The first steps are compared with the plain model only where there is memory for it."""

from __future__ import annotations

import logging
import resource

import pytest
import torch
from support.torch_threads import on_torch_ranks, run_of

from horovod_train.frameworks.torch.verify import one_process, verification

WEIGHTS_BYTES = 4 * 16 * 16


class Task:
    def model(self):
        return torch.nn.Linear(16, 16, bias=False)

    def train_data(self):
        return torch.utils.data.TensorDataset(torch.ones(8, 16))

    def loss(self, model, batch):
        return model(batch[0]).mean()


def is_compared(size=2, **fields):
    job = {"name": "j", "task": f"{__name__}:Task", "strategy": "zero", "metrics": {"enabled": False}}
    runs = on_torch_ranks(size, lambda world: run_of(world, job, **fields)[1])
    found = {run.replica.first_steps.verifier is not None for run in runs}
    assert len(found) == 1, "ranks must agree"
    return found.pop()


def test_an_empty_shard_of_a_gradient_that_overflowed_does_not_differ():
    """A rank of FSDP has no rows of a short parameter, whose gradient may be infinite under fp16."""
    empty, whole = torch.zeros(0, 16), torch.full((3, 16), torch.inf)

    assert not verification._any_finite(empty, empty)
    assert verification._any_finite(torch.zeros(1, 16), whole)


@pytest.mark.parametrize(
    ("free", "of_host", "is_room"),
    [
        (8 * WEIGHTS_BYTES, 100 * WEIGHTS_BYTES, True),
        (6 * WEIGHTS_BYTES, 100 * WEIGHTS_BYTES, False),
        (8 * WEIGHTS_BYTES, 15 * WEIGHTS_BYTES, True),
        (8 * WEIGHTS_BYTES, 13 * WEIGHTS_BYTES, False),  # ranks share the memory of their host
    ],
)
def test_the_plain_model_is_made_if_all_ranks_have_memory_for_it(monkeypatch, caplog, free, of_host, is_room):
    monkeypatch.setattr(one_process, "free_bytes", lambda _: free)
    monkeypatch.setattr(one_process, "usable_memory_bytes", lambda: of_host)

    with caplog.at_level(logging.WARNING):
        assert is_compared() == is_room

    told = [
        record.message for record in caplog.records if "not compared with the plain model" in record.message
    ]
    assert len(told) == (0 if is_room else 1)


def test_limits_of_the_process_count():
    device = torch.device("cpu")
    before = resource.getrlimit(resource.RLIMIT_DATA)
    unlimited = one_process.free_bytes(device)
    resource.setrlimit(resource.RLIMIT_DATA, (2**40, before[1]))
    try:
        assert 2**39 < one_process.free_bytes(device) < 2**40
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    assert unlimited == pytest.approx(one_process.free_bytes(device), rel=0.5)
