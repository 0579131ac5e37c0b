"""Jobs on the MPI libraries that sites have: Open MPI 4 and 5, MPICH 4 and 5, and Intel MPI."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from support.checkpoints import arrays, newest
from support.cluster import cluster
from support.launching import PROGRAMS, TIMEOUT_S, cli, environment, results, variables_of, write_job
from support.mpis import NAMES, each, programs_of
from support.reference import joint_batch_weights
from support.running import Running
from support.waiting import wait_until

pytestmark = pytest.mark.ranks
OTHERS = tuple(name for name in NAMES if name != "openmpi4")


@pytest.fixture
def programs(mpi):
    return programs_of(mpi)


def job(folder, task="Noted", **sections):
    """A job of PyTorch with loader processes, which takes a few seconds."""
    launch = {"num_ranks": 2, "launcher": "mpirun", "grace_s": 10, **sections.pop("launch", {})}
    return write_job(
        folder / "job.yaml",
        **{
            "task": f"{PROGRAMS / 'tasks.py'}:{task}",
            "task_args": {"notes": str(folder), "pause_s": 0.02},
            "run_dir": str(folder / "runs"),
            "train": {"epochs": 6, "batch_size_per_rank": 4},
            "optimizer": {"name": "adam"},
            "checkpoint": {"every": [1, "5 steps"], "keep_last": 100},
            "launch": launch,
            **sections,
        },
    )


ENDLESS = {"train": {"epochs": 5000, "batch_size_per_rank": 4}}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The state of a job that ends undisturbed, on the MPI library of all other tests."""
    folder = tmp_path_factory.mktemp("undisturbed")
    cli("run", str(job(folder)), cwd=folder)
    return arrays(newest(folder, "test"))


@pytest.mark.campaign
@each(OTHERS)
def test_a_job_that_is_resumed_after_a_kill_is_bit_for_bit_the_undisturbed_one(
    tmp_path, mpi, programs, undisturbed
):
    path = str(job(tmp_path))
    killed = cli("run", path, "--set", "task_args.kill='1:17'", cwd=tmp_path, programs=programs, check=False)
    resumed = cli("run", path, cwd=tmp_path, programs=programs)

    assert killed.returncode == 1
    assert re.search(r"rank 1 on \S+ was killed by signal 9, before it could say why", killed.stderr)
    assert "resumed from" in resumed.stdout
    assert arrays(newest(tmp_path, "test")) == undisturbed


