"""Hosts that are none: network namespaces with addresses, names, host keys and an sshd of their own.

    login 10.77.0.10      where the launcher runs
    node1 10.77.0.11      sshd; its own /tmp
    node2 10.77.0.12      ...

They share this machine's files (a parallel file system, say) but not /tmp; processes of a host are
those in its namespace. Everything is removed at the end.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from support.launching import TIMEOUT_S, environment

NEEDS = ("ip", "sshd", "ssh-keygen", "unshare", "nsenter")
SUBNET = "10.77.0"
ROOT = Path(__file__).parents[2]


def why_not() -> str:
    """Return what is missing to make hosts here; empty: nothing."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    missing = [program for program in NEEDS if shutil.which(program, path=path) is None]
    if missing:
        return f"{', '.join(missing)} missing (Debian: apt-get install iproute2 openssh-server util-linux)"
    probe = f"ht{os.getpid()}probe"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False).returncode:
        return "network namespaces cannot be made here"
    run("ip", "netns", "del", probe)
    return ""


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def pids_in(namespace: str) -> list[int]:
    """Processes of a network namespace."""
    found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    return [int(pid) for pid in found.stdout.split()]


@dataclass
class Node:
    """One host."""

    name: str
    namespace: str
    address: str
    sshd: subprocess.Popen[bytes] | None = None

    def pids(self) -> list[int]:
        """Processes of this host, besides sshd's own."""
        return [pid for pid in pids_in(self.namespace) if not _is_sshd(pid)]

    def in_mounts(self, *command: str) -> None:
        """Run a command where it sees, and changes, what this host sees of the file system."""
        assert self.sshd is not None
        run("nsenter", "-t", str(self.sshd.pid), "-m", *command)


@dataclass
class Cluster:
    """The hosts, and a login host to launch from."""

    folder: Path
    prefix: str
    nodes: dict[str, Node] = field(default_factory=dict)

    @property
    def ssh(self) -> dict[str, object]:
        """The job's ``launch.ssh``."""
        return {
            "identity_file": str(self.folder / "key"),
            "options": {
                "UserKnownHostsFile": str(self.folder / "known_hosts"),
                "StrictHostKeyChecking": "yes",
            },
        }

    def command(self, *arguments: str) -> list[str]:
        """Return a command that runs on the login host."""
        return ["ip", "netns", "exec", self.nodes["login"].namespace, "unshare", "-u", *arguments]

    def on_login(
        self, *arguments: str, cwd: Path, timeout_s: float = TIMEOUT_S, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the login host to its end."""
        return subprocess.run(
            self.command(*arguments),
            cwd=cwd,
            env=environment(**(env or {})),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def leftovers(self, within_s: float = 0.0) -> list[str]:
        """Processes that are left on any host, given some time to end."""
        deadline = time.monotonic() + within_s
        while True:
            left = [
                f"{node.name}: {' '.join(_cmdline(pid))[:120]}"
                for node in self.nodes.values()
                for pid in node.pids()
                if _cmdline(pid)
            ]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.1)

    def set_link(self, name: str, state: str) -> None:
        """Cut a host off (``down``), or connect it again (``up``)."""
        run("ip", "-n", f"{self.prefix}switch", "link", "set", f"to-{name}", state)

    def own_tmp(self) -> str:
        """Shell commands that give a host a /tmp of its own, in which the test's files are as before."""
        # A clean checkout may be in /tmp, too.
        shared = [self.folder.parent.parent, *([ROOT] if ROOT.is_relative_to("/tmp") else [])]  # noqa: S108
        keep = "".join(f"mkdir /mnt/{n}; mount --bind {path} /mnt/{n}; " for n, path in enumerate(shared))
        back = "".join(f"mkdir -p {path}; mount --bind /mnt/{n} {path}; " for n, path in enumerate(shared))
        return f"mount -t tmpfs tmpfs /mnt; {keep}mount -t tmpfs tmpfs /tmp; {back}"

    def start_sshd(self, name: str) -> None:
        node = self.nodes[name]
        key = self.folder / f"{name}-host-key"
        script = (
            f"set -e; hostname {name}; mkdir -p /run/sshd; {self.own_tmp()}"
            f"exec /usr/sbin/sshd -D -e -f /dev/null -o HostKey={key} "
            f"-o AuthorizedKeysFile={self.folder}/key.pub -o StrictModes=no -o UsePAM=no "
            f"-o PidFile=none -o PermitRootLogin=yes -o MaxStartups=100"
        )
        log_file = self.folder / f"{name}-sshd.log"
        with log_file.open("wb") as log:
            node.sshd = subprocess.Popen(
                ["ip", "netns", "exec", node.namespace, "unshare", "-u", "sh", "-c", script],
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + 10
        while b"Server listening" not in log_file.read_bytes():
            assert node.sshd.poll() is None, log_file.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)


@contextmanager
def cluster(folder: Path, names: Sequence[str] = ("node1", "node2", "node3")) -> Iterator[Cluster]:
    """Make hosts, and remove them and all their processes at the end."""
    if reason := why_not():
        pytest.skip(reason)
    made = Cluster(folder, f"ht{os.getpid()}")
    switch = f"{made.prefix}switch"
    try:
        run("ip", "netns", "add", switch)
        run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "br0", "up")
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key"))
        for number, name in enumerate(("login", *names)):
            made.nodes[name] = _make_node(made, switch, name, number)
        _write_names(made)
        for name in names:
            made.start_sshd(name)
        yield made
    finally:
        _remove(made, switch)


