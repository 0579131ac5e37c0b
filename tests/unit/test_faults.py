"""Faults that a job injects into itself are written as texts, and happen once."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest

from horovod_train.config.schema import Fault, Health, Job
from horovod_train.errors import UserError
from horovod_train.events.wire import Reporter
from horovod_train.training.hooks import faults
from horovod_train.training.hooks.faults import Inject


def test_a_text_is_a_fault():
    (kill, slow) = Health.model_validate(
        {"inject": ["kill:rank=1,step=20", "slow:step=3,seconds=0.5"]}
    ).inject

    assert (kill.kind, kill.rank, kill.step) == ("kill", 1, 20)
    assert (slow.kind, slow.rank, slow.step, slow.seconds) == ("slow", 0, 3, 0.5)


@pytest.mark.parametrize(
    "text", ["kill", "kill:", "kill:step", "kill:rank=x,step=3", "boom:step=1", "kill:rank=1"]
)
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError, match="inject"):
        Health.model_validate({"inject": [text]})


def parts(tmp_path, *texts, rank=1):
    job = Job.model_validate(
        {"name": "j", "task": "digits", "run_dir": str(tmp_path), "health": {"inject": list(texts)}}
    )
    world = SimpleNamespace(rank=rank, size=2)
    return SimpleNamespace(job=job, run_id="run-1", world=world, reporter=Reporter(1, False, io.StringIO()))


def steps(hook, *numbers):
    for number in numbers:
        hook.on_step(SimpleNamespace(progress=SimpleNamespace(step=number)))


def test_a_fault_happens_once_on_its_rank_also_if_ranks_start_again(tmp_path, monkeypatch):
    happened = []
    monkeypatch.setattr(faults, "ACTIONS", {"kill": lambda: happened.append("kill"), "hang": happened.clear})
    described = parts(tmp_path, "kill:rank=1,step=3", "hang:rank=0,step=3")
    steps(Inject.of(described), 1, 2, 3)
    assert happened == ["kill"]
    steps(Inject.of(described), 2, 3, 4)
    assert happened == ["kill"]
    assert described.reporter.stream.getvalue() == "rank 1: injected after step 3: kill\n"


def test_a_job_without_faults_has_no_such_hook_and_no_rank_is_invented(tmp_path):
    assert Inject.of(parts(tmp_path)) is None
    with pytest.raises(UserError, match="there is no rank 2, but ranks 0 to 1"):
        Inject.of(parts(tmp_path, "kill:rank=2,step=1"))


def test_a_fault_in_a_resolved_job_is_read_back():
    fault = Fault.model_validate("slow:rank=1,step=3,seconds=2")

    assert Fault.model_validate(fault.model_dump(mode="json")) == fault
