"""What is read of hosts and GPUs. NVML is played by ``tests/fakes/pynvml.py``, which computes a GPU."""

from __future__ import annotations

import json
import logging
import mmap
import os
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from prometheus_client import generate_latest

from horovod_train.collectives.base import DeviceWork, SingleRank
from horovod_train.config.schema import Job
from horovod_train.events.file import EventsFile
from horovod_train.events.types import Progress, Summary
from horovod_train.frameworks.torch.device import TorchBased
from horovod_train.frameworks.torch.framework import wants_flops
from horovod_train.frameworks.torch.sizes import FlopCounter
from horovod_train.telemetry import recorder as recorder_module
from horovod_train.telemetry import samplers as sampler_module
from horovod_train.telemetry.catalog import GpuExchangeRecord
from horovod_train.telemetry.recorder import (
    MAX_RUNS,
    Recorder,
    baseline_samples_per_s,
    record_scaling_baseline,
    watch_device,
    watch_exchange,
    watch_waiting,
)
from horovod_train.telemetry.samplers import (
    THROTTLE_REASONS,
    GpuSampler,
    gpu_sampler,
    peak_flops,
    read_memory,
)

FAKES = Path(__file__).parents[1] / "fakes"


@pytest.fixture
def nvml(monkeypatch):
    """The fake library, new for each test."""
    monkeypatch.syspath_prepend(FAKES)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    import pynvml

    yield pynvml
    monkeypatch.delitem(sys.modules, "pynvml")


def digits(nvml):
    return nvml.UUID.removeprefix("GPU-").replace("-", "")


def test_memory_of_the_process_is_what_the_system_says():
    before = psutil.Process().memory_info().rss
    reading = read_memory()
    size_bytes = 64 * 2**20
    with mmap.mmap(-1, size_bytes) as held:  # an array may reuse memory that the process has freed before
        held.write(b"x" * size_bytes)

        assert reading.resident_bytes == pytest.approx(before, rel=0.05)
        assert read_memory().resident_bytes - reading.resident_bytes > 0.9 * size_bytes
        assert read_memory().peak_bytes >= read_memory().resident_bytes * 0.99


class TestGpus:
    def test_are_read_in_base_units(self, nvml):
        nvml.GPUS[nvml.UUID].load = 0.25
        reading = GpuSampler(nvml, digits(nvml))()

        assert reading.utilization == 0.25
        assert reading.power_w == pytest.approx(70 + 0.25 * 630)
        assert reading.temperature_c == round(30 + 0.08 * reading.power_w)
        assert reading.clock_hz == 1.98e9
        assert reading.memory_used_bytes == 20 * 2**30
        assert reading.memory_total_bytes == 80 * 2**30
        assert reading.throttled == dict.fromkeys(THROTTLE_REASONS, 0)
        assert reading.ecc_errors == {"corrected": 0, "uncorrected": 0}

    def test_that_are_hot_say_why_they_are_slow(self, nvml):
        nvml.GPUS[nvml.UUID].load = 1.0
        reading = GpuSampler(nvml, digits(nvml))()

        assert reading.clock_hz == 1.2e9
        assert {reason for reason, is_on in reading.throttled.items() if is_on} == {"thermal_software"}

    def test_count_errors_from_when_the_rank_began(self, nvml, monkeypatch):
        monkeypatch.setattr(sampler_module, "MIN_INTERVAL_S", 0.0)
        gpu = nvml.GPUS[nvml.UUID]
        gpu.errors = [1000, 7]
        sampler = GpuSampler(nvml, digits(nvml))
        gpu.errors = [1003, 7]

        assert [sampler().ecc_errors, sampler().ecc_errors] == [
            {"corrected": 3, "uncorrected": 0},
            {"corrected": 0, "uncorrected": 0},
        ]

    def test_leave_out_what_they_do_not_tell(self, nvml):
        nvml.GPUS[nvml.UUID].has_ecc = False

        assert GpuSampler(nvml, digits(nvml))().ecc_errors == {}

    def test_are_asked_once_a_second_at_most(self, nvml):
        sampler = GpuSampler(nvml, digits(nvml))

        assert sampler() is not None
        assert sampler() is None

    def test_without_a_gpu_there_is_nothing_and_no_word(self, caplog):
        with caplog.at_level(logging.WARNING, "horovod_train"):
            assert gpu_sampler("") is None
        assert not caplog.text

    def test_without_a_driver_there_is_nothing_and_a_word(self, nvml, monkeypatch, caplog):
        monkeypatch.setenv("FAKE_GPU_DRIVER", "none")
        with caplog.at_level(logging.WARNING, "horovod_train"):
            assert gpu_sampler(digits(nvml)) is None
        assert "Driver Not Loaded" in caplog.text

    def test_without_the_library_there_is_nothing_and_a_word(self, monkeypatch, caplog):
        monkeypatch.setitem(sys.modules, "pynvml", None)
        with caplog.at_level(logging.WARNING, "horovod_train"):
            assert gpu_sampler("0" * 32) is None
        assert "nvidia-ml-py" in caplog.text

    def test_become_metrics_of_the_rank_with_their_peak(self, nvml):
        recorder = Recorder("job", "run", SingleRank(), 1)
        job = Job(name="j", task="digits")
        watch_device(job, recorder, digits(nvml), lambda: (10, None, 30))
        text = generate_latest(recorder.registry).decode()

        assert 'horovod_train_gpu_throttled{host="' in text
        assert "horovod_train_device_memory_peak_bytes{" in text
        assert "device_memory_reserved_bytes{" not in text, "the framework does not tell"
        assert " 6.7e+013" in text or " 6.7e+13" in text, "fp32 on an H100"


