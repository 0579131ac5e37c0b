"""What a launch is made of: hosts, interfaces, files on a host, secrets, jobs that are remembered."""

from __future__ import annotations

import base64
import errno
import io
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import zipfile
from contextlib import nullcontext
from dataclasses import asdict, replace
from threading import Event, Timer

import psutil
import pytest
from support.hosts import described
from support.waiting import wait_until

from horovod_train import __version__
from horovod_train.checks import hosts as hosts_module
from horovod_train.checks.hosts import can_read_memory
from horovod_train.config.launch import HostSettings, Launch
from horovod_train.config.schema import Job
from horovod_train.errors import LaunchError, LostError, UserError
from horovod_train.health.watches import Heartbeat, heartbeat_file
from horovod_train.horovod.environment import from_slurm
from horovod_train.launch import jobs
from horovod_train.launch.base import JobStatus
from horovod_train.launch.hosts import agent, host_group, hostlist
from horovod_train.launch.hosts import host_group as host_group_module
from horovod_train.launch.hosts.agent import RANK_VARIABLE, RUN_VARIABLE, HostActions
from horovod_train.launch.hosts.host_group import (
    HostGroup,
    LocalHost,
    RemoteHost,
    connect_all,
    explain,
)
from horovod_train.launch.hosts.hostlist import Chosen, Host, choose, hosts_of, read_hostfile
from horovod_train.launch.hosts.staging import pack_code, read_secrets, stage_files, without_secrets
from horovod_train.launch.launchers.slurm.launcher import tasks_per_node
from horovod_train.launch.submit import make_plan, record_job, resolve
from horovod_train.launch.supervise import preflight as prepare
from horovod_train.launch.supervise.preflight import check_fingerprints, check_shared_memory, rank_variables
from horovod_train.launch.supervise.signals import Stopper, guarded
from horovod_train.plugins.kubernetes.render import inner_job
from horovod_train.system.files import LogFile
from horovod_train.system.machine import usable_cores, usable_memory_bytes

A_SHELL = ["/bin/sh", "-c"]  # in place of "ssh host": runs its last argument


class TestHosts:
    def test_are_filled_in_order(self):
        hosts = hosts_of(Launch(hosts=["a:4", "b:4", "c:4"], num_ranks=6))

        assert [(host.name, host.num_ranks) for host in hosts] == [("a", 4), ("b", 2)]

    def test_none_named_is_this_machine(self):
        (host,) = hosts_of(Launch())
        assert (host.name, host.num_ranks) == ("localhost", 1)
        (host,) = hosts_of(Launch(num_ranks=3))

        assert (host.name, host.num_ranks, host.is_local) == ("localhost", 3, True)

    def test_this_machine_is_known_by_its_own_name(self):
        (host,) = hosts_of(Launch(hosts=[f"{os.uname().nodename}:2"], num_ranks=2))

        assert host.is_local

    @pytest.mark.parametrize(
        ("line", "expected"),
        [
            ("node01 slots=4", "node01:4"),
            ("node01:4", "node01:4"),
            ("node01 max-slots=9 slots=4 # the old one", "node01:4"),
            ("node01", "node01:1"),
            ("10.0.0.7 slots=2", "10.0.0.7:2"),
            ("node01 slots = 4", "node01:4"),
            ("gpu_node_1 slots=2", "gpu_node_1:2"),
            ("node01\nnode01\nnode01", "node01:3"),
            ("job-worker-0.job.default.svc slots=8", "job-worker-0.job.default.svc:8"),
        ],
    )
    def test_of_a_hostfile(self, tmp_path, line, expected):
        (tmp_path / "hosts").write_text(f"# all of them\n\n{line}\n")

        assert read_hostfile(tmp_path / "hosts") == [expected]

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("node01 slots=four\n", "line 1: 'node01 slots=four'"),
            ("# nobody\n", "names no host"),
            ("alice@node01\n", r"is not a host(.|\n)*hint: leave the user out"),
            ("node[01-04]\n", r"is not a host(.|\n)*hint: list each host: scontrol"),
            ("fe80::1 slots=2\n", r"is not a host(.|\n)*hint: give the host a name"),
        ],
    )
    def test_of_a_broken_hostfile(self, tmp_path, text, said):
        (tmp_path / "hosts").write_text(text)

        with pytest.raises(UserError, match=said):
            read_hostfile(tmp_path / "hosts")

    def test_of_a_hostfile_with_a_byte_order_mark(self, tmp_path):
        (tmp_path / "hosts").write_bytes(b"\xef\xbb\xbfnode01:4\r\nnode02:4\r\n")

        assert read_hostfile(tmp_path / "hosts") == ["node01:4", "node02:4"]

    def test_of_no_hostfile(self, tmp_path):
        with pytest.raises(UserError, match="cannot be read: No such file"):
            read_hostfile(tmp_path / "hosts")


DESCRIPTION = described(
    addresses={"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"], "ib0": ["10.1.0.1"], "eth1": []},
    ssh_address="10.0.0.1",
    ways={"b": "10.1.0.1"},
)


class TestInterface:
    def test_is_the_one_that_ssh_came_in_through(self):
        assert choose(Host("a", 1), None, DESCRIPTION, []).name == "eth0"

    def test_is_the_one_asked_for(self):
        assert choose(Host("a", 1), "ib0", DESCRIPTION, []).address == "10.1.0.1"

    def test_of_a_host_wins(self):
        host = Host("a", 1, settings=HostSettings(network_interface="ib0"))

        assert choose(host, "eth0", DESCRIPTION, []).name == "ib0"

    def test_of_this_machine_is_the_way_to_the_others(self):
        assert choose(Host("a", 1, is_local=True), None, DESCRIPTION, []).name == "ib0"

    def test_that_is_missing_is_told_with_those_there_are(self):
        with pytest.raises(LaunchError, match=r"no network interface 'ib1' .*ib0 \(10.1.0.1\)") as caught:
            choose(Host("a", 1), "ib1", DESCRIPTION, [])

        assert "did you mean 'ib0'?" in caught.value.hint

    def test_that_cannot_be_told_has_to_be_named(self):
        unknown = replace(DESCRIPTION, ssh_address="192.0.2.1", ways={})

        with pytest.raises(LaunchError, match="cannot determine"):
            choose(Host("a", 1), None, unknown, [])