def _make_node(made: Cluster, switch: str, name: str, number: int) -> Node:
    namespace, address = f"{made.prefix}{name}", f"{SUBNET}.{10 + number}"
    run("ip", "netns", "add", namespace)
    run("ip", "-n", namespace, "link", "set", "lo", "up")
    link = ("type", "veth", "peer", "name", "eth0", "netns", namespace)
    run("ip", "-n", switch, "link", "add", f"to-{name}", *link)
    run("ip", "-n", switch, "link", "set", f"to-{name}", "master", "br0", "up")
    run("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
    run("ip", "-n", namespace, "link", "set", "eth0", "up")
    # A second network that leads nowhere.
    run("ip", "-n", namespace, "link", "add", "eth1", "type", "veth", "peer", "name", "eth1-end")
    run("ip", "-n", namespace, "link", "set", "eth1-end", "up")
    run("ip", "-n", namespace, "addr", "add", f"10.78.{number}.1/24", "dev", "eth1")
    run("ip", "-n", namespace, "link", "set", "eth1", "up")
    if name != "login":
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(made.folder / f"{name}-host-key"))
    return Node(name, namespace, address)


def _write_names(made: Cluster) -> None:
    """Every host knows the others by name, and asks nobody else; the login host knows their keys."""
    hosts = ["127.0.0.1 localhost", *(f"{node.address} {node.name}" for node in made.nodes.values())]
    for node in made.nodes.values():
        etc = Path("/etc/netns") / node.namespace
        etc.mkdir(parents=True)
        (etc / "hosts").write_text("\n".join([*hosts, ""]))
        (etc / "resolv.conf").write_text("")
    keys = [
        f"{node.name},{node.address} {(made.folder / f'{node.name}-host-key.pub').read_text()}"
        for node in made.nodes.values()
        if node.name != "login"
    ]
    (made.folder / "known_hosts").write_text("".join(keys))


def _remove(made: Cluster, switch: str) -> None:
    for node in made.nodes.values():
        for pid in pids_in(node.namespace):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if node.sshd is not None:
            node.sshd.wait(10)
        subprocess.run(["ip", "netns", "del", node.namespace], check=False, capture_output=True)
        shutil.rmtree(Path("/etc/netns") / node.namespace, ignore_errors=True)
    subprocess.run(["ip", "netns", "del", switch], check=False, capture_output=True)


def _cmdline(pid: int) -> list[str]:
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return [] if process.status() == psutil.STATUS_ZOMBIE else process.cmdline()
    return []


def _is_sshd(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).name().startswith("sshd")
    return True
