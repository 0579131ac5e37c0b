"""One rank from a job to an exit code; ranks are threads here, everything else is real."""

from __future__ import annotations

import json
import logging
import signal
import threading
import time
import urllib.request
from contextlib import ExitStack, suppress

import pytest
import yaml
from numpy_framework import NumpyFramework
from support.launching import free_port
from support.training import NUM_SAMPLES, Told
from support.worlds import on_ranks

from horovod_train import worker
from horovod_train.checkpoint.store import list_checkpoints
from horovod_train.collectives.base import SingleRank
from horovod_train.config.schema import Job
from horovod_train.errors import NumericError, PeerError, PreemptedError, UserError, WorldError
from horovod_train.events.file import read_events
from horovod_train.events.types import Stalled
from horovod_train.frameworks.torch.comm.groups import log_stalled
from horovod_train.registry import Registry
from horovod_train.training.hooks.saving import PreemptionRequest
from horovod_train.worker import WorkerOptions, run_rank


def test_a_warning_with_an_event_is_reported_as_the_event():
    told = Told()
    log = logging.getLogger("horovod_train.frameworks.torch.comm.groups")
    handler = worker._ReporterHandler(told.reporter)
    log.addHandler(handler)

    log_stalled(Stalled(collective="torch.distributed gloo:all_reduce", absent_ranks=[1], seconds=61.0))
    log.warning("something else")
    log.removeHandler(handler)

    stalled, notice = told.events()
    assert stalled["absent_ranks"] == [1]
    assert notice["text"] == "something else"


class Closes:
    """A world that notes that it was closed."""

    def __init__(self, closed):
        self.closed = closed

    def close(self):
        self.closed.append("closed")


class OnThreads(NumpyFramework):
    """The framework of a job whose world already exists."""

    def __init__(self, world):
        self.world = world

    def connect(self, job):
        return self.world


def job_for(folder, **sections):
    fields = {
        "name": "line",
        "framework": "threads",
        "optimizer": {"name": "numpy_framework:Sgd"},
        "task": "support.training:Task",
        "run_dir": str(folder / "runs"),
        "metrics": {"port": free_port()},
        "launch": {"num_ranks": 1},
        **sections,
        "train": {"epochs": 2, "batch_size_per_rank": 2, **sections.get("train", {})},
    }
    return Job.model_validate(fields)


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    """Run a job on ranks; return what each was told to tell, and its error if there was one."""
    monkeypatch.delenv("HOROVOD_TRAIN_RUN", raising=False)
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
    monkeypatch.setattr(worker, "PeerWatch", lambda *_: ExitStack())  # test_health.py has it

    def run(size, *, by_hand=False, **sections):
        job = job_for(tmp_path, **{"launch": {"num_ranks": size}, **sections})
        request = PreemptionRequest()

        def rank(world):
            here.world = world
            told, error = Told(world.rank), None
            options = WorkerOptions(tmp_path / "job.json", "the-run", as_events=not by_hand)
            with ExitStack() as stack:
                try:
                    run_rank(job, options, request, told.reporter, stack)
                except Exception as found:  # noqa: BLE001  (is looked at by the test)
                    error = found
            return told, error

        return [rank(SingleRank())] if size == 1 else on_ranks(size, rank)

    here = threading.local()
    real = Registry.load
    monkeypatch.setattr(
        Registry,
        "load",
        lambda self, name: (lambda: OnThreads(here.world)) if name == "threads" else real(self, name),
    )
    return run