class TestOnAHost:
    @pytest.fixture
    def stage(self, tmp_path):
        return tmp_path / "stage"

    def test_files_are_for_this_user_alone_and_are_removed(self, stage):
        host = HostActions(str(stage))
        host.put({"rank": "#!/bin/sh\n", "environment": "A=1\n"})

        assert [
            oct(path.stat().st_mode & 0o777) for path in (stage, stage / "rank", stage / "environment")
        ] == [
            "0o700",
            "0o700",
            "0o600",
        ]
        host.remove()
        assert not stage.exists()

    def test_a_folder_that_is_there_already_is_somebody_elses(self, stage):
        stage.mkdir()
        host = HostActions(str(stage))

        with pytest.raises(FileExistsError):
            host.put({})
        host.remove()

        assert stage.exists()

    def test_a_process_that_turns_into_another_program_is_found_too(self, stage, monkeypatch):
        with subprocess.Popen(["sleep", "60"], env={RUN_VARIABLE: str(stage)}) as mine:
            wait_until(lambda: psutil.Process(mine.pid).environ())
            host = HostActions(str(stage))
            look, looks = host._processes, []

            def see_nothing_at_first():
                looks.append(1)
                return look() if looks[1:] else []

            monkeypatch.setattr(host, "_processes", see_nothing_at_first)

            killed = host.kill()

        assert (killed, mine.returncode) == (1, -signal.SIGKILL)

    def test_processes_of_the_run_are_found_and_killed_and_others_are_not(self, stage):
        mine = subprocess.Popen(["sleep", "60"], env={RUN_VARIABLE: str(stage)}, start_new_session=True)
        other = subprocess.Popen(["sleep", "60"], env={RUN_VARIABLE: f"{stage}-other"})
        wait_until(lambda: psutil.Process(mine.pid).name() == psutil.Process(other.pid).name() == "sleep")

        killed = HostActions(str(stage)).kill()

        assert killed == 1
        assert mine.wait(5) == -signal.SIGKILL
        assert other.poll() is None
        other.kill()
        other.wait()

    def test_only_ranks_are_signalled(self, stage):
        env = {**os.environ, RUN_VARIABLE: str(stage)}
        helper = subprocess.Popen(["sleep", "60"], env=env)

        assert HostActions(str(stage)).signal_ranks(signal.SIGUSR1) == 0
        assert helper.poll() is None
        helper.kill()
        helper.wait()

    def test_a_listener_is_known_by_its_name(self, stage):
        host = HostActions(str(stage))
        port = host.listen(address="127.0.0.1", name="a")

        targets = [("a", "127.0.0.1", port), ("b", "127.0.0.1", port), ("c", "127.0.0.1", 1)]
        failed = host.reach(source="127.0.0.1", targets=targets)
        host.remove()

        assert failed == {
            "b": "127.0.0.1 leads to host a from this host, not to b",
            "c": "Connection refused",
        }

    def test_the_guard_kills_the_run_when_its_launcher_is_killed(self, stage, tmp_path):
        stage.mkdir()
        program = (
            "import os, subprocess, sys, time\n"
            "from horovod_train.launch.supervise.signals import guarded\n"
            f"stage = {str(stage)!r}\n"
            "with guarded(stage):\n"
            f"    env = {{**os.environ, {RUN_VARIABLE!r}: stage}}\n"
            "    rank = subprocess.Popen(['sleep', '60'], env=env, start_new_session=True)\n"
            "    print(rank.pid, flush=True)\n"
            "    time.sleep(60)\n"
        )
        launcher = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        rank = psutil.Process(int(launcher.stdout.readline()))

        launcher.kill()
        launcher.communicate()

        wait_until(lambda: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE)
        wait_until(lambda: not stage.exists())

    def test_the_guard_does_nothing_when_all_went_well(self, stage):
        stage.mkdir()
        with guarded(str(stage)):
            pass

        assert stage.exists()


