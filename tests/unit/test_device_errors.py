"""What goes wrong on GPUs is told once, with what it means and what to do."""

from __future__ import annotations

import io
import types

import pytest
import torch

from horovod_train.collectives.base import CollectiveLog
from horovod_train.collectives.horovod import translated
from horovod_train.config.schema import Job, Strategy
from horovod_train.errors import DeviceMemoryError, GpuError, KernelError, NcclError, PeerError, UserError
from horovod_train.events.wire import Reporter
from horovod_train.frameworks.base import explained_by
from horovod_train.frameworks.torch import device
from horovod_train.frameworks.torch.device import TorchBased, device_error, what_to_change
from horovod_train.worker import _report_failure

JOB = Job.model_validate({"name": "j", "task": "own:Task", "train": {"batch_size_per_rank": 128}})
ENTRY = CollectiveLog().begin("horovod_train.bucket.0.1", 1024)


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 70 * 2**30)
    monkeypatch.setattr(device, "_total_bytes", lambda: 80 * 2**30)


class TestNccl:
    """D4: it was told as another rank that had left."""

    @pytest.mark.parametrize(
        ("said", "hint"),
        [
            (
                "invalid usage: Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 4a000",
                "share_gpus: true",
            ),
            ("unhandled system error: Call to connect to 10.0.0.2<1> failed", "launch.network_interface"),
            (
                "unhandled system error: Error while creating shared memory segment /dev/shm/nccl-x (size 9)",
                "launch.kubernetes.shm_size",
            ),
            (
                "unhandled cuda error: CUDA driver version is insufficient for CUDA runtime version",
                "update it",
            ),
            ("unhandled cuda error: Cuda failure 719", "nvidia-smi"),
            ("Cuda failure 2 'out of memory'", "lower train.batch_size_per_rank"),
            ("NCCL version 2.29.7+cuda13.0 internal error", "see the log of NCCL"),
            ("internal error", "see the log of NCCL"),
        ],
    )
    def test_an_error_is_its_own_cause_with_nccls_words(self, said, hint):
        error = translated(RuntimeError(f"NCCL: ncclCommInitRank failed: {said}"), ENTRY, 0)

        assert isinstance(error, NcclError)
        assert error.cause == "nccl"
        assert said in error.message
        assert "horovod_train.bucket.0.1" in error.message
        assert hint in error.hint
        assert "NCCL_DEBUG=INFO in launch.env" in error.hint

    def test_what_only_notices_that_a_rank_is_gone_is_no_cause(self):
        said = "NCCL: async error: remote process exited or there was a network error"

        gone, left = (
            translated(RuntimeError(text), ENTRY, 0) for text in (said, "Horovod has been shut down")
        )

        assert isinstance(gone, PeerError)
        assert gone.cause == "nccl"  # where no rank is gone, it is a link
        assert isinstance(left, PeerError)
        assert left.cause == "lost"

    @pytest.mark.parametrize(
        "said",
        [
            "cudaEventRecord failed: uncorrectable ECC error encountered",
            "cudaEventQuery failed: unspecified launch failure",
        ],
    )
    def test_a_gpu_that_fails_while_horovod_uses_it_is_the_cause(self, said):
        error = translated(RuntimeError(said), ENTRY, 3)

        assert isinstance(error, GpuError)
        assert f"rank 3's GPU: {said}: " in error.message