def test_a_sampler_that_fails_is_left_out_and_the_rest_goes_on(caplog):
    recorder = Recorder("job", "run", SingleRank(), 1)
    recorder.sample(lambda: 1 / 0)
    recorder.sample(read_memory)
    with caplog.at_level(logging.WARNING, "horovod_train"):
        texts = [generate_latest(recorder.registry).decode() for _ in range(2)]

    assert all("horovod_train_resident_memory_bytes{" in text for text in texts)
    assert caplog.text.count("ZeroDivisionError") == 1


@pytest.mark.parametrize(
    ("name", "precision", "expected"),
    [
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H100 80GB HBM3", "fp16", 989e12),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5e12),
        ("NVIDIA L40S", "bf16", 362e12),
        ("NVIDIA L4", "bf16", 121e12),
        ("NVIDIA GeForce RTX 5090", "bf16", None),
    ],
)
def test_the_peak_of_known_gpus_is_known(name, precision, expected):
    assert peak_flops(name, precision) == expected


def test_a_framework_on_a_cpu_has_no_device_memory():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")

    assert TorchBased().device_memory() is None
    assert TorchBased().gpu_uuid() == ""


class TestFlops:
    @pytest.mark.parametrize(("batch", "inputs", "outputs"), [(8, 16, 4), (5, 3, 7)])
    def test_are_those_of_the_products_of_matrices(self, batch, inputs, outputs):
        """A linear layer: 2 b i o forward, as many for the weight's gradient, as many for the input's."""
        layer = torch.nn.Linear(inputs, outputs)
        counter = FlopCounter()
        for _ in range(3):
            with counter.counting(batch):
                layer(torch.ones(batch, inputs, requires_grad=True)).sum().backward()

        assert counter.of_step() == 3 * 2 * batch * inputs * outputs

    def test_of_other_steps_follow_their_samples(self):
        layer, counter = torch.nn.Linear(4, 4), FlopCounter()
        seen = []
        for batch in (6, 6, 3, 0):
            with counter.counting(batch):
                layer(torch.ones(batch, 4)).sum().backward()
            seen.append(counter.of_step())

        per_sample = 2 * 2 * 4 * 4  # the input needs no gradient
        assert seen == [None, 6 * per_sample, 3 * per_sample, 0]

    def test_of_nothing_that_can_be_counted_are_unknown(self):
        counter = FlopCounter()
        for _ in range(3):
            with counter.counting(4):
                torch.ones(4).exp()

        assert counter.of_step() is None

    @pytest.mark.parametrize(
        ("device", "job", "expected"),
        [
            ("cuda", {}, True),
            ("cpu", {}, False),
            ("cpu", {"metrics": {"device_peak_flops": 1e12}}, True),
            ("cuda", {"metrics": {"enabled": False}}, False),
            ("cuda", {"train": {"compile": {}}}, False),
        ],
    )
    def test_are_counted_where_there_is_something_to_compare_them_with(self, device, job, expected):
        assert wants_flops(Job(name="j", task="digits", **job), device) is expected