class TestCores:
    """What a rank may use is the least of what it is bound to and what its container is limited to."""

    ALL = len(os.sched_getaffinity(0))

    @pytest.mark.parametrize(
        ("file", "content", "expected"),
        [
            ("cpu.max", "max 100000", ALL),
            ("cpu.max", "100000 100000", 1),
            ("cpu.max", "150000 100000", min(2, ALL)),
            ("cpu.max", "50000 100000", 1),
            ("cpu.max", "6400000 100000", min(64, ALL)),
            ("cpu.max", "nonsense", ALL),
            ("cpu/cpu.cfs_quota_us", "-1", ALL),
            ("cpu/cpu.cfs_quota_us", "0", ALL),
            ("cpu/cpu.cfs_quota_us", "50000", 1),
            ("cpu/cpu.cfs_quota_us", "150000", min(2, ALL)),
        ],
    )
    def test_follow_the_quota_of_a_container(self, tmp_path, file, content, expected):
        (tmp_path / "cpu").mkdir()
        (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
        (tmp_path / file).write_text(content + "\n")

        assert usable_cores(tmp_path) == expected

    @pytest.mark.parametrize("file", ["memory.max", "memory/memory.limit_in_bytes"])
    def test_memory_is_limited_by_the_container(self, tmp_path, file):
        (tmp_path / "memory").mkdir()
        (tmp_path / file).write_text("1000000\n")

        assert usable_memory_bytes(tmp_path) == 1000000
        (tmp_path / file).write_text("max\n")
        assert usable_memory_bytes(tmp_path) > 1000000

    def test_without_a_quota_are_those_of_the_process(self, tmp_path):
        assert usable_cores(tmp_path) == self.ALL

    def variables(self, host, *, reads_memory=True, **launch):
        job = Job(name="j", task="digits", launch=Launch(**launch))
        found = described(reads_memory=reads_memory)
        return rank_variables(job, LocalHost(host, "no-stage"), found, None, {})

    def test_are_shared_by_the_ranks_of_a_host(self):
        assert self.variables(Host("a", 4, is_local=True))["OMP_NUM_THREADS"] == "2"
        assert self.variables(Host("a", 9, is_local=True))["OMP_NUM_THREADS"] == "1"

    def test_are_what_the_job_says(self):
        assert self.variables(Host("a", 4, is_local=True), threads_per_rank=3)["OMP_NUM_THREADS"] == "3"

    def test_of_a_pod_are_what_its_ranks_ask_for(self):
        launch = {"launcher": "mpijob", "kubernetes": {"image": "i:1", "cpus_per_rank": "2500m"}}
        job = Job.model_validate({"name": "j", "task": "digits", "launch": launch})

        assert inner_job(job, has_source=False).launch.threads_per_rank == 2

    def test_messages_between_ranks_are_copied_where_memory_cannot_be_read(self):
        name = "OMPI_MCA_btl_vader_single_copy_mechanism"

        assert name not in self.variables(Host("a", 2, is_local=True))
        assert self.variables(Host("a", 2, is_local=True), reads_memory=False)[name] == "none"

    def test_ranks_of_one_machine_do_not_listen_for_each_other(self):
        here = self.variables(Host("a", 2, is_local=True))
        chosen = Chosen("eth0", "10.0.0.1", "asked for")
        there = rank_variables(
            Job(name="j", task="digits"),
            LocalHost(Host("a", 2), "no-stage"),
            described(),
            chosen,
            {},
        )

        assert here["OMPI_MCA_btl"] == "^openib,tcp"
        assert "OMPI_MCA_btl" not in there
        assert there["OMPI_MCA_btl_tcp_if_include"] == "eth0"

    def test_a_rank_elsewhere_knows_the_name_by_which_its_host_is_reached(self):
        there = Host("digits-worker-0.digits.default.svc", 1)

        assert self.variables(there)["HOROVOD_TRAIN_HOST"] == there.name
        assert "HOROVOD_TRAIN_HOST" not in self.variables(Host("localhost", 1, is_local=True))

    @pytest.mark.parametrize(
        ("num_ranks", "free_bytes", "is_refused"),
        [(2, 10 * 2**20, False), (2, 10 * 2**20 - 1, True), (1, 0, False), (2, None, False)],
    )
    def test_share_memory_that_has_to_have_room(self, num_ranks, free_bytes, is_refused):
        hosts = HostGroup([LocalHost(Host("a", num_ranks, is_local=True), "no-stage")])
        with pytest.raises(LostError) if is_refused else nullcontext() as caught:
            check_shared_memory(hosts, {"a": described(shared_memory_bytes=free_bytes)})

        if is_refused:
            assert "a: there is room for 10.0 MiB in /dev/shm, and 2 ranks need 10 MiB" in str(caught.value)

    def test_whether_memory_can_be_read_is_tried(self):
        assert isinstance(can_read_memory(), bool)


STOPS_WHILE_IT_ENDS = """
import os, pathlib, signal, sys, time
from horovod_train.health.watches import Heartbeat

class Last:
    def __del__(self, kill=os.kill, me=os.getpid(), stop=signal.SIGSTOP):
        kill(me, stop)

last = Last()
Heartbeat(pathlib.Path(sys.argv[1]), 5)
time.sleep(2)
"""


class TestSignsOfLife:
    @pytest.fixture
    def host(self, tmp_path):
        (tmp_path / "stage").mkdir()
        return HostActions(str(tmp_path / "stage"))

    def sleeper(self, program="import time; time.sleep(60)"):
        return subprocess.Popen([sys.executable, "-c", program])

    def beat(self, host, process, ago_s):
        file = host.stage / heartbeat_file(3, process.pid)
        file.write_text(f"{time.monotonic() - ago_s:020.3f}\n")

    def test_a_rank_that_gives_none_is_found_with_what_it_does(self, host):
        with self.sleeper() as process:
            self.beat(host, process, 100)
            first = host.unresponsive_ranks(0.3)
            process.send_signal(signal.SIGSTOP)
            wait_until(lambda: psutil.Process(process.pid).status() == "stopped")
            time.sleep(0.4)
            (found,) = host.unresponsive_ranks(0.3)
            process.kill()

        assert first == [], "whether it computes is known at the second look"
        assert (found.rank, found.pid, found.doing) == (3, process.pid, "stopped")
        assert 0.3 <= found.silent_s < 90

    def test_a_rank_that_gives_some_is_not(self, host):
        with self.sleeper() as process:
            host.unresponsive_ranks(0.2)
            time.sleep(0.3)
            self.beat(host, process, 0.0)
            found = host.unresponsive_ranks(0.2)
            process.kill()

        assert found == []

    def test_a_rank_that_computes_without_giving_any_is_not(self, host):
        with self.sleeper("while True: pass") as process:
            self.beat(host, process, 100)
            looks = []
            for _ in range(4):
                looks += host.unresponsive_ranks(0.5)
                time.sleep(0.3)
            process.kill()

        assert looks == []

    @pytest.mark.parametrize("is_counted", [True, False])
    def test_a_rank_that_would_compute_if_others_let_it_is_not_either(self, host, monkeypatch, is_counted):
        place = {min(os.sched_getaffinity(0))}
        spin = "import os; os.sched_setaffinity(0, {0}); os.nice({1})\nwhile True: pass".format
        with self.sleeper(spin(place, 0)) as other, self.sleeper(spin(place, 19)) as process:
            wait_until(lambda: sum(psutil.Process(other.pid).cpu_times()[:2]) > 0.2)
            wait_until(lambda: psutil.Process(process.pid).nice() == 19)
            self.beat(host, process, 100)
            times = psutil.Process(process.pid).cpu_times()
            before_s = sum(times[:2])
            if not is_counted:  # as while it has not run at all since it began to wait
                monkeypatch.setattr(agent, "cpu_wait_s", lambda _: 0.0)
                monkeypatch.setattr(psutil.Process, "cpu_times", lambda _: times)
            looks = []
            for _ in range(6):
                looks += host.unresponsive_ranks(1.0)
                time.sleep(0.3)
            used_s = sum(psutil.Process(process.pid).cpu_times()[:2]) - before_s
            for each in (process, other):
                each.kill()

        assert used_s < 0.2 * 1.5, "it could hardly run"
        assert looks == []

    def test_a_rank_that_has_ended_is_not_looked_at(self, host):
        with self.sleeper() as process:
            process.kill()
        self.beat(host, process, 100)

        assert host.unresponsive_ranks(0.0) == []

    def test_a_rank_that_has_ended_and_is_not_yet_reaped_is_not_either(self, host):
        with self.sleeper() as process:
            self.beat(host, process, 100)
            process.kill()
            wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)

            assert host.unresponsive_ranks(0.0) == []
            time.sleep(0.05)
            assert host.unresponsive_ranks(0.0) == []

    def test_one_that_has_ended_does_not_hide_another(self, host):
        with self.sleeper() as ended, self.sleeper() as stopped:
            for process in (ended, stopped):
                self.beat(host, process, 100)
            ended.kill()
            stopped.send_signal(signal.SIGSTOP)
            wait_until(lambda: psutil.Process(ended.pid).status() == psutil.STATUS_ZOMBIE)
            host.unresponsive_ranks(0.0)
            time.sleep(0.3)
            found = host.unresponsive_ranks(0.2)
            stopped.kill()

        assert [each.pid for each in found] == [stopped.pid]

    def test_are_given_until_the_process_has_ended(self, host):
        """It is stopped when it has nothing more to do, and Python clears up."""
        with subprocess.Popen([sys.executable, "-c", STOPS_WHILE_IT_ENDS, host.stage]) as process:
            file = host.stage / heartbeat_file(5, process.pid)
            wait_until(lambda: file.exists() and file.read_text())
            first = float(file.read_text().split()[0])
            wait_until(lambda: float(file.read_text().split()[0]) > first)
            wait_until(lambda: psutil.Process(process.pid).status() == "stopped")
            host.unresponsive_ranks(0.3)
            time.sleep(0.4)
            (found,) = host.unresponsive_ranks(0.3)
            process.kill()

        assert abs(first - time.monotonic()) < 30
        assert (found.rank, found.doing) == (5, "stopped")
        assert host.unresponsive_ranks(0.3) == []
        assert not file.exists()

    def test_need_no_folder(self, tmp_path):
        Heartbeat(tmp_path / "gone", 0)


