"""A real Slurm on the hosts of a cluster: slurmctld on the login host, a slurmd on each node."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from support.cluster import Cluster, run
from support.launching import environment
from support.namespaces import pids_in, why_not

NEEDS = ("slurmctld", "slurmd", "sbatch", "srun", "munged", "runuser")
CONFIG = """
ClusterName=test
SlurmctldHost=login({login})
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmdTimeout=15
KillWait=10
OverTimeLimit=0
{nodes}
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass
class Slurm:
    """The cluster's Slurm."""

    cluster: Cluster
    folder: Path
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str) -> None:
        """Start the daemon of a host."""
        program = "slurmctld" if name == "login" else "slurmd"
        self.daemons[name] = _start(self.cluster, name, f"{program} -D -f {self.folder}/slurm.conf")

    def kill(self, name: str) -> None:
        """Kill everything on a host at once, as a power cut does."""
        while pids := pids_in(self.cluster.nodes[name].namespace):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.daemons[name].wait(20)

    def wait_for_nodes(self) -> None:
        """Return as soon as all nodes are idle."""
        num_nodes, deadline = len(self.cluster.nodes) - 1, time.monotonic() + 30
        while self.ask("sinfo", "-h", "-o", "%D %T").split() != [str(num_nodes), "idle"]:
            assert time.monotonic() < deadline, [log.read_text() for log in self.folder.glob("*.log")]
            time.sleep(0.1)

    @property
    def variables(self) -> dict[str, str]:
        """What its commands need."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def ask(self, *command: str) -> str:
        """Run one of its commands on the login host."""
        done = self.cluster.on_login(*command, cwd=self.folder, env=self.variables, timeout_s=30)
        assert done.returncode == 0, done.stderr
        return done.stdout


@contextmanager
def slurm_on(cluster: Cluster) -> Iterator[Slurm]:
    """Start Slurm, and end it."""
    if reason := why_not(*NEEDS):
        pytest.skip(reason)
    folder = cluster.folder / "slurm"
    (folder / "state").mkdir(parents=True)
    nodes = [node for node in cluster.nodes.values() if node.name != "login"]
    addresses = cluster.network.addresses
    lines = [f"NodeName={node.name} NodeAddr={addresses[node.name]} CPUs=2 State=UNKNOWN" for node in nodes]
    config = CONFIG.format(login=addresses["login"], folder=folder, nodes="\n".join(lines))
    (folder / "slurm.conf").write_text(config)
    _start_munge(folder)
    made = Slurm(cluster, folder)
    try:
        for name in ("login", *(node.name for node in nodes)):
            made.start(name)
        made.wait_for_nodes()
        yield made
    finally:
        for daemon in reversed(made.daemons.values()):
            daemon.terminate()
            daemon.wait(20)
        os.kill(int((folder / "munge" / "pid").read_text()), signal.SIGTERM)


def _start_munge(folder: Path) -> None:
    """Munge refuses to run as root, and wants its files to be its own."""
    munge = folder / "munge"
    munge.mkdir()
    (munge / "key").write_bytes(os.urandom(1024))
    (munge / "key").chmod(0o600)
    for parent in [munge, *folder.parents]:
        if parent.stat().st_mode & 0o005 != 0o005:
            parent.chmod(parent.stat().st_mode | 0o005)
    run("chown", "-R", "munge:munge", str(munge))
    flags = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    files = [f"--{flag}={munge / file}" for flag, file in flags.items()]
    run("runuser", "-u", "munge", "--", "munged", "--force", *files)


def _start(cluster: Cluster, name: str, command: str) -> subprocess.Popen[bytes]:
    """Start a daemon on a host. Unlike `ip netns exec`, this leaves /sys/fs/cgroup in sight of slurmd."""
    namespace = cluster.nodes[name].namespace
    script = f"hostname {name}; mount --bind /etc/netns/{namespace}/hosts /etc/hosts; "
    return subprocess.Popen(
        [
            *("nsenter", f"--net=/run/netns/{namespace}", "unshare", "-u", "-m"),
            *("sh", "-c", script + cluster.own_tmp() + f"exec {command}"),
        ],
        env=environment(SLURM_CONF=str(cluster.folder / "slurm" / "slurm.conf")),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
