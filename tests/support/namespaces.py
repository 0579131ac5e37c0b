"""Network namespaces on one switch: as many hosts as a test wants, with names and addresses.

    login 10.77.0.10      the first
    node1 10.77.0.11      ...

Each has eth0, on which it reaches the others, and eth1, which leads nowhere. Everything is removed at
the end, processes included.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

SUBNET = "10.77.0"


def why_not(*programs: str) -> str:
    """Return what is missing to make hosts here that need these programs; empty: nothing."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    missing = [program for program in ("ip", *programs) if shutil.which(program, path=path) is None]
    if missing:
        return f"{', '.join(missing)} missing: `make servers` installs what the tests need"
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
class Network:
    """The switch, and what hangs on it.

    Attributes:
        prefix: How the names of these namespaces begin.
        addresses: By host.
    """

    prefix: str = field(default_factory=lambda: f"ht{os.getpid()}")
    addresses: dict[str, str] = field(default_factory=dict)

    @property
    def switch(self) -> str:
        return f"{self.prefix}switch"

    def namespace(self, name: str) -> str:
        return f"{self.prefix}{name}"

    def set_link(self, name: str, state: str) -> None:
        """Cut a host off (``down``), or connect it again (``up``)."""
        run("ip", "-n", self.switch, "link", "set", f"to-{self._number(name)}", state)

    def _number(self, name: str) -> int:
        return list(self.addresses).index(name)

    def _add(self, name: str, number: int) -> None:
        address, namespace = f"{SUBNET}.{10 + number}", self.namespace(name)
        self.addresses[name] = address
        run("ip", "netns", "add", namespace)
        run("ip", "-n", namespace, "link", "set", "lo", "up")
        link = ("type", "veth", "peer", "name", "eth0", "netns", namespace)
        run("ip", "-n", self.switch, "link", "add", f"to-{number}", *link)
        run("ip", "-n", self.switch, "link", "set", f"to-{number}", "master", "br0", "up")
        run("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
        run("ip", "-n", namespace, "link", "set", "eth0", "up")
        run("ip", "-n", namespace, "link", "add", "eth1", "type", "veth", "peer", "name", "eth1-end")
        run("ip", "-n", namespace, "link", "set", "eth1-end", "up")
        run("ip", "-n", namespace, "addr", "add", f"10.78.{number}.1/24", "dev", "eth1")
        run("ip", "-n", namespace, "link", "set", "eth1", "up")

    def _write_names(self) -> None:
        """Every host knows the others by name, and asks nobody else."""
        hosts = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in self.addresses.items())]
        for name in self.addresses:
            etc = Path("/etc/netns") / self.namespace(name)
            etc.mkdir(parents=True)
            (etc / "hosts").write_text("\n".join([*hosts, ""]))
            (etc / "resolv.conf").write_text("")

    def _remove(self) -> None:
        for name in self.addresses:
            for pid in pids_in(self.namespace(name)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", self.namespace(name)], check=False, capture_output=True)
            shutil.rmtree(Path("/etc/netns") / self.namespace(name), ignore_errors=True)
        subprocess.run(["ip", "netns", "del", self.switch], check=False, capture_output=True)


@contextmanager
def network(names: Sequence[str]) -> Iterator[Network]:
    """Make hosts, and remove them and all their processes at the end."""
    made = Network()
    try:
        run("ip", "netns", "add", made.switch)
        run("ip", "-n", made.switch, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", made.switch, "link", "set", "br0", "up")
        for number, name in enumerate(names):
            made._add(name, number)
        made._write_names()
        yield made
    finally:
        made._remove()