class TestHostGroup:
    """A shell of this machine in place of ssh: agents are real."""

    def test_an_agent_does_what_it_is_told(self, tmp_path):
        hosts = connect_all([Host("a", 1), Host("b", 1)], lambda _: A_SHELL, str(tmp_path / "stage"), 20)

        found = hosts.each(HostActions.describe, lambda _: {"others": []})
        hosts.close()

        assert found["a"].python == found["b"].python == sys.executable
        assert found["a"].cores == len(os.sched_getaffinity(0))

    def test_hosts_that_cannot_be_used_are_all_named_and_one_as_it_is(self, tmp_path):
        def shell(host):
            return (
                A_SHELL if host.name == "good" else ["/bin/sh", "-c", f"echo {host.name} is ill >&2; exit 7"]
            )

        def error_of(*names):
            with pytest.raises(LostError) as caught:
                connect_all([Host(name, 1) for name in names], shell, str(tmp_path / "stage"), 20)
            return caught.value

        one, two = error_of("bad", "good"), error_of("bad", "good", "worse")

        assert str(one).startswith("bad: ")
        assert one.hosts == ("bad",)
        assert str(two).startswith("2 hosts cannot be used:\n  bad: ")
        assert two.hosts == ("bad", "worse")

    def test_an_error_on_a_host_names_it(self, tmp_path):
        (tmp_path / "stage").mkdir()
        hosts = connect_all([Host("a", 1)], lambda _: A_SHELL, str(tmp_path / "stage"), 20)

        with pytest.raises(LaunchError, match="a: FileExistsError"):
            hosts.each(HostActions.put, lambda _: {"files": {}})
        hosts.close()

    def test_an_agent_whose_launcher_is_silent_kills_what_is_there(self, tmp_path):
        stage = tmp_path / "stage"
        connection = RemoteHost(Host("a", 1), A_SHELL, str(stage), silence_s=0.5)
        connection.call(HostActions.put, files={})
        rank = subprocess.Popen(["sleep", "60"], env={RUN_VARIABLE: str(stage)})

        assert rank.wait(10) == -signal.SIGKILL
        wait_until(lambda: not stage.exists())
        connection.close()

    @pytest.mark.parametrize(
        ("greeting", "there"),
        [("horovod_train agent 9.9.9", "9.9.9"), ("horovod_train agent", "of another version")],
    )
    def test_an_agent_of_another_version_is_refused_with_both_versions(self, tmp_path, greeting, there):
        shell = ("sh", "-c", f"echo welcome; echo {greeting}; cat >/dev/null # ")

        with pytest.raises(
            LostError,
            match=f"a: horovod_train is {there} on this host and {__version__} on the launching machine",
        ) as caught:
            RemoteHost(Host("a", 1), shell, str(tmp_path / "stage"), 20)

        assert caught.value.hosts == ("a",)
        assert "install the same version" in caught.value.hint

    @pytest.mark.parametrize("module", ["launch/hosts.py", "launch/hosts/__init__.py"])
    def test_a_version_that_has_its_agent_elsewhere_is_asked_which_it_is(self, tmp_path, module):
        package = tmp_path / "horovod_train"
        (package / module).parent.mkdir(parents=True)
        (package / module).touch()
        (package / "launch" / "__init__.py").touch()
        (package / "__init__.py").write_text("__version__ = '0.0.7'\n")
        shell = ("env", f"PYTHONPATH={tmp_path}", "sh", "-c")

        with pytest.raises(
            LostError, match=f"horovod_train is 0.0.7 on this host and {__version__} on the launching machine"
        ):
            RemoteHost(Host("a", 1), shell, str(tmp_path / "stage"), 20)

    def test_a_lost_host_is_noticed_once(self, tmp_path):
        connection = RemoteHost(Host("a", 1), A_SHELL, str(tmp_path / "stage"), 20)
        hosts, lost, noticed = HostGroup([connection]), [], Event()
        hosts.watch(5, lambda host, why: (lost.append((host, why)), noticed.set()))

        connection.abandon()

        assert noticed.wait(10)
        hosts.close()
        assert lost == [("a", "its ssh connection ended")]

    def test_a_host_that_is_silent_is_lost_too(self, tmp_path, monkeypatch):
        monkeypatch.setattr(host_group_module, "PING_INTERVAL_S", 0.1)
        connection = RemoteHost(Host("a", 1), A_SHELL, str(tmp_path / "stage"), 20)
        hosts, lost, noticed = HostGroup([connection]), [], Event()
        hosts.watch(0.5, lambda host, why: (lost.append((host, why)), noticed.set()))
        time.sleep(1.0)
        assert not lost, "it answers"

        os.kill(connection.pid, signal.SIGSTOP)

        assert noticed.wait(10)
        hosts.close()
        assert lost == [("a", lost[0][1])]
        assert lost[0][1].startswith("silent for ")

    def test_a_launcher_that_was_stopped_itself_accuses_no_host(self, tmp_path, monkeypatch):
        monkeypatch.setattr(host_group_module, "PING_INTERVAL_S", 0.1)
        skipped_s = [0.0]
        monkeypatch.setattr(host_group_module, "monotonic", lambda: time.monotonic() + skipped_s[0])
        monkeypatch.setattr(host_group, "monotonic", host_group_module.monotonic)
        connection = RemoteHost(Host("a", 1), A_SHELL, str(tmp_path / "stage"), 20)
        hosts, lost, noticed = HostGroup([connection]), [], Event()
        hosts.watch(2, lambda host, why: (lost.append((host, why)), noticed.set()))
        time.sleep(0.5)

        skipped_s[0] = 20.0
        time.sleep(0.5)
        assert not lost, "it answers"

        connection.abandon()
        assert noticed.wait(10)
        hosts.close()
        assert lost[0][1].startswith("this launcher was stopped for 20 s")

    def test_whether_all_answer_now_can_be_asked(self, tmp_path):
        connections = [RemoteHost(Host(name, 1), A_SHELL, str(tmp_path / name), 20) for name in "ab"]
        hosts = HostGroup(
            [LocalHost(Host("localhost", 1, is_local=True), str(tmp_path / "here")), *connections]
        )
        assert hosts.silent(5) == ""
        assert hosts.pids == {connection.pid for connection in connections}

        os.kill(connections[1].pid, signal.SIGSTOP)

        assert hosts.silent(0.5) == "b"
        assert connections[1].is_disconnected or connections[1]._process.wait(5)
        hosts.close()

    def test_ranks_of_all_hosts_are_counted_signalled_and_killed(self, tmp_path):
        stages = [str(tmp_path / name) for name in "ab"]
        connections = [
            RemoteHost(Host(name, 1), A_SHELL, stage, 20) for name, stage in zip("ab", stages, strict=True)
        ]
        hosts = HostGroup(connections)
        # As a rank is started; it starts a process that would end by the signal.
        program = (
            "import pathlib, signal, subprocess, time; signal.signal(signal.SIGUSR1, lambda *_: None)\n"
            "started = subprocess.Popen(['sleep', '60'])\n"
            f"pathlib.Path({str(tmp_path)!r}, f'rank-{{started.pid}}').touch(); time.sleep(60)"
        )
        script = f"export {RANK_VARIABLE}=$$; exec {sys.executable} -c {shlex.quote(program)}"
        ranks = [subprocess.Popen(["sh", "-c", script], env={RUN_VARIABLE: stage}) for stage in stages]
        wait_until(lambda: len(list(tmp_path.glob("rank-*"))) == 2)
        started = [psutil.Process(int(file.name.split("-")[1])) for file in tmp_path.glob("rank-*")]

        assert hosts.signal_ranks(signal.SIGUSR1) == 2
        assert [rank.poll() for rank in ranks] == [None, None]
        assert all(process.status() == psutil.STATUS_SLEEPING for process in started)
        hosts.kill()

        assert [rank.wait(5) for rank in ranks] == [-signal.SIGKILL] * 2
        hosts.close()
        # Nobody may have asked for their exit codes yet.
        wait_until(lambda: all(not p.is_running() or p.status() == psutil.STATUS_ZOMBIE for p in started))

    def test_the_script_of_a_rank_says_which_process_it_is(self, tmp_path):
        """The process that was started, not one that it starts."""
        job = Job(name="x", task="digits")
        (tmp_path / "environment").write_text("")
        program = ("probe",)
        (tmp_path / "probe.py").write_text(f"import os; print(os.getpid(), os.environ['{RANK_VARIABLE}'])")
        files = stage_files(
            job,
            "run",
            str(tmp_path),
            python=sys.executable,
            mpi_programs="/mpi/bin",
            folder=tmp_path,
            program=program,
            variables={"PYTHONPATH": str(tmp_path)},
        )
        for name in ("rank", "environment"):
            (tmp_path / name).write_text(files[name])

        rank = subprocess.run(["sh", str(tmp_path / "rank")], capture_output=True, text=True, check=True)

        own, said = rank.stdout.split()
        assert own == said

    def test_a_host_that_does_not_answer_keeps_no_other_from_being_cleared(self, tmp_path):
        connections = [RemoteHost(Host(name, 1), A_SHELL, str(tmp_path / name), 20) for name in "ab"]
        connections[0].abandon()
        connections[0]._process.wait()
        rank = subprocess.Popen(["sleep", "60"], env={RUN_VARIABLE: str(tmp_path / "b")})
        hosts = HostGroup(connections)

        hosts.kill()

        assert rank.wait(5) == -signal.SIGKILL
        hosts.close()

    @pytest.mark.parametrize("line", ["no answer", "[1]", "{}", '{"id": 99}', "7"])
    def test_what_a_login_script_left_running_prints_is_no_answer(self, tmp_path, line):
        """All answers that follow it arrive."""
        now = tmp_path / "the agent has answered"
        left_running = f"until [ -e {shlex.quote(str(now))} ]; do sleep 0.05; done; echo {shlex.quote(line)}"
        shell = ["sh", "-c", f'({left_running}) & eval "$0"']
        host = RemoteHost(Host("a", 1), shell, str(tmp_path / "stage"), 20)
        now.touch()

        wait_until(lambda: any(line in said for said in host._stderr_lines))

        assert host.call(HostActions.ping)
        host.close()

    def test_a_python_that_is_not_there_is_named(self, tmp_path):
        settings = HostSettings(python="/nowhere/python")

        with pytest.raises(LaunchError, match="a: there is no /nowhere/python"):
            connect_all([Host("a", 1, settings=settings)], lambda _: A_SHELL, str(tmp_path), 20)

    def test_this_machine_takes_part_directly(self, tmp_path):
        hosts = connect_all(
            [Host("localhost", 2, is_local=True)], lambda _: ["/bin/false"], str(tmp_path / "s"), 20
        )

        assert isinstance(hosts.connections[0], LocalHost)
        hosts.close()

    def test_hosts_that_differ_are_named_with_values(self):
        alike = {"numpy version": "2.4", "task code": "x"}

        with pytest.raises(LaunchError, match="numpy version: 2.4 on a, c; 2.3 on b") as caught:
            check_fingerprints({"a": alike, "b": {**alike, "numpy version": "2.3"}, "c": alike})

        assert "install on b as on the other hosts" in caught.value.hint