@pytest.mark.campaign
@each(OTHERS)
def test_a_preempted_job_listens_on_loopback_is_saved_and_ends_with_75(tmp_path, mpi, programs):
    running = Running(tmp_path, job(tmp_path), 2, programs=programs)
    addresses = {
        connection.laddr.ip
        for process in running.all
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    running.process.send_signal(signal.SIGTERM)
    code, output = running.end()

    assert code == 75, output
    assert "everything is saved at step" in output
    assert addresses <= {"127.0.0.1", "::1"}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with cluster(tmp_path_factory.mktemp("cluster"), ("node1", "node2")) as made:
        yield made


@each(OTHERS)
def test_a_rank_that_is_killed_on_another_host_is_named_and_nothing_is_left(tmp_path, hosts, mpi, programs):
    launch = {"hosts": ["node1:1", "node2:1"], "num_ranks": None, "ssh": hosts.ssh}
    path = job(tmp_path, launch=launch, task_args={"notes": str(tmp_path), "kill": "1:3"})
    done = hosts.on_login(str(programs / "horovod-train"), "run", str(path), cwd=tmp_path)

    assert done.returncode == 1
    killed = "error: rank 1 on node2 was killed by signal 9, before it could say why"
    # Open MPI 5 may report first that rank 0 has ended, which loses its connection.
    lost = "error: rank 0 lost the connection to rank 1, which has left no message"
    assert killed in done.stderr or (mpi == "openmpi5" and lost in done.stderr), done.stderr
    assert hosts.leftovers(within_s=10) == []


@pytest.mark.campaign
@each(OTHERS)
def test_two_hosts_train_and_nothing_is_left_on_them(tmp_path, hosts, mpi, programs, undisturbed):
    launch = {"hosts": ["node1:1", "node2:1"], "num_ranks": None, "ssh": hosts.ssh}
    path = job(tmp_path, launch=launch)

    first = Running(tmp_path, path, 2, through=hosts.command, programs=programs)
    first.process.terminate()
    code, output = first.end()
    done = hosts.on_login(str(programs / "horovod-train"), "run", str(path), cwd=tmp_path)

    assert code == 75, output
    assert done.returncode == 0, done.stderr
    assert arrays(newest(tmp_path, "test")) == undisturbed
    assert hosts.leftovers(within_s=10) == []


@pytest.mark.campaign
@each(OTHERS)
def test_a_host_that_is_lost_is_named_and_nothing_is_left_on_it(tmp_path, hosts, mpi, programs):
    launch = {"hosts": ["node1:1", "node2:1"], "num_ranks": None, "ssh": hosts.ssh, "host_timeout_s": 6.0}
    path = job(tmp_path, launch=launch, **ENDLESS)
    running = Running(tmp_path, path, 2, through=hosts.command, programs=programs)
    hosts.network.set_link("node2", "down")
    try:
        wait_until(lambda: running.process.poll() is not None, 60)
    finally:
        hosts.network.set_link("node2", "up")
    code, output = running.end(within_s=30)

    assert code == 1
    assert "node2" in output[output.rindex("error: ") :]
    assert hosts.leftovers(within_s=30) == []


@pytest.mark.campaign
@each(OTHERS)
def test_secrets_are_on_no_command_line_and_in_no_file(tmp_path, hosts, mpi, programs):
    secrets = {"secrets": {"API_TOKEN": "env:MY_TOKEN"}}
    launch = {"hosts": ["node1:1", "node2:1"], "num_ranks": None, "ssh": hosts.ssh, **secrets}
    path = job(tmp_path, launch=launch, **ENDLESS)
    token = {"MY_TOKEN": "s3cret-from-env"}
    running = Running(tmp_path, path, 2, through=hosts.command, env=token, programs=programs)
    processes = [psutil.Process(pid) for node in hosts.nodes.values() for pid in node.pids()]
    commands = [" ".join(process.cmdline()) for process in processes]
    ranks = [process.environ() for process in processes if "worker" in process.cmdline()]
    running.process.terminate()
    code, output = running.end()

    assert code == 75
    assert [rank.get("API_TOKEN") for rank in ranks] == ["s3cret-from-env"] * 2
    assert not any("s3cret" in text for text in [*commands, output])
    assert not any(b"s3cret" in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())


@pytest.mark.campaign
@each(OTHERS)
def test_a_frozen_rank_is_named_and_the_job_is_ended(tmp_path, mpi, programs):
    health = {"stall_warning_s": 3.0, "stall_shutdown_s": 6.0}
    running = Running(tmp_path, job(tmp_path, health=health, **ENDLESS), 2, programs=programs)
    running.ranks[1].suspend()
    wait_until(lambda: running.process.poll() is not None, 60)
    code, output = running.end(within_s=5)

    assert code == 1
    error = output[output.rindex("error: ") :]
    assert re.search(r"rank [01] on .* shows no sign of life; the job was ended", error), error


@pytest.mark.campaign
@each(OTHERS)
def test_mpi_abort_is_reported_with_its_code_and_mostly_its_rank(tmp_path, mpi, programs):
    """Hydra ends the job when a rank aborts, and may lose what it has printed last."""
    done = cli("run", str(job(tmp_path, "Aborting")), cwd=tmp_path, check=False, programs=programs)

    assert done.returncode == 1
    assert re.search(r"rank 1 called MPI_Abort with error code 5|called MPI_Abort with it", done.stderr)
    assert " 5" in done.stderr


@pytest.mark.campaign
@each(OTHERS)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_train_as_one_process_with_the_joint_batch(tmp_path, mpi, programs, num_ranks):
    from programs.cases import CASES

    started_by_hand(programs, num_ranks, "batch_equality.py", str(tmp_path))
    found = results(tmp_path)

    assert len(found) == num_ranks
    for case in CASES:
        expected, _ = joint_batch_weights(case, num_ranks)
        for rank in found:
            error = max(
                abs(w - e) for w, e in zip(rank[case.name]["weights"], expected.tolist(), strict=True)
            )
            assert error <= case.tolerance, case.name


@pytest.mark.campaign
@each(OTHERS)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_zero_and_fsdp_train_as_one_process_with_the_joint_batch(tmp_path, mpi, programs, num_ranks):
    from programs.strategy_cases import CASES
    from programs.strategy_references import expected

    ways = [
        way
        for way in CASES
        if way.strategy["name"] in ("zero", "fsdp") and way.runs_on(num_ranks, "mpi") and not way.is_long
    ]
    started_by_hand(programs, num_ranks, "strategies.py", str(tmp_path), *(way.name for way in ways))
    found = results(tmp_path)

    assert len(found) == num_ranks
    assert {way.strategy["name"] for way in ways} == {"zero", "fsdp"}
    for way in ways:
        weights, _ = expected(way, num_ranks)
        for rank in found:
            error = max(abs(w - e) for w, e in zip(rank[way.name]["weights"], weights.tolist(), strict=True))
            assert error <= way.tolerance, way.name


@pytest.mark.campaign
@each(OTHERS)
def test_the_doctor_measures_it_beside_mpi4py(tmp_path, mpi, programs):
    state = {"XDG_STATE_HOME": str(tmp_path)}
    done = cli("doctor", "-n", "2", "--json", cwd=tmp_path, programs=programs, check=False, **state)

    assert {row["via"] for row in json.loads(done.stdout)["sweep"]} == {"horovod", "mpi4py"}


def started_by_hand(programs: Path, num_ranks: int, program: str, *arguments: str) -> None:
    """Run one of ``tests/programs`` under the mpirun of an environment, as a person would."""
    version = subprocess.run(
        [str(programs / "mpirun"), "--version"],
        env=environment(programs=programs),
        capture_output=True,
        text=True,
        check=True,
    )
    is_open_mpi = "Open MPI" in version.stdout
    command = [
        str(programs / "mpirun"), *(["--allow-run-as-root"] if is_open_mpi and os.geteuid() == 0 else []),
        "-np", str(num_ranks), str(programs / "python"), str(PROGRAMS / program), *arguments,
    ]  # fmt: skip
    extra = {
        "I_MPI_ROOT": str(programs.parent),
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        **variables_of("torch"),
    }
    done = subprocess.run(
        command,
        env=environment(programs=programs, **extra),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"


@pytest.mark.campaign
@each(OTHERS)
def test_the_engine_uses_it_and_mpi4py_too(mpi, programs, tmp_path):
    done = cli("engine", "check", cwd=tmp_path, programs=programs)

    record = next(programs.parent.glob("lib/python*/site-packages/horovod/horovod_train_mpi.json"))
    document = json.loads(record.read_text())
    assert f"{document['name']} {document['version']}" == NAMES[mpi]
    assert f"\nok   mpi            {NAMES[mpi]} (" in done.stdout
    assert [line[:2] for line in done.stdout.splitlines() if "mpi4py" in line] == ["ok"]


def wrong_start(name):
    """A command that starts two processes, each of which would train alone, and what the error says."""
    own, other = programs_of("openmpi4"), programs_of("mpich5")
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    mpirun = [str(own / "mpirun"), *as_root, "-np", "2"]
    worker, run = ("horovod-train", "worker", "job.yaml"), ("horovod-train", "run", "job.yaml")
    loop = ("python", str(PROGRAMS / "own_loop.py"), "out", "checkpoints", "1", "0")
    return {
        "worker under MPICH's mpirun": ([str(other / "mpirun"), "-n", "2", *worker], "mpiexec", OPEN_MPI_4),
        "loop under MPICH's mpirun": ([str(other / "mpirun"), "-n", "2", *loop], "mpiexec", OPEN_MPI_4),
        "MPICH's worker under mpirun": ([*mpirun, str(other / worker[0]), *worker[1:]], "mpirun", MPICH_5),
        "worker under torchrun": (
            [str(own / "torchrun"), "--nproc-per-node=2", "--no-python", *worker],
            "torchrun or accelerate",
            OPEN_MPI_4,
        ),
        "run in mpirun": ([*mpirun, *run], "mpirun", "`run` starts the ranks itself"),
        "run in horovodrun": (
            [str(own / "horovodrun"), "-np", "2", *run],
            "mpirun",
            "`run` starts the ranks itself",
        ),
    }[name]


OPEN_MPI_4, MPICH_5 = "the engine uses Open MPI 4.1.8", "the engine uses MPICH 5.0.2"
WRONG = (
    "worker under MPICH's mpirun",
    "loop under MPICH's mpirun",
    "MPICH's worker under mpirun",
    "worker under torchrun",
    "run in mpirun",
    "run in horovodrun",
)


@pytest.mark.parametrize("name", WRONG)
def test_nobody_trains_alone_under_the_wrong_launcher(tmp_path, name):
    job(tmp_path)
    command, program, why = wrong_start(name)

    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60, check=False
    )

    output = done.stdout + done.stderr
    assert done.returncode != 0
    assert f"{program} has started this process as number " in output
    assert why in output
    assert "horovod-train run JOB -n 2" in output
    assert not (tmp_path / "runs").exists()