class TestOutOfMemory:
    @pytest.mark.parametrize(
        "said",
        [
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes\nframe #0: c10",
            "std::bad_alloc",
        ],
    )
    def test_in_the_thread_of_the_engine_is_not_told_as_another_rank_that_left(self, said):
        error = translated(RuntimeError(said), ENTRY, 3)

        assert isinstance(error, DeviceMemoryError)
        assert error.message.startswith("rank 3 is out of memory, in horovod_train.bucket.0.1")
        assert said.splitlines()[0] in error.message
        assert "frame" not in error.message

    def test_is_told_with_rank_peak_and_what_to_change(self):
        raised = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has ...")
        error = device_error(raised, JOB, 3)

        assert isinstance(error, DeviceMemoryError)
        assert error.message == (
            "rank 3's GPU is out of memory: peak of tensors 70.0 GiB of 80.0 GiB, failed request 2.50 GiB"
        )
        assert "train.batch_size_per_rank: 64 and train.accumulation_steps: 2" in error.hint
        assert "train.precision: bf16" in error.hint
        assert "train.activation_checkpointing" in error.hint

    @pytest.mark.parametrize(
        ("raised", "more"),
        [
            (
                RuntimeError(
                    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate "
                    "memory: you tried to allocate 2147483648 bytes. Error code 12 (Cannot allocate memory)"
                ),
                ", and 2.0 GiB more were wanted",
            ),
            (MemoryError(), ""),
        ],
    )
    def test_of_the_host_is_told_with_the_limit(self, monkeypatch, raised, more):
        used = types.SimpleNamespace(ru_maxrss=3 * 2**20)
        monkeypatch.setattr(device.resource, "getrusage", lambda _: used)
        limits = {device.resource.RLIMIT_DATA: 4 * 2**30, device.resource.RLIMIT_AS: -1}
        monkeypatch.setattr(device.resource, "getrlimit", lambda kind: (limits[kind], -1))
        error = device_error(raised, JOB, 2)

        assert isinstance(error, DeviceMemoryError)
        assert error.message == (
            "rank 2 is out of memory: its process took 3.0 GiB at most, its limit (ulimit -d, -v) is 4.0 GiB"
            + more
        )
        assert "horovod-train plan JOB --memory" in error.hint
        assert "PYTORCH_CUDA" not in error.hint

    def test_names_what_can_still_be_changed(self):
        job = Job.model_validate(
            {
                "name": "j",
                "task": "own:Task",
                "train": {"batch_size_per_rank": 1, "precision": "bf16", "activation_checkpointing": ["a"]},
            }
        )

        assert len(what_to_change(job)) == 2
        sharded = job.model_copy(update={"strategy": Strategy(name="fsdp")})
        assert len(what_to_change(sharded)) == 1
        assert what_to_change(sharded, is_gpu=False) == []

    @pytest.mark.parametrize(("size", "smaller", "pieces"), [(9, 3, 3), (7, 1, 7), (10, 5, 2)])
    def test_pieces_make_the_same_global_batch(self, size, smaller, pieces):
        train = {"batch_size_per_rank": size, "accumulation_steps": 2}
        job = Job.model_validate({"name": "j", "task": "own:Task", "train": train})

        assert (
            f"train.batch_size_per_rank: {smaller} and train.accumulation_steps: {2 * pieces}"
            in what_to_change(job)[0]
        )

    def test_what_keeps_memory_of_its_own_can_be_left_out(self):
        fields = {"train": {"cuda_graph": True}, "allreduce": {"wire_dtype": "bf16"}}
        job = Job.model_validate({"name": "j", "task": "own:Task", **fields})
        changes = "; ".join(what_to_change(job))

        assert "train.cuda_graph: false" in changes
        assert "allreduce.wire_dtype: fp32" in changes

    @pytest.mark.parametrize(
        "said",
        [
            "CUDA error: out of memory",
            "CUDA driver error: out of memory",
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        ],
    )
    def test_of_the_driver_is_told_with_who_may_have_it(self, said):
        error = device_error(RuntimeError(said), JOB, 0)

        assert isinstance(error, DeviceMemoryError)
        assert "`nvidia-smi` shows the processes that use it" in error.hint
        assert "train.batch_size_per_rank: 64" in error.hint

    def test_has_no_traceback(self):
        out = io.StringIO()
        raised = torch.OutOfMemoryError("CUDA out of memory.")
        with pytest.raises(DeviceMemoryError) as told, explained_by(TorchBased(), JOB, 0):
            raise raised

        code = _report_failure(told.value, Reporter(0, as_json=False, stream=out))

        assert code == 2
        assert "Traceback" not in out.getvalue()
        assert out.getvalue().count("out of memory") == 1


class TestFaults:
    @pytest.mark.parametrize(
        ("said", "meaning"),
        [
            ("uncorrectable ECC error encountered", "its memory has failed"),
            ("unspecified launch failure", "XID 79"),
            ("an illegal memory access was encountered", "an address that is not allocated (XID 13 or 31)"),
            ("something new", "the GPU or its driver has failed"),
        ],
    )
    def test_of_a_gpu_are_a_cause_of_their_own(self, said, meaning):
        error = device_error(RuntimeError(f"CUDA error: {said}\nCUDA kernel errors might be ..."), JOB, 1)

        assert isinstance(error, GpuError)
        assert error.cause == "gpu"
        assert f"rank 1's GPU: CUDA error: {said}: " in error.message
        assert meaning in error.message
        assert "dmesg | grep -i xid" in error.hint

    @pytest.mark.parametrize(
        ("said", "kind", "code", "meaning"),
        [
            (
                "CUDA error: device-side assert triggered",
                KernelError,
                1,
                "a label or an index that is out of",
            ),
            ("CUDA error: no kernel image is available for execution", UserError, 2, "too old or too new"),
            (
                "The NVIDIA driver on your system is too old (found version 12020)",
                GpuError,
                1,
                "CUDA 13.0: 580",
            ),
            ("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", GpuError, 1, "the GPU or its driver"),
        ],
    )
    def test_that_are_not_the_gpus_are_told_as_what_they_are(self, said, kind, code, meaning):
        error = device_error(RuntimeError(said), JOB, 1)

        assert type(error) is kind
        assert error.exit_code == code
        assert meaning in error.message

    def test_of_something_else_are_left_as_they_are(self):
        assert device_error(RuntimeError("shapes do not match"), JOB, 0) is None
        assert device_error(ValueError("CUDA error: told by somebody"), JOB, 0) is None
        with pytest.raises(KeyError), explained_by(TorchBased(), JOB, 0):
            raise KeyError("x")
        with pytest.raises(RuntimeError, match="no device"), explained_by(object(), JOB, 0):
            raise RuntimeError("no device")
