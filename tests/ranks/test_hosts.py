"""Real hosts, as far as the programs can tell: own addresses, sshd, host keys and processes."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from support.cluster import cluster, run
from support.launching import BIN, PLUGIN, PROGRAMS, write_job
from support.running import Running

from horovod_train.checkpoint.store import list_checkpoints

pytestmark = pytest.mark.ranks
LAUNCHES = {
    "horovodrun over mpi": {"controller": "mpi"},
    "horovodrun over gloo": {"controller": "gloo"},
    "mpirun": {"launcher": "mpirun"},
}
NODES = ("node1", "node2", "node3")
ALL = (*NODES, "node4")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with cluster(tmp_path_factory.mktemp("cluster"), ALL) as made:
        yield made


@pytest.fixture(
    params=[pytest.param(n, marks=pytest.mark.campaign if n == "mpirun" else ()) for n in LAUNCHES]
)
def how(request):
    """Through horovodrun; with mpirun in a campaign."""
    return LAUNCHES[request.param]


@pytest.fixture(params=[pytest.param(n, marks=() if "gloo" in n else pytest.mark.campaign) for n in LAUNCHES])
def sometimes(request):
    """With Gloo; with the others in a campaign."""
    return LAUNCHES[request.param]


@pytest.fixture(autouse=True)
def nothing_runs_on_any_host_afterwards(hosts):
    yield
    assert hosts.leftovers(within_s=10) == []


def job(folder, hosts, nodes, **sections):
    fixed = {"hosts": [f"{node}:1" for node in nodes], "ssh": hosts.ssh, "env": {"PYTHONPATH": str(PLUGIN)}}
    launch = {**fixed, **sections.pop("launch", {})}
    fields = {"task": "digits", "train": {"epochs": 1}, **sections}
    return write_job(folder / "job.yaml", run_dir=str(folder / "runs"), launch=launch, **fields)


def slow(folder, hosts, nodes, **sections):
    return job(
        folder,
        hosts,
        nodes,
        framework="numpy",
        task_args={"notes": str(folder), "pause_s": 0.1},
        **{
            "task": f"{PROGRAMS / 'quick_tasks.py'}:Noted",
            "train": {"epochs": 500, "batch_size_per_rank": 4},
            "checkpoint": {"every": None},
            **sections,
        },
    )


def train(folder, hosts, path, *flags, **kwargs):
    return hosts.on_login(str(BIN / "horovod-train"), "run", str(path), *flags, cwd=folder, **kwargs)


def running_on(folder, hosts, path, num_ranks, env=None):
    return Running(folder, path, num_ranks, through=hosts.command, env=env)


@pytest.mark.parametrize("nodes", [NODES[:2], pytest.param(NODES, marks=pytest.mark.campaign)], ids=len)
def test_the_digits_job_trains_on_several_hosts(tmp_path, hosts, how, nodes):
    done = train(tmp_path, hosts, job(tmp_path, hosts, nodes, launch=how))

    assert done.returncode == 0, done.stderr
    assert f"{len(nodes)} rank(s)" in done.stdout
    assert "node2: network interface eth0 (10.77.0.12): ssh came in through it" in done.stdout
    assert list_checkpoints(tmp_path / "runs" / "test" / "checkpoints")


def test_one_other_host(tmp_path, hosts, how):
    path = slow(tmp_path, hosts, ["node2"], launch=how, train={"epochs": 1, "batch_size_per_rank": 30})

    done = train(tmp_path, hosts, path)

    assert done.returncode == 0, done.stderr
    assert "node2: network interface eth0 (10.77.0.12): ssh came in through it" in done.stdout


@pytest.mark.campaign
def test_two_ranks_on_each_of_two_hosts(tmp_path, hosts):
    path = job(tmp_path, hosts, [], launch={"hosts": ["node1:2", "node2:2"], "launcher": "mpirun"})

    done = train(tmp_path, hosts, path)

    assert done.returncode == 0, done.stderr
    assert "4 rank(s)" in done.stdout


def test_a_stopped_job_saves_and_leaves_nothing_on_any_host(tmp_path, hosts, how):
    running = running_on(tmp_path, hosts, slow(tmp_path, hosts, NODES[:2], launch=how), 2)

    running.process.terminate()
    code, output = running.end()

    assert code == 75, output
    assert "everything is saved at step" in output
    assert hosts.leftovers() == []
    assert list_checkpoints(tmp_path / "runs" / "test" / "checkpoints")


def test_a_signal_to_one_rank_on_another_host_lets_all_save_and_leave(tmp_path, hosts, sometimes):
    running = running_on(tmp_path, hosts, slow(tmp_path, hosts, NODES[:2], launch=sometimes), 2)
    rank = next(pid for pid in hosts.nodes["node2"].pids() if "worker" in psutil.Process(pid).cmdline())

    os.kill(rank, signal.SIGTERM)
    code, output = running.end()

    assert code == 75, output
    assert hosts.leftovers() == []


def test_a_launcher_killed_with_9_leaves_nothing_on_any_host(tmp_path, hosts, how):
    running = running_on(tmp_path, hosts, slow(tmp_path, hosts, NODES[:2], launch=how), 2)

    running.process.kill()
    running.end(within_s=15)

    assert hosts.leftovers(within_s=15) == []


def test_a_link_that_is_cut_while_training_ends_the_job(tmp_path, hosts, sometimes):
    path = slow(tmp_path, hosts, NODES[:2], launch={**sometimes, "host_timeout_s": 6})
    running = running_on(tmp_path, hosts, path, 2)

    hosts.network.set_link("node2", "down")
    code, output = running.end()
    on_the_cut_host = hosts.leftovers(within_s=15)
    hosts.network.set_link("node2", "up")

    assert code == 1, output
    assert "node2 does not answer any more" in output
    assert on_the_cut_host == []


class TestAHostThatCannotBeUsed:
    """Each ends within 30 seconds with one message that names host and fix."""

    def refused(self, folder, hosts, nodes=NODES[:2], *flags, **launch):
        path = job(folder, hosts, nodes, launch=launch)
        started = time.monotonic()
        done = train(folder, hosts, path, *flags)
        assert done.returncode == 1, done.stdout + done.stderr
        assert time.monotonic() - started < 30
        assert done.stderr.count("error:") == 1
        assert "Traceback" not in done.stderr
        return done.stderr

    def test_a_key_that_it_does_not_know(self, tmp_path, hosts):
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other"))

        said = self.refused(
            tmp_path, hosts, NODES[:2], "--set", f"launch.ssh.identity_file={tmp_path / 'other'}"
        )

        assert "node2: authentication failed" in said
        assert "ssh-copy-id node2, or set launch.ssh.identity_file" in said

    def test_a_host_key_that_is_not_known(self, tmp_path, hosts):
        said = self.refused(
            tmp_path, hosts, NODES[:2], "--set", "launch.ssh.options.UserKnownHostsFile=/dev/null"
        )

        assert "node1: its host key is not known" in said
        assert "ssh-keyscan node1" in said

    def test_a_name_that_nobody_knows(self, tmp_path, hosts):
        said = self.refused(tmp_path, hosts, ("node1", "nodex"))

        assert "nodex: unknown host name" in said

    def test_a_port_on_which_nobody_listens(self, tmp_path, hosts):
        said = self.refused(tmp_path, hosts, NODES[:2], "--set", "launch.ssh.port=2299")

        assert "node1: nothing listens there" in said
        assert "launch.ssh.port" in said

    def test_a_host_that_is_down(self, tmp_path, hosts):
        hosts.network.set_link("node3", "down")
        said = self.refused(tmp_path, hosts, ("node1", "node3"))
        hosts.network.set_link("node3", "up")

        assert "node3: it " in said
        assert "is it up?" in said

    def test_a_host_without_the_environment(self, tmp_path, hosts):
        said = self.refused(tmp_path, hosts, host_settings={"node2": {"python": "/opt/nothing/bin/python"}})

        assert "node2: there is no /opt/nothing/bin/python" in said
        assert "launch.host_settings.node2.python" in said

    def test_an_environment_without_this_package(self, tmp_path, hosts):
        said = self.refused(tmp_path, hosts, host_settings={"node2": {"python": "/usr/bin/python3"}})

        assert "node2: /usr/bin/python3 has no horovod_train" in said

    def test_an_interface_that_does_not_reach_the_others(self, tmp_path, hosts):
        said = self.refused(tmp_path, hosts, network_interface="eth1")

        assert "node1 (eth1, 10.78.1.1) does not reach node2 (eth1, 10.78.2.1)" in said
        assert "launch.network_interface" in said

    def test_an_interface_that_is_not_there(self, tmp_path, hosts):
        said = self.refused(tmp_path, hosts, host_settings={"node2": {"network_interface": "eth7"}})

        assert "node2: no network interface 'eth7'" in said
        assert "eth0 (10.77.0.12)" in said

    def test_other_code(self, tmp_path, hosts):
        ours = BIN.parent.parent / "horovod_train" / "errors.py"
        with altered(tmp_path, hosts.nodes["node2"], ours, "# changed"):
            said = self.refused(tmp_path, hosts, NODES)

        assert "horovod_train code: " in said
        assert "install on node2 as on the other hosts" in said

    def test_another_task(self, tmp_path, hosts):
        (tmp_path / "mine.py").write_text("class Task: ...\n")
        path = job(tmp_path, hosts, NODES, task="mine.py:Task")
        with altered(tmp_path, hosts.nodes["node3"], tmp_path / "mine.py", "# changed"):
            done = train(tmp_path, hosts, path)

        assert "task code: " in done.stderr
        assert "install on node3 as on the other hosts" in done.stderr

    def test_another_build_of_horovod(self, tmp_path, hosts):
        (plan,) = BIN.parent.glob("lib/python3*/site-packages/horovod/horovod_train_plan.json")
        other = plan.read_text().replace('"key": "', '"key": "other')
        with altered(tmp_path, hosts.nodes["node2"], plan, text=other):
            said = self.refused(tmp_path, hosts, NODES)

        assert "horovod build: " in said
        assert "`horovod-train engine build`" in said


class TestTheDoctor:
    def examine(self, folder, hosts, *flags, names=NODES):
        ssh = [
            f"launch.ssh.identity_file={hosts.folder / 'key'}",
            *(f"launch.ssh.options.{option}={value}" for option, value in hosts.ssh["options"].items()),
        ]
        sets = [text for setting in ssh for text in ("--set", setting)]
        command = (str(BIN / "horovod-train"), "doctor", "-H", ",".join(f"{n}:1" for n in names), *sets)
        return hosts.on_login(*command, *flags, cwd=folder, env={"XDG_STATE_HOME": str(folder / "state")})

    def test_examines_hosts_and_the_network_in_less_than_a_minute_and_remembers(self, tmp_path, hosts):
        started = time.monotonic()
        done = self.examine(tmp_path, hosts)
        took_s = time.monotonic() - started
        again = json.loads(self.examine(tmp_path, hosts, "--json", names=NODES).stdout)

        assert done.returncode == 0, done.stdout + done.stderr
        assert took_s < 60
        assert "3 hosts reach each other" in done.stdout
        assert "64 MiB" in done.stdout
        assert {row["via"] for row in again["sweep"]} == {"horovod", "mpi4py"}
        assert "history" in [finding["what"] for finding in again["findings"]]

    def test_finds_what_is_wrong_and_says_what_to_do(self, tmp_path, hosts):
        with altered(tmp_path, hosts.nodes["node3"], Path("/etc/hosts"), text="127.0.0.1 node1\n"):
            done = self.examine(tmp_path, hosts, "--no-sweep", names=(*NODES, "nodex"))

        assert done.returncode == 1
        lines = done.stdout.splitlines()
        (unknown,) = [number for number, line in enumerate(lines) if line.startswith("fail nodex")]
        assert "unknown host name" in lines[unknown]
        assert lines[unknown + 1].strip().startswith("fix: ")
        assert any(line.startswith("fail node3") and "cannot resolve node2" in line for line in lines)


class altered:  # noqa: N801  (reads as a phrase)
    """A file that is different on one host."""

    def __init__(self, folder, node, path, extra="", text=None):
        self.node, self.path = node, path
        self.other = folder / f"other-{path.name}"
        self.other.write_text(path.read_text() + extra if text is None else text)

    def __enter__(self):
        self.node.in_mounts("mount", "--bind", str(self.other), str(self.path))

    def __exit__(self, *_):
        self.node.in_mounts("umount", str(self.path))


def test_code_is_shipped_to_hosts_that_do_not_share_a_folder(tmp_path, hosts):
    code = tmp_path / "code"
    code.mkdir()
    (code / "helper.py").write_text("WIDTH = 8\n")
    (code / "mine.py").write_text(
        "from helper import WIDTH\nfrom quick_tasks import Noted\nclass Mine(Noted):\n    assert WIDTH == 8\n"
    )
    path = slow(
        tmp_path,
        hosts,
        NODES[:2],
        task=f"{code}/mine.py:Mine",
        train={"epochs": 1, "batch_size_per_rank": 30},
        launch={"ship_code": True, "env": {"PYTHONPATH": f"{PLUGIN}:{PROGRAMS}"}},
    )
    for name in NODES[:2]:
        hosts.nodes[name].in_mounts("mount", "-t", "tmpfs", "tmpfs", str(code))
    try:
        done = train(tmp_path, hosts, path)
    finally:
        for name in NODES[:2]:
            hosts.nodes[name].in_mounts("umount", str(code))

    assert done.returncode == 0, done.stderr


def test_secrets_reach_the_ranks_and_nobody_else(tmp_path, hosts, sometimes):
    path = slow(
        tmp_path,
        hosts,
        NODES[:2],
        launch={**sometimes, "secrets": {"API_TOKEN": "env:MY_TOKEN", "OTHER": f"file:{tmp_path}/token"}},
    )
    (tmp_path / "token").write_text("s3cret-from-file\n")
    token = {"MY_TOKEN": "s3cret-from-env"}
    plan = train(tmp_path, hosts, path, "--dry-run", env=token)
    running = running_on(tmp_path, hosts, path, 2, token)
    ranks = [
        psutil.Process(pid).environ()
        for node in NODES[:2]
        for pid in hosts.nodes[node].pids()
        if "worker" in psutil.Process(pid).cmdline()
    ]
    commands = [
        " ".join(psutil.Process(pid).cmdline()) for node in hosts.nodes.values() for pid in node.pids()
    ]
    running.process.terminate()
    code, output = running.end()
    files = [file for file in (tmp_path / "runs").rglob("*") if file.is_file()]

    assert code == 75
    assert {rank["API_TOKEN"] for rank in ranks} == {"s3cret-from-env"}
    assert {rank["OTHER"] for rank in ranks} == {"s3cret-from-file"}
    assert not any("s3cret" in text for text in [*commands, plan.stdout, output])
    assert not any(b"s3cret" in file.read_bytes() for file in files)