class TestARank:
    @pytest.mark.parametrize("size", [1, 2])
    def test_trains_and_tells_how_it_went(self, ranks, size, tmp_path):
        found = ranks(size)

        assert [error for _, error in found] == [None] * size
        told = found[0][0]
        (started,) = told.events("started")
        (summary,) = told.events("summary")
        assert (started["num_parameters"], started["world_size"]) == (2, size)
        assert started["global_batch_size"] == summary["global_batch_size"] == 2 * size
        assert (summary["epochs"], summary["steps"]) == (2, {1: 10, 2: 6}[size])
        assert summary["samples_per_s"] > 0
        assert summary["metrics"].keys() == {"loss"}
        (newest, *_) = list_checkpoints(tmp_path / "runs" / "line" / "checkpoints")
        assert summary["checkpoint"] == str(newest.path)
        for others, _ in found[1:]:
            assert others.events() == []

    def test_reports_the_evaluation_of_the_final_weights_within_an_epoch(self, ranks):
        ((told, error),) = ranks(1, train={"epochs": 9, "max_steps": NUM_SAMPLES // 2 + 2})

        assert error is None
        *_, last = told.events("evaluation")
        (summary,) = told.events("summary")
        assert (last["step"], last["is_within_epoch"]) == (summary["steps"], True)
        assert last["metrics"] == summary["metrics"]

    @pytest.mark.parametrize("size", [1, 2])
    def test_launched_by_hand_keeps_the_events_of_rank_0(self, ranks, size, tmp_path):
        found = ranks(size, by_hand=True)

        (path,) = tmp_path.rglob("events.jsonl")
        assert path.parts[-3:-1] == ("line", "the-run")
        records = list(read_events(path))
        assert [error for _, error in found] == [None] * size
        assert {record.rank for record in records} == {0}
        kinds = [record.event.kind for record in records]
        assert kinds[:3] == ["opened", "targets", "started"]
        assert kinds[-1] == "summary"
        assert kinds.count("started") == 1

    def test_launched_by_hand_trains_on_where_events_cannot_be_kept(self, ranks, tmp_path):
        (tmp_path / "runs" / "line").mkdir(parents=True)
        (tmp_path / "runs" / "line" / "the-run").touch()

        ((told, error),) = ranks(1, by_hand=True, run_dir=str(tmp_path / "runs"))

        assert error is None
        assert "no events.jsonl" in told.text

    def test_started_by_a_launch_leaves_that_to_it(self, ranks, tmp_path):
        ranks(1)

        assert not list(tmp_path.rglob("events.jsonl"))

    def test_says_where_each_rank_can_be_watched(self, ranks):
        (told, _), _ = ranks(2)

        (event,) = told.events("targets")
        addresses = tuple(target["address"] for target in event["targets"])
        assert len(set(addresses)) == 2
        labels = [target["labels"] for target in event["targets"]]
        assert [each["rank"] for each in labels] == ["0", "1"]
        assert {each["run"] for each in labels} == {"the-run"}
        assert {each["training_job"] for each in labels} == {"line"}
        (summary,) = told.events("summary")
        assert summary["metrics_addresses"] == addresses

    def test_serves_no_metrics_when_they_are_not_wanted(self, ranks):
        ((told, _),) = ranks(1, metrics={"enabled": False})

        assert told.events("targets") == []
        assert told.events("summary")[0]["metrics_addresses"] == ()

    def test_goes_on_where_it_ended(self, ranks):
        ranks(1, train={"max_steps": 3})

        ((told, _),) = ranks(1)

        assert told.events("resumed")[0]["step"] == 3
        summary = told.events("summary")[0]
        assert summary["steps"] == 10
        assert summary["samples_per_s"] * summary["seconds"] == pytest.approx(2 * NUM_SAMPLES - 6)

    def test_in_another_world_than_the_one_asked_for_refuses(self, ranks):
        ((told, error),) = ranks(1, launch={"num_ranks": 3})

        assert isinstance(error, WorldError)
        assert "the job asks for 3 ranks, but this world has 1" in str(error)
        assert told.events() == []

    def test_lets_go_of_its_port(self, ranks):
        ((told, _),) = ranks(1)
        (address,) = told.events("summary")[0]["metrics_addresses"]

        with pytest.raises(OSError, match="refused"):
            urllib.request.urlopen(f"http://{address}/metrics", timeout=2)


class TestTheEnd:
    @pytest.mark.parametrize(
        ("error", "code", "is_cause", "has_trace"),
        [
            (UserError("wrong"), 2, True, False),
            (NumericError("nan"), 3, True, False),
            (PeerError("left"), 1, False, False),
            (ValueError("label 11"), 1, True, True),
            (RecursionError(), 1, True, True),
        ],
    )
    def test_is_told_once_with_its_code(self, error, code, is_cause, has_trace):
        told = Told()

        assert worker._report_failure(error, told.reporter) == code

        (failure,) = told.events("failure")
        assert (failure["exit_code"], failure["is_cause"]) == (code, is_cause)
        assert bool(failure["traceback"]) == has_trace
        assert has_trace == failure["message"].startswith(type(error).__name__)

    def test_of_a_long_story_is_short(self):
        told = Told()

        worker._report_failure(ValueError("x" * 10_000), told.reporter)

        (failure,) = told.events("failure")
        assert len(json.dumps(failure)) < 4096

    @pytest.fixture
    def main(self, tmp_path, monkeypatch, capsys):
        """Run a worker in this process, with something in place of what it does."""
        monkeypatch.delenv("HOROVOD_TRAIN_RUN", raising=False)
        path = tmp_path / "job.yaml"
        path.write_text(yaml.safe_dump({"name": "line", "task": "digits", "framework": "numpy"}))

        def run(do, file=path):
            monkeypatch.setattr(worker, "run_rank", do)
            monkeypatch.setattr(worker.streams, "install_dropping_streams", lambda: None)
            monkeypatch.setattr(worker, "load_job", lambda *_, **__: Job(name="line", task="digits"))
            handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
            logger = logging.getLogger("horovod_train")
            logged_to = list(logger.handlers)
            try:
                return worker.main(WorkerOptions(file)), capsys.readouterr().out
            finally:
                for number, handler in handlers.items():
                    signal.signal(number, handler)
                logger.handlers[:], logger.propagate = logged_to, True

        return run

    @pytest.mark.parametrize(
        ("error", "code", "says"),
        [
            (None, 0, ""),
            (PreemptedError("asked to leave"), 75, ""),
            (SystemExit(0), 2, "the task ended this rank with sys.exit(0) before training was done"),
            (SystemExit("because"), 2, "sys.exit('because')"),
            (KeyboardInterrupt(), 130, "interrupted by SIGINT"),
            (UserError("wrong"), 2, "wrong"),
            (GeneratorExit(), 1, "GeneratorExit"),
        ],
    )
    def test_of_every_kind_has_a_code_and_a_word(self, main, error, code, says):
        def do(*_):
            if error is not None:
                raise error

        found, output = main(do)

        assert found == code
        assert says in output
        assert bool(says) == ("error: rank 0 on" in output)

    def test_is_told_before_an_engine_that_never_closes_is_left(self, monkeypatch):
        left, told = threading.Event(), Told()
        codes, told_before = [], []

        class Engine:
            def close(self):
                told_before.extend(told.events())
                assert left.wait(30)

        def leave(code):
            codes.append(code)
            left.set()

        monkeypatch.setattr(worker, "MAX_CLOSE_S", 0.1)
        monkeypatch.setattr(worker, "_leave", leave)
        with pytest.raises(MemoryError), worker.CloseAfterFailure(Engine(), told.reporter):
            raise MemoryError("4 GiB")

        assert codes == [1]
        assert [each["message"] for each in told_before] == ["MemoryError: 4 GiB"]
        assert worker._report_end(MemoryError("4 GiB"), told.reporter) == 1
        assert len(told.events()) == 1, "it is told once"

    @pytest.mark.parametrize("error", [None, PreemptedError("asked to leave"), UserError("wrong")])
    def test_of_an_engine_that_closes_takes_its_time(self, monkeypatch, error):
        closed = []
        monkeypatch.setattr(worker, "MAX_CLOSE_S", 0.2)
        monkeypatch.setattr(worker, "_leave", closed.append)
        with suppress(PreemptedError, UserError), worker.CloseAfterFailure(Closes(closed), Told().reporter):
            if error is not None:
                raise error
        time.sleep(0.5)

        assert closed == ["closed"]