@pytest.mark.parametrize(
    ("code", "said", "what", "fix"),
    [
        (255, "Host key verification failed.", "host key is not known", "ssh-keyscan n1"),
        (
            255,
            "@@ REMOTE HOST IDENTIFICATION HAS CHANGED! @@",
            "not the one known",
            "ssh-keygen -R n1",
        ),
        (255, "u@n1: Permission denied (publickey).", "authentication failed", "ssh-copy-id n1"),
        (255, "ssh: connect to host n1 port 22: Connection timed out", "does not answer", "ping n1"),
        (255, "ssh: something new", "ssh failed", "ssh n1 /py"),
        (127, "sh: 1: /py: not found", "there is no /py", "launch.host_settings.n1.python"),
        (1, "ImportError: libpython.so", "does not start", "ssh n1 /py"),
        (1, "Traceback:\n  File x\nImportError: libpython.so", "ImportError: libpython.so", "ssh n1 /py"),
        (1, "\n", "exit code 1", "ssh n1 /py"),
    ],
)
def test_what_ssh_says_is_explained(code, said, what, fix):
    error = explain("n1", code, said, "/py")

    assert what in error.message
    assert error.message.startswith("n1: ")
    assert fix in error.hint


def test_where_nobody_knows_who_is_right_about_one_thing_all_are_asked():
    facts = {
        "a": {"numpy": "2.2", "python": "3.11"},
        "b": {"numpy": "2.3", "python": "3.11"},
        "c": {"numpy": "2.4", "python": "3.12"},
    }

    with pytest.raises(LostError) as caught:
        check_fingerprints(facts)

    assert caught.value.hint.startswith("install on all hosts: ")


def test_hosts_that_differ_from_most_are_named_wherever_they_stand():
    facts = {host: {"numpy": "2.2"} for host in "abcde"}
    facts["a"] = facts["d"] = {"numpy": "2.3"}

    with pytest.raises(LostError, match=r"numpy: 2\.3 on a, d; 2\.2 on b, c, e") as caught:
        check_fingerprints(facts)

    assert caught.value.hosts == ("a", "d")
    assert caught.value.hint.startswith("install on a, d as on the other hosts: ")


def test_the_interface_is_that_on_the_way_to_the_first_other_host(monkeypatch):
    ways = {"far": "10.0.0.1", "farther": "10.1.0.1"}
    addresses = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"], "eth1": ["10.1.0.1"]}
    monkeypatch.setattr(hostlist, "source_towards", ways.get)
    monkeypatch.setattr(hostlist, "addresses_by_interface", lambda: addresses)

    def interface(*hosts):
        return hostlist.interface_towards(Launch(hosts=list(hosts), num_ranks=len(hosts)))

    assert interface("localhost:1", "far:1", "farther:1") == "eth0"
    assert interface("farther:1", "localhost:1") == "eth1"
    assert interface("localhost:1") is None
    assert interface("nowhere:1") is None


