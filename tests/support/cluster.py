"""Hosts that are none: network namespaces with addresses, names, host keys and an sshd of their own.

    login 10.77.0.10      where the launcher runs
    node1 10.77.0.11      sshd; its own /tmp
    node2 10.77.0.12      ...

They share this machine's files (a parallel file system, say) but not /tmp; processes of a host are
those in its namespace. Everything is removed at the end.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from support.launching import BIN, TIMEOUT_S, environment
from support.namespaces import Network, network, pids_in, run, why_not

NEEDS = ("sshd", "ssh-keygen", "unshare", "nsenter")
ROOT = Path(__file__).parents[2]
Done = subprocess.CompletedProcess[str]


@dataclass
class Node:
    """One host."""

    name: str
    namespace: str
    sshd: subprocess.Popen[bytes] | None = None

    def pids(self) -> list[int]:
        """Processes of this host, besides sshd's own."""
        return [pid for pid in pids_in(self.namespace) if not _is_sshd(pid)]

    def stages(self) -> list[Path]:
        """Folders of runs that lie in this host's own /tmp."""
        if self.sshd is None:
            return []
        return list(Path(f"/proc/{self.sshd.pid}/root/tmp").glob("horovod_train-*"))

    def in_mounts(self, *command: str) -> None:
        """Run a command where it sees, and changes, what this host sees of the file system."""
        assert self.sshd is not None
        run("nsenter", "-t", str(self.sshd.pid), "-m", *command)


@dataclass
class Cluster:
    """The hosts, and a login host to launch from."""

    folder: Path
    network: Network
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
        named = ("sh", "-c", 'hostname login && exec "$0" "$@"', *arguments)
        return ["ip", "netns", "exec", self.nodes["login"].namespace, "unshare", "-u", *named]

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

    def cli(
        self, folder: Path, variables: Mapping[str, str]
    ) -> Callable[..., subprocess.CompletedProcess[str]]:
        """Return a function that calls ``horovod-train`` in a folder on the login host."""

        def call(
            *arguments: str, check: bool = True, programs: Path = BIN
        ) -> subprocess.CompletedProcess[str]:
            own = {**variables, "XDG_STATE_HOME": str(folder / "state")}
            done = self.on_login(str(programs / "horovod-train"), *arguments, cwd=folder, env=own)
            assert not check or done.returncode == 0, done.stdout + done.stderr
            return done

        return call

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
            left += [f"{node.name}: {path.name}" for node in self.nodes.values() for path in node.stages()]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.1)

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
    if reason := why_not(*NEEDS):
        pytest.skip(reason)
    nodes: dict[str, Node] = {}
    try:
        with network(("login", *names)) as made:
            nodes |= {name: Node(name, made.namespace(name)) for name in ("login", *names)}
            hosts = Cluster(folder, made, nodes)
            _make_keys(hosts, names)
            for name in names:
                hosts.start_sshd(name)
            yield hosts
    finally:
        for node in nodes.values():
            if node.sshd is not None:
                node.sshd.wait(10)


def _make_keys(hosts: Cluster, names: Sequence[str]) -> None:
    """A key for each host, and one for the user; the login host knows all of them."""
    known = []
    for name in ("", *(f"{name}-host-" for name in names)):
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(hosts.folder / f"{name}key"))
    for name in names:
        key = (hosts.folder / f"{name}-host-key.pub").read_text()
        known.append(f"{name},{hosts.network.addresses[name]} {key}")
    (hosts.folder / "known_hosts").write_text("".join(known))


def _cmdline(pid: int) -> list[str]:
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return [] if process.status() == psutil.STATUS_ZOMBIE else process.cmdline()
    return []


def _is_sshd(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).name().startswith("sshd")
    return True