class TestWhatTheEngineCounts:
    def test_is_counted_once_however_often_somebody_asks(self):
        counted = iter([None, (0, 0.0), (1000, 0.5), (1000, 0.5), (1500, 0.75), (1500, 0.75)])
        recorder = Recorder("j", "r", SingleRank(), 1)
        watch_exchange(recorder, lambda: next(counted))
        for _ in range(5):
            generate_latest(recorder.registry)
        text = generate_latest(recorder.registry).decode()

        assert re.search(r"horovod_train_exchanged_bytes_total{.*} 1500.0", text)
        assert re.search(r"horovod_train_exchange_seconds_total{.*} 0.75", text)

    def test_on_gpus_is_another_metric(self):
        recorder = Recorder("j", "r", SingleRank(), 1)
        watch_exchange(recorder, lambda: (4096, 0.25), GpuExchangeRecord)
        text = generate_latest(recorder.registry).decode()

        assert re.search(r"horovod_train_gpu_exchanged_bytes_total{.*} 4096.0", text)
        assert re.search(r"horovod_train_gpu_exchange_seconds_total{.*} 0.25", text)
        assert not re.search(r"^horovod_train_exchange_seconds_total{", text, re.MULTILINE)


class TestWhoIsWaitedFor:
    def test_is_at_zero_while_others_wait(self, monkeypatch):
        monkeypatch.setattr(recorder_module, "monotonic", lambda: 100.0)
        for since_s, expected in ((None, "0.0"), (17.5, "82.5")):
            recorder = Recorder("j", "r", SingleRank(), 1)
            watch_waiting(recorder, SimpleNamespace(waiting_since_s=since_s, waiting_in=None))
            text = generate_latest(recorder.registry).decode()

            assert re.search(rf"horovod_train_waiting_now_seconds{{.*}} {expected}\n", text)

    @pytest.mark.parametrize(("phase", "expected"), [("backward", "0.0"), ("allreduce_wait", "82.5")])
    def test_is_at_zero_while_its_own_gpu_is_busy(self, monkeypatch, phase, expected):
        monkeypatch.setattr(recorder_module, "monotonic", lambda: 100.0)
        recorder = Recorder("j", "r", SingleRank(), 1)
        entry = DeviceWork(lambda: phase)
        watch_waiting(recorder, SimpleNamespace(waiting_since_s=17.5, waiting_in=entry))
        text = generate_latest(recorder.registry).decode()

        assert re.search(rf"horovod_train_waiting_now_seconds{{.*}} {expected}\n", text)