class TestSecrets:
    def test_come_from_the_environment_and_from_files(self, tmp_path):
        (tmp_path / "token").write_text("from file\n")

        found = read_secrets({"A": "env:TOKEN", "B": f"file:{tmp_path}/token"}, {"TOKEN": "from env"})

        assert found == {"A": "from env", "B": "from file"}

    @pytest.mark.parametrize(
        ("source", "said"),
        [
            ("env:TOKEN", "env:TOKEN is not set"),
            ("file:/nowhere/token", "/nowhere/token cannot be read: No such file"),
            ("kubernetes:name/key", "exists on Kubernetes only"),
        ],
    )
    def test_that_are_missing_are_named(self, source, said):
        with pytest.raises(UserError, match=f"launch.secrets.A: .*{said}"):
            read_secrets({"A": source}, {})

    def test_are_withheld_from_launchers(self):
        assert without_secrets({"A": "env:TOKEN"}, {"TOKEN": "x", "HOME": "/"}) == {"HOME": "/"}

    def test_stand_in_one_file_and_not_in_the_job(self, tmp_path):
        job = Job(name="j", task="digits", launch=Launch(secrets={"A": "env:TOKEN"}))

        files = stage_files(
            job,
            "r",
            "/stage",
            python="/py",
            mpi_programs="/mpi/bin",
            folder=tmp_path,
            variables={"A": "it's $HOME"},
        )

        holders = [name for name, content in files.items() if "it" in content and "$HOME" in content]
        (tmp_path / "environment").write_text(files["environment"])
        show = ["/bin/sh", "-c", '. ./environment; printf %s "$A"']
        shown = subprocess.run(show, cwd=tmp_path, capture_output=True, check=True)
        assert holders == ["environment"]
        assert shown.stdout == b"it's $HOME"


