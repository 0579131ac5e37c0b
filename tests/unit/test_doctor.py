"""From readings to findings: one line each, with the fix."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from support.hosts import GOOD as GOOD_FACTS

from horovod_train.checks import hosts as hosts_module
from horovod_train.checks.hosts import (
    EngineFacts,
    Finding,
    Gpu,
    HostDetails,
    cells_of,
    clock,
    examine,
    examine_host,
    report,
)
from horovod_train.events.types import AllreduceTime, PairTime
from horovod_train.launch.doctor import AllreduceBenchmark, History, compare, judge
from horovod_train.launch.hosts.agent import HostActions
from horovod_train.launch.hosts.host_group import result_of

GOOD = HostDetails(
    **asdict(replace(GOOD_FACTS, shared_memory_bytes=8 << 30)),
    python_version="3.11.7",
    engine=EngineFacts(horovod="0.28.1", wanted="0.28.1", build="abc", nccl="", patches_differ=[]),
    names={"b": "10.0.0.2"},
    disks={"/runs": 100 << 30},
    open_files=65536,
    locked_memory_bytes=-1,
    load=0.1,
    gpus=[],
    gpu_links=[],
    gpu_peers=[],
    infiniband=[],
    speeds_mbit_s={},
    busy_ports=[],
)
GPU = Gpu(index="0", name="H100", driver_version="580", uuid="u")


def changed(**changes):
    return replace(GOOD, **changes)


def engine(**changes):
    return replace(GOOD.engine, **changes)


def findings(readings, device="auto", ranks=2):
    return {f.what: f for f in examine({"a": readings}, {"a": ranks}, device)}


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (None, {"own.patch", "other.patch"}),
        ({"patches": {"own.patch": "a", "other.patch": "b"}}, set()),
        ({"patches": {"own.patch": "old", "other.patch": "b"}}, {"own.patch"}),
        ({"patches": {"own.patch": "a", "other.patch": "b", "gone.patch": "c"}}, {"gone.patch"}),
    ],
)
def test_an_engine_of_other_patches_is_noticed(monkeypatch, plan, expected):
    monkeypatch.setattr(hosts_module, "own_patches", lambda: {"own.patch": "a", "other.patch": "b"})
    monkeypatch.setattr(hosts_module, "installed_plan", lambda: plan)

    assert set(examine_host([], [], []).engine.patches_differ) == expected


def test_a_good_host_is_fine():
    assert {finding.level for finding in findings(GOOD).values()} == {"ok"}


@pytest.mark.parametrize(
    ("changes", "what", "level", "fix"),
    [
        ({"engine": engine(horovod="")}, "engine", "fail", "engine build"),
        ({"engine": engine(build=None)}, "engine", "fail", "engine build"),
        (
            {"engine": engine(patches_differ=["0014-initialize-again.patch"])},
            "engine",
            "warn",
            "engine build",
        ),
        ({"mpi": ""}, "mpi", "warn", "engine build"),
        ({"names": {"b": ""}}, "names", "fail", "/etc/hosts"),
        ({"names": {"b": "127.0.1.1"}}, "names", "fail", "remove the line"),
        ({"disks": {"/runs": 1 << 30}}, "disk", "warn", "run_dir"),
        ({"shared_memory_bytes": 64 << 20}, "shared memory", "warn", "--shm-size"),
        ({"open_files": 1024}, "open files", "warn", "ulimit -n"),
        ({"cores": 1}, "cores", "warn", "at most 1"),
        ({"load": 30.0}, "cores", "warn", "top"),
        ({"gpus": [GPU]}, "gpu", "fail", "launch.share_gpus: true"),
        ({"gpus": [GPU, GPU]}, "nccl", "warn", "engine check"),
        ({"gpus": [GPU, replace(GPU, ecc_errors="3")]}, "gpu ecc", "warn", "nvidia-smi"),
        ({"gpus": [GPU, GPU], "gpu_links": ["NV18"]}, "gpu links", "ok", ""),
        ({"gpus": [GPU, GPU], "gpu_links": ["PIX", "SYS"]}, "gpu links", "warn", "through the CPU"),
        ({"gpus": [GPU, GPU], "gpu_peers": ["NS", "OK"]}, "gpu peers", "warn", "IOMMU"),
        ({"gpus": [replace(GPU, clock="210 MHz", max_clock="1980 MHz")]}, "gpu clocks", "ok", ""),
        ({"busy_ports": [9400]}, "ports", "warn", "metrics.port"),
    ],
)
def test_what_is_wrong_is_found_with_its_fix(changes, what, level, fix):
    found = findings(changed(**changes))[what]

    assert (found.level, found.host) == (level, "a")
    assert fix in found.fix


def test_locked_memory_matters_with_infiniband_only():
    readings = changed(locked_memory_bytes=65536)
    assert "locked memory" not in findings(readings)

    assert findings(replace(readings, infiniband=["mlx5_0"]))["locked memory"].level == "fail"


def test_gpus_that_a_job_wants_and_are_not_there_keep_it_from_running():
    assert findings(GOOD, device="cuda")["gpu"].level == "fail"


def test_gpus_that_are_shared_are_enough():
    (found,) = (
        f for f in examine({"a": changed(gpus=[GPU])}, {"a": 2}, "auto", share_gpus=True) if f.what == "gpu"
    )

    assert found.level == "ok"
    assert found.found.endswith("shared by 2 ranks")


def test_gpus_of_several_models_are_no_reason_not_to_train():
    other = changed(gpus=[replace(GPU, name="A100")], engine=engine(build="another"))

    hosts = {"a": changed(gpus=[GPU]), "b": other}
    found = {f.what: f for f in examine(hosts, {"a": 1, "b": 1}, "auto") if not f.host}

    assert found["gpu"].level == "warn"
    assert found["engine"].level == "fail"
    assert "HOROVOD_BUILD_CUDA_CC_LIST" in found["engine"].fix


def test_hosts_that_differ_are_named_with_values():
    other = changed(python_version="3.12.1")

    found = [f for f in examine({"a": GOOD, "b": other}, {"a": 1, "b": 1}, "auto") if not f.host]

    assert [(f.what, f.level, f.found) for f in found] == [
        ("python", "fail", "differs: 3.11.7 on a; 3.12.1 on b")
    ]


def test_clocks():
    assert [f.level for f in clock({"a": 0.01, "b": -0.02}, 5)] == ["ok", "ok"]
    assert [f.level for f in clock({"a": 0.0, "b": 60.0}, 5)] == ["fail", "fail"]


def time_of(via, size_bytes, seconds):
    return AllreduceTime(via=via, size_bytes=size_bytes, seconds=seconds, bytes_per_s=size_bytes / seconds)


MEASURED = AllreduceBenchmark(
    [
        time_of("horovod", 1024, 0.001),
        time_of("horovod", 1 << 26, 0.1),
        time_of("mpi4py", 1 << 26, 0.08),
    ]
)


def judged(measured=MEASURED, link_mbit_s=0, history=()):
    return {finding.what: finding for finding in judge(measured, link_mbit_s, history)}


class TestNetwork:
    def test_is_compared_with_its_link(self):
        assert judged(link_mbit_s=10_000)["link"].level == "ok"  # 0.67 of 1.25 GB/s
        assert judged(link_mbit_s=100_000)["link"].level == "warn"
        assert "link" not in judged()

    def test_is_compared_with_mpi_alone(self):
        assert judged()["reference"].found == "mpi4py alone reaches 0.84 GB/s"

    @pytest.mark.parametrize(("before", "level"), [(0.7e9, "ok"), (2e9, "warn")])
    def test_is_compared_with_the_last_time(self, before, level):
        assert judged(history=[{"bytes_per_s": before, "unix_time_s": 0}])["history"].level == level

    def test_names_the_slow_pair(self):
        names = [("a", "b"), ("a", "c"), ("b", "c")]
        alike = [PairTime(hosts=pair, seconds=0.003) for pair in names]
        one_slow = [*alike[:2], PairTime(hosts=("b", "c"), seconds=0.04)]

        assert judged(AllreduceBenchmark(MEASURED.times, alike))["pairs"].level == "ok"
        assert judged(AllreduceBenchmark(MEASURED.times, one_slow))["slow pair"].found.startswith(
            "b and c: 40.00 ms"
        )

    def test_is_shown_as_a_table(self):
        lines = list(MEASURED.table())

        assert lines[0].split() == ["all-reduce", "horovod", "mpi4py"]
        assert lines[1].split() == ["1", "KiB", "1.000", "ms", "0.00", "GB/s"]  # mpi4py has no such row
        assert lines[2].split()[-2:] == ["0.84", "GB/s"]

    def test_is_remembered_for_these_hosts(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
        History(["a:1", "b:1"], "mpi").add(MEASURED)

        (entry,) = History(["b:1", "a:1"], "mpi").read()
        assert entry["bytes_per_s"] == pytest.approx((1 << 26) / 0.1)
        assert History(["a:1", "b:1"], "gloo").read() == []

    def test_survives_a_line_that_was_not_written_completely(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
        history = History(["a:1"], "mpi")
        history.add(MEASURED)
        (file,) = tmp_path.rglob("*.jsonl")
        broken = '{"unix_time_s": 1.0, "bytes_\n{"bytes_per_s": 0.0, "unix_time_s": 1.0}\n'
        file.write_text(broken + file.read_text())

        (entry,) = history.read()

        assert [found.level for found in compare(entry["bytes_per_s"], history.read())] == ["ok"]


def test_this_machine_can_be_read(tmp_path):
    readings = examine_host([str(tmp_path / "not" / "there")], ["localhost"], [1])

    assert readings.names == {"localhost": "127.0.0.1"}
    assert next(iter(readings.disks.values())) > 0
    assert readings.engine.horovod == readings.engine.wanted
    sent = json.loads(json.dumps(readings, default=asdict))
    assert result_of(HostActions.examine, sent) == readings


def test_a_report_ends_with_what_it_comes_to():
    *lines, last = report([Finding("a", "disk", "full", "fail", "make room"), Finding("a", "mpi", "4.1.8")])

    assert lines[0].endswith("fix: make room")
    assert last == "2 findings: 1 prevent jobs from running, 0 are warnings"


def test_links_of_gpus_are_what_the_table_has_between_them():
    table = (
        "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m\n"
        "GPU0\t X \tNV12\tSYS\tPIX\t0-31\t0\n"
        "GPU1\tNV12\t X \tSYS\tPHB\t0-31\t0\n"
        "GPU2\tSYS\tSYS\t X \tSYS\t32-63\t1\n"
        "NIC0\tPIX\tPHB\tSYS\t X \n\nLegend:\n  X    = Self\n"
    )

    assert cells_of(table) == ["NV12", "SYS"]
    assert cells_of("No devices were found\n") == []
    assert cells_of("") == []