class TestBaseline:
    def run(self, folder, name, job, *, ranks=1, rates=(100.0, 110.0, 90.0), is_done=True, stamp=None):
        log_dir = folder / name / "run"
        log_dir.mkdir(parents=True)
        (log_dir / "job.json").write_text(json.dumps(job.model_dump(mode="json")))
        events = EventsFile(log_dir / "events.jsonl")
        for rate in rates:
            events.write(
                Progress(
                    step=1,
                    num_steps=2,
                    epoch=0,
                    num_epochs=1,
                    loss=0.0,
                    lr=0.1,
                    samples_per_s=rate,
                    eta_s=1.0,
                ),
                0,
            )
        if is_done:
            events.write(summary(ranks), 0)
        events.close()

    @pytest.fixture
    def job(self):
        return Job(name="wide", task="digits", train={"epochs": 30}, launch={"num_ranks": 4})

    def alone(self, **changes):
        return Job.model_validate({"name": "alone", "task": "digits", "train": {"epochs": 1}, **changes})

    def test_is_the_middle_of_what_one_rank_of_the_same_job_achieved(self, tmp_path, job):
        self.run(tmp_path, "alone", self.alone())

        assert baseline_samples_per_s(job, tmp_path) == 100.0

    def test_of_a_short_run_is_its_summary(self, tmp_path, job):
        self.run(tmp_path, "alone", self.alone(), rates=())

        assert baseline_samples_per_s(job, tmp_path) == 77.0

    def test_is_of_the_newest_run(self, tmp_path, job):
        for number, rate in enumerate((50.0, 70.0, 60.0)):
            self.run(tmp_path, f"alone-{number}", self.alone(), rates=(rate,) * 3)
            events = tmp_path / f"alone-{number}" / "run" / "events.jsonl"
            os.utime(events, (1000 + number, 1000 + number))

        assert baseline_samples_per_s(job, tmp_path) == 60.0

    def test_runs_of_several_ranks_are_not_read_to_their_beginning(self, tmp_path, job, monkeypatch):
        self.run(tmp_path, "other", self.alone(), ranks=2)
        monkeypatch.setattr(recorder_module, "read_events", lambda path: 1 / 0)

        assert baseline_samples_per_s(job, tmp_path) is None

    @pytest.mark.parametrize(("rank", "size"), [(0, 2), (1, 2), (0, 1)])
    def test_is_looked_for_by_rank_0_of_several(self, job, rank, size, monkeypatch):
        looked = []
        monkeypatch.setattr(recorder_module, "baseline_samples_per_s", lambda *_: looked.append(rank))
        before = set(threading.enumerate())
        record_scaling_baseline(job, SingleRank(rank, size), Recorder("j", "r", SingleRank(), 1))
        for thread in set(threading.enumerate()) - before:
            thread.join()

        assert looked == ([0] if (rank, size) == (0, 2) else [])

    @pytest.mark.parametrize(
        "kept",
        [
            {"ranks": 2},
            {"is_done": False},
            {"job": {"train": {"batch_size_per_rank": 7}}},
            {"job": {"task": "vit-digits"}},
            {"job": {"task_args": {"width": 3}}},
        ],
    )
    def test_others_do_not_count(self, tmp_path, job, kept):
        self.run(tmp_path, "other", self.alone(**kept.pop("job", {})), **kept)

        assert baseline_samples_per_s(job, tmp_path) is None

    def test_damaged_and_foreign_files_are_passed_over(self, tmp_path, job):
        self.run(tmp_path, "alone", self.alone())
        for name, text in (("a", "{"), ("b", "[]"), ("c", '{"framework": 1}'), ("d", "\0")):
            (tmp_path / name / "run").mkdir(parents=True)
            (tmp_path / name / "run" / "events.jsonl").write_text(text)
            (tmp_path / name / "run" / "job.json").write_text(text)

        assert baseline_samples_per_s(job, tmp_path) == 100.0
        assert baseline_samples_per_s(job, tmp_path / "nowhere") is None
        assert MAX_RUNS == 100


def progress(rate):
    return Progress(
        step=1, num_steps=2, epoch=0, num_epochs=1, loss=0.0, lr=0.1, samples_per_s=rate, eta_s=1.0
    )


def summary(ranks):
    return Summary(
        job="x", epochs=1.0, steps=2, seconds=1.0, metrics={}, samples_per_s=77.0, world_size=ranks,
        global_batch_size=32, lr_scaling="linear", base_lr=0.1, reference_batch_size=32, peak_lr=0.1,
        metrics_addresses=(), checkpoint="",
    )  # fmt: skip