class TestShippedCode:
    def test_leaves_out_what_is_not_code(self, tmp_path):
        import base64
        import io
        import zipfile

        for name in ("task.py", "package/part.py", ".git/config", "runs/x/log", "__pycache__/a.pyc"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text("x")

        packed = base64.b64decode(pack_code(tmp_path))
        with zipfile.ZipFile(io.BytesIO(packed)) as archive:
            assert archive.namelist() == ["task.py", "package/part.py"]

    def test_refuses_data(self, tmp_path):
        with (tmp_path / "data").open("wb") as file:
            file.truncate(80 << 20)

        with pytest.raises(UserError, match="more than 64 MiB"):
            pack_code(tmp_path)

    def test_only_a_task_in_a_file_can_be_shipped(self):
        job = Job.model_validate({"name": "j", "task": "package.module:Task"})

        with pytest.raises(LaunchError, match=r"the task package\.module:Task is not a file"):
            prepare._with_shipped_code(job, "stage")

    def test_what_is_no_file_is_not_shipped(self, tmp_path):
        (tmp_path / "task.py").write_text("x")
        os.mkfifo(tmp_path / "pipe")

        packed = base64.b64decode(pack_code(tmp_path))

        with zipfile.ZipFile(io.BytesIO(packed)) as archive:
            assert archive.namelist() == ["task.py"]


class TestStopper:
    def stopping(self, grace_s, *signals, until="ask", apart_s=0.2):
        asked, killed, done = [], [], Event()

        def ask():
            asked.append(time.monotonic())
            if until == "ask":
                done.set()

        def kill():
            killed.append(time.monotonic())
            done.set()

        stopper = Stopper(ask, kill, grace_s)
        with stopper.listening():
            timers = [
                Timer(0.1 + number * apart_s, os.kill, (os.getpid(), sent))
                for number, sent in enumerate(signals)
            ]
            for timer in timers:
                timer.start()
            assert done.wait(10)
            for timer in timers:
                timer.join()
        return stopper, asked, killed

    def test_a_signal_asks_first(self):
        stopper, asked, killed = self.stopping(30, signal.SIGTERM)

        assert (stopper.received, len(asked), killed) == (signal.SIGTERM, 1, [])

    def test_when_the_grace_is_over_it_kills(self):
        _, asked, killed = self.stopping(0.3, signal.SIGTERM, until="kill")

        assert asked
        assert killed[0] - asked[0] >= 0.2

    def test_the_second_signal_kills_at_once(self):
        _, asked, killed = self.stopping(30, signal.SIGINT, signal.SIGINT, until="kill")

        assert asked
        assert killed[0] - asked[0] < 5

    def test_a_terminal_that_hangs_up_twice_is_not_in_a_hurry(self):
        stopper, asked, killed = self.stopping(30, signal.SIGHUP, signal.SIGHUP)

        assert (stopper.received, killed) == (signal.SIGHUP, [])
        assert asked
        assert stopper._deadline_s > time.monotonic() + 10

    def test_a_signal_is_heard_though_the_main_thread_cannot_be_interrupted(self):
        done = Event()
        stopper = Stopper(done.set, lambda: None, 30)
        with stopper.listening():
            # It reaches another thread then, and the main one waits on.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                is_heard = done.wait(5)
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

        assert is_heard
        assert stopper.received == signal.SIGTERM

    def test_draining_has_no_deadline(self):
        stopper, _, killed = self.stopping(0.0, signal.SIGUSR1)

        assert (stopper.received, killed) == (signal.SIGUSR1, [])


class TestJobs:
    @pytest.fixture
    def request_(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        return resolve(Job(name="j", task="digits", run_dir=str(tmp_path)), "run-1")

    def test_are_found_by_the_beginning_of_their_names(self, request_):
        jobs.save_record(request_, "7")
        jobs.save_record(replace(request_, run_id="sun-2"), "8")

        assert jobs.find_job("j-run").native_id == "7"
        with pytest.raises(UserError, match="is a prefix of several job IDs: j-sun-2, j-run-1"):
            jobs.find_job("j-")
        with pytest.raises(UserError, match="no job 'k'"):
            jobs.find_job("k")

    def test_the_name_alone_stands_for_the_newest(self, request_):
        ids = ["20261122-100000-aaaa", "20261122-100001-bbbb"]
        for number, run_id in enumerate(ids):
            job = jobs.submitted_job(replace(request_, run_id=run_id), str(number))
            file = jobs.jobs_dir() / f"{job.job_id}.json"
            file.parent.mkdir(parents=True, exist_ok=True)
            document = {**asdict(job), "log_dir": str(job.log_dir), "submitted_unix_s": float(number)}
            file.write_text(json.dumps(document))

        assert jobs.find_job(request_.job.name).native_id == "1"
        assert jobs.find_job(f"{request_.job.name}-20261122-100000").native_id == "0"

    def test_the_name_alone_stands_rather_for_one_that_has_not_ended(self, request_):
        self.test_the_name_alone_stands_for_the_newest(request_)
        newer, older = jobs.known_jobs()
        for job in (newer, older):
            job.log_dir.mkdir(parents=True)
        jobs.StateFile(newer.log_dir).write("failed", 1)
        assert jobs.find_job(request_.job.name) == older

        jobs.StateFile(older.log_dir).write("failed", 1)
        assert jobs.find_job(request_.job.name) == newer

    def test_a_run_whose_process_is_gone_has_failed(self, request_):
        program = (
            "from pathlib import Path; from horovod_train.launch.jobs import StateFile;"
            f"StateFile(Path({str(request_.log_dir)!r})).write('running')"
        )
        subprocess.run([sys.executable, "-c", program], check=True)

        status = jobs.StateFile(request_.log_dir).read()

        assert (status.state, status.exit_code) == ("failed", 137)
        assert jobs.StateFile(request_.log_dir).pid() is None

    def test_how_one_stands_is_noted_on_a_full_disk_too(self, request_, monkeypatch):
        told = []
        state = jobs.StateFile(request_.log_dir, told.append)
        state.write("starting")

        def refuse(*_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(jobs, "write_atomic", refuse)
        state.write("running", message="2 ranks")
        assert (state.read().state, state.read().message) == ("running", "2 ranks")

        # What does not fit into the blocks that the file has is not begun either.
        state.write("failed", 1, "x" * 100_000)
        assert (state.read().state, state.read().message) == ("running", "2 ranks")
        assert "could not be written: No space left on device" in told[0]

        state.write("succeeded", 0)
        assert state.read().state == "succeeded"

        for message in ("a much longer message than the next one has", "short"):
            state.write("failed", 1, message)
            assert state.read().message == message

    def test_a_run_that_goes_on_says_so(self, request_):
        state = jobs.StateFile(request_.log_dir)
        state.write("running")

        assert state.read().state == "running"
        assert state.pid() == os.getpid()
        assert json.loads((request_.log_dir / "state.json").read_text())["host"] == os.uname().nodename

    def test_a_clock_that_is_set_does_not_make_a_run_fail(self, request_, monkeypatch):
        state = jobs.StateFile(request_.log_dir)
        state.write("running")

        monkeypatch.setattr(psutil, "boot_time", lambda: 12345.0)
        monkeypatch.setattr(psutil.Process, "create_time", lambda _: 12345.0)

        assert state.read().state == "running"
        assert state.pid() == os.getpid()

    @pytest.mark.parametrize("field", ["boot_id", "pid_start_ticks"])
    def test_another_process_of_the_same_number_is_not_taken_for_it(self, request_, field):
        state = jobs.StateFile(request_.log_dir)
        state.write("running")
        file = request_.log_dir / "state.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), field: "other"}))

        assert state.read().state == "failed"
        assert state.pid() is None

    def test_a_process_is_known_by_when_it_was_started(self, request_):
        jobs.StateFile(request_.log_dir).write("running")

        noted = json.loads((request_.log_dir / "state.json").read_text())

        started_s = psutil.Process().create_time() - psutil.boot_time()
        assert noted["pid_start_ticks"] / os.sysconf("SC_CLK_TCK") == pytest.approx(started_s, abs=2)

    @pytest.mark.parametrize(("off_s", "expected"), [(0.0, "running"), (30.0, "failed")])
    def test_a_state_of_the_version_before_is_understood(self, request_, off_s, expected):
        document = {
            "state": "running",
            "exit_code": None,
            "message": "2 rank(s)",
            "pid": os.getpid(),
            "pid_started_unix_s": psutil.Process().create_time() - off_s,
            "host": os.uname().nodename,
            "unix_time_s": time.time(),
        }
        request_.log_dir.mkdir(parents=True)
        (request_.log_dir / "state.json").write_text(json.dumps(document))

        assert jobs.StateFile(request_.log_dir).read().state == expected

    @pytest.mark.parametrize(
        "content", [b"", b"{", b"[]", b"\xff\xfe", b'{"state": "running"}', b"7", b"[" * 9000]
    )
    def test_garbage_is_told_and_breaks_nothing(self, request_, content):
        request_.log_dir.mkdir(parents=True)
        (request_.log_dir / "state.json").write_bytes(content)
        state = jobs.StateFile(request_.log_dir)

        status = state.read()

        assert (status.state, status.exit_code) == ("unknown", 1)
        assert status.has_ended
        assert "state.json is damaged; run.log in the same folder has the output" in status.message
        assert state.pid() is None

    def test_a_state_that_cannot_be_written_is_told_once(self, request_):
        told = []
        state = jobs.StateFile(request_.log_dir / "file" / "below", told.append)
        request_.log_dir.mkdir(parents=True)
        (request_.log_dir / "file").write_text("in the way")

        state.write("running")
        state.write("succeeded", 0)

        (text,) = told
        assert "state.json could not be written" in text

    def test_what_is_remarked_stays_in_the_state(self, request_):
        told = []
        state = jobs.StateFile(request_.log_dir, told.append)
        state.write("running", message="2 rank(s)")

        state.set_warning("run.log", "run.log is incomplete: No space left on device")
        state.set_warning("run.log", "run.log is incomplete: No space left on device")
        while_running = state.read().message
        state.write("succeeded", 0)

        assert while_running == "2 rank(s); run.log is incomplete: No space left on device"
        assert state.read() == jobs.JobStatus(
            "succeeded", 0, "run.log is incomplete: No space left on device"
        )
        assert told == ["warning: run.log is incomplete: No space left on device"]

    def test_a_job_that_cannot_be_remembered_is_told_with_where_it_is(self, request_, monkeypatch, tmp_path):
        (tmp_path / "file").write_text("in the way")
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
        told = []

        job = record_job(request_, "4711", told.append)

        assert job.job_id == request_.job_id
        (text,) = told
        assert "its ID in local is 4711" in text
        assert str(request_.log_dir) in text

    def test_a_run_that_ended_keeps_its_word(self, request_):
        jobs.StateFile(request_.log_dir).write("preempted", 75, "saved at step 3")

        status = jobs.StateFile(request_.log_dir).read()

        assert (status.state, status.exit_code, status.message) == ("preempted", 75, "saved at step 3")


class TestSlurm:
    def test_short_forms_are_read(self):
        assert tasks_per_node("2(x3),1,4(x2)") == [2, 2, 2, 1, 4, 4]

    @pytest.mark.parametrize(
        ("procid", "node", "local", "expected"),
        [("0", "0", "0", "0 4 0 3 0 2"), ("2", "0", "2", "2 4 2 3 0 1"), ("3", "1", "0", "3 4 0 1 1 2")],
    )
    def test_a_task_is_a_rank(self, procid, node, local, expected):
        environ = {"SLURM_PROCID": procid, "SLURM_NODEID": node, "SLURM_LOCALID": local}

        found = from_slurm({**environ, "HOROVOD_TRAIN_PLACEMENT": "a:3,b:1"})

        names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
        assert " ".join(found[f"HOROVOD_{name}"] for name in names) == expected
        assert found["HOROVOD_HOSTNAME"] == "ab"[int(node)]

    def test_other_processes_are_left_alone(self):
        assert from_slurm({"SLURM_PROCID": "0"}) == from_slurm({}) == {}


class TestWhatAHostSaysOfItself:
    def test_folders_that_are_not_there_have_no_room(self, tmp_path):
        assert hosts_module._free_bytes(tmp_path / "nowhere") is None
        assert hosts_module._free_bytes(tmp_path) > 0

    def test_packets_to_this_machine_leave_from_it(self):
        assert hosts_module.source_towards("127.0.0.1") == "127.0.0.1"
        assert hosts_module.source_towards("host.invalid") == ""

    def test_an_address_is_reached_if_whoever_answers_is_meant(self, tmp_path):
        host = HostActions(str(tmp_path / "stage"))
        port = host.listen("127.0.0.1", "a")

        assert host.reach("127.0.0.1", [("a", "127.0.0.1", port)]) == {}
        assert host.reach("127.0.0.1", [("b", "127.0.0.1", port)]) == {
            "b": "127.0.0.1 leads to host a from this host, not to b"
        }
        host.remove()
        assert host._listeners[0].fileno() == -1, "nobody listens any more"
        failed = host.reach("127.0.0.1", [("a", "127.0.0.1", 9)])
        assert failed == {"a": "Connection refused"}

    def test_readings_are_taken_there(self, tmp_path):
        found = HostActions(str(tmp_path / "stage")).examine([str(tmp_path)], ["localhost"], [9])

        assert found.cores == len(os.sched_getaffinity(0))
        assert found.engine.horovod == found.engine.wanted

    def test_a_failure_of_this_machine_is_a_lost_host(self, tmp_path):
        (tmp_path / "stage").mkdir()
        here = LocalHost(Host("localhost", 1, is_local=True), str(tmp_path / "stage"))

        with pytest.raises(LostError, match="localhost: put: .*File exists") as caught:
            here.call(HostActions.put, files={})
        assert caught.value.hosts == ("localhost",)
        with pytest.raises(LostError, match="localhost: put"):
            here.submit(HostActions.put, files={}).result()

    def test_an_agent_that_does_not_answer_in_time_is_a_lost_host(self, tmp_path, monkeypatch):
        connection = RemoteHost(Host("a", 1), A_SHELL, str(tmp_path / "stage"), 20)
        monkeypatch.setattr(host_group, "CALL_TIMEOUT_S", 0.3)
        os.kill(connection.pid, signal.SIGSTOP)

        with pytest.raises(LostError, match=r"a: no answer for 0\.3 s") as caught:
            connection.call(HostActions.describe, others=[])

        assert caught.value.hosts == ("a",)
        os.kill(connection.pid, signal.SIGCONT)
        connection.close()

    def test_an_agent_that_does_not_end_is_killed(self, tmp_path, monkeypatch):
        connection = RemoteHost(Host("a", 1), A_SHELL, str(tmp_path / "stage"), 20)
        os.kill(connection.pid, signal.SIGSTOP)
        wait = connection._process.wait
        monkeypatch.setattr(connection._process, "wait", lambda timeout=None: wait(timeout and 0.3))

        connection.close()

        assert connection._process.returncode == -signal.SIGKILL

    def test_an_agent_that_is_gone_is_a_lost_host_with_its_last_words(self, tmp_path):
        connection = RemoteHost(Host("a", 1), A_SHELL, str(tmp_path / "stage"), 20)
        connection.abandon()
        connection._process.wait()

        with pytest.raises(LostError, match="a: the connection ended: ssh ended with code -9"):
            connection.call(HostActions.describe, others=[])
        connection.close()


class TestWhatIsRemembered:
    @pytest.fixture(autouse=True)
    def state_home(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    @pytest.mark.parametrize("content", ["{", "[]", "{}", '{"log_dir": 3}', '{"log_dir": "x", "new": 1}'])
    def test_by_another_version_is_left_out(self, tmp_path, content):
        for number in range(9):  # in whichever order the folder lists them
            request = resolve(Job(name=f"j{number}", task="digits", run_dir=str(tmp_path)), "run-1")
            jobs.save_record(request, str(number))
            (jobs.jobs_dir() / f"other-{number}.json").write_text(content)

        assert sorted(job.native_id for job in jobs.known_jobs()) == list("012345678")

    def test_of_a_run_whose_folder_is_gone_says_so(self, tmp_path):
        status = jobs.StateFile(tmp_path / "gone").read_recorded()

        assert (status.state, status.exit_code) == ("unknown", 1)
        assert "does not exist: removed, or not mounted here" in status.message

    def test_of_a_run_that_has_not_begun_is_that_it_waits(self, tmp_path):
        status = jobs.StateFile(tmp_path).read_recorded()

        assert (status.state, status.exit_code, status.message) == ("queued", None, "not started yet")

    def test_of_a_process_that_was_never_there_is_that_it_is_gone(self, tmp_path):
        document = {"pid": 2**22 + 1, "pid_started_unix_s": 1.0}

        assert not jobs._is_alive(document)

    def test_an_end_is_found_again_and_garbage_is_none(self, tmp_path):
        jobs.record_end("j-1", JobStatus("failed", 3, "why"))

        assert jobs.recorded_end("j-1") == JobStatus("failed", 3, "why")
        (jobs.jobs_dir() / "ended" / "j-1.json").write_text("[]")
        assert jobs.recorded_end("j-1") is None
        assert jobs.recorded_end("j-2") is None


class TestALogFile:
    def test_that_fails_when_it_is_closed_is_told(self, tmp_path, monkeypatch):
        problems = []
        log = LogFile(tmp_path / "run.log", problems.append)
        log.write("one")
        close = os.close

        def refuse(handle):
            close(handle)
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr("horovod_train.system.files.os.close", refuse)
        log.close()
        monkeypatch.undo()
        log.close()

        assert problems == ["run.log may be incomplete: Input/output error"]

    def test_counts_the_lines_that_it_has_lost(self, tmp_path):
        problems = []
        log = LogFile(tmp_path / "folder" / "run.log", problems.append)
        log.write("lost")
        log.write("lost, too")
        (tmp_path / "folder").mkdir()
        log.write("three")
        log.write("four")
        log.close()

        assert problems == ["run.log is incomplete: No such file or directory"] * 2
        lines = (tmp_path / "folder" / "run.log").read_text().splitlines()
        assert lines == ["... 2 lines could not be written ...", "three", "four"]

    def test_is_for_this_user_alone(self, tmp_path):
        log = LogFile(tmp_path / "run.log")
        log.write("one")
        log.close()

        assert (tmp_path / "run.log").stat().st_mode & 0o777 == 0o600


class TestReadings:
    def test_a_name_that_nobody_knows_has_no_address(self):
        assert hosts_module._address("host.invalid") == ""
        assert hosts_module._address("127.0.0.1") == "127.0.0.1"

    def test_a_port_that_is_taken_is_not_free(self):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            assert not hosts_module._is_free(port)
        assert hosts_module._is_free(port)

    def test_room_is_that_of_the_nearest_folder_there_is(self, tmp_path):
        assert hosts_module._free_bytes_for(str(tmp_path / "not" / "yet")) == pytest.approx(
            hosts_module._free_bytes_for(str(tmp_path)), rel=0.1
        )

    def test_a_command_that_is_not_there_says_nothing(self):
        assert hosts_module._output("no-such-program-7") == ""
        assert hosts_module._output("echo", "word") == "word\n"


class TestOneRankAlone:
    def test_more_are_refused_with_who_starts_them(self, tmp_path):
        launch = {"num_ranks": 2, "launcher": "local"}
        job = Job.model_validate({"name": "j", "task": "digits", "run_dir": str(tmp_path), "launch": launch})

        with pytest.raises(LaunchError, match="the launcher 'local' starts one rank, not 2"):
            make_plan(resolve(job, "run-1"))


@pytest.mark.parametrize(("former", "state"), [("waiting", "queued"), ("leaving", "stopping")])
def test_states_of_earlier_versions_are_read(tmp_path, former, state):
    jobs.StateFile(tmp_path).write(state, message="it is there")
    (path,) = tmp_path.glob("state.json")
    path.write_text(path.read_text().replace(f'"{state}"', f'"{former}"'))

    assert jobs.StateFile(tmp_path).read().message == "it is there"
