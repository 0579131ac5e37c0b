"""Pods that are none: what the MPI operator and a kubelet would do with a manifest, on this machine.

A pod is a container of the image in namespaces of its own (network, processes, mounts, names), as an
ordinary user without privileges; its command is process 1. It sees its volumes, the operator's files,
and the names of the job's service.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from support.image import IMAGE, Builder
from support.namespaces import Network, network

Manifest = Mapping[str, Any]
# As newLauncherPodTemplate of operator 0.8 sets them.
OF_LAUNCHERS = {
    "K_MPI_JOB_ROLE": "launcher",
    "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
    "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
    "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
    "OMPI_MCA_orte_set_default_slots": "1",
    "NVIDIA_VISIBLE_DEVICES": "",
    "NVIDIA_DRIVER_CAPABILITIES": "",
}


@dataclass
class Container:
    """A started container.

    Attributes:
        name: Its host name.
        process: What holds its namespaces.
        log: Where its output goes.
    """

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def first(self) -> psutil.Process:
        """Process 1 of the container."""
        return psutil.Process(self.process.pid).children()[0]

    def terminate(self) -> None:
        """What a kubelet does first."""
        self.first.terminate()

    def end(self, timeout_s: float = 300) -> int:
        """Wait for its end; returns its exit code."""
        return self.process.wait(timeout_s)

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_until_ready(self, within_s: float = 60) -> None:
        """What a readiness probe waits for: sshd accepts connections."""
        deadline = time.monotonic() + within_s
        while "Server listening" not in self.said():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.05)

    def kill(self) -> None:
        with suppress(psutil.NoSuchProcess, IndexError):
            self.first.kill()
        self.process.wait(10)


@dataclass
class Containers:
    """Starts containers of the image."""

    builder: Builder
    network: Network
    folder: Path
    started: list[Container] = field(default_factory=list)
    _ids: list[str] = field(default_factory=list)

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        mounts: Mapping[str, Path] | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> Container:
        """Start a container.

        Args:
            name: Its place in the network.
            command: What it runs; replaces the image's own entry point.
            env: Added to the image's variables.
            mounts: Files and folders by where they are seen; with ``:ro`` they cannot be written.
            aliases: Further names that it knows: host by name.
        """
        container = self.builder.call("from", IMAGE)
        self._ids.append(container)
        root = Path(self.builder.call("mount", container))
        config = self.builder.inspect()["OCIv1"]["config"]
        hosts = [f"{self.network.addresses[host]} {alias}" for alias, host in (aliases or {}).items()]
        own = (Path("/etc/netns") / self.network.namespace(name) / "hosts").read_text()
        (root / "etc" / "hosts").write_text("\n".join([own, *hosts, ""]))
        uid, _, gid = config["User"].partition(":")
        variables = dict(item.split("=", 1) for item in config["Env"])
        variables |= {"HOME": "/home/mpiuser", "HOSTNAME": name, **(env or {})}
        inside = [
            *("/usr/bin/setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--no-new-privs"),
            *("--bounding-set=-all", "--inh-caps=-all"),
            *("/usr/bin/env", "-i", f"--chdir={config['WorkingDir']}"),
            *(f"{key}={value}" for key, value in variables.items()),
            *command,
        ]
        script = self._script(name, root, mounts or {}) + f"exec chroot {root} {shlex.join(inside)}"
        log = self.folder / f"{name}-{len(self.started)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [
                    *("ip", "netns", "exec", self.network.namespace(name)),
                    *("unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child"),
                    *("sh", "-ec", script),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        made = Container(name, process, log)
        self.started.append(made)
        return made

    def _script(self, name: str, root: Path, mounts: Mapping[str, Path]) -> str:
        lines = [
            f"hostname {name}",
            f"mount -t proc proc {root}/proc",
            f"mount -t sysfs -o ro sysfs {root}/sys",
            f"mount -t tmpfs -o mode=1777 tmpfs {root}/tmp",  # noqa: S108
            f"mount --rbind /dev {root}/dev",
            f"mount -t tmpfs -o mode=1777 tmpfs {root}/dev/shm",  # noqa: S108
        ]
        for where, source in mounts.items():
            path, _, option = where.partition(":")
            make = "mkdir -p" if source.is_dir() else "install -D /dev/null"
            lines.append(f"[ -e {root}{path} ] || {make} {root}{path}")
            lines.append(f"mount --bind {source} {root}{path}")
            if option == "ro":
                lines.append(f"mount -o remount,bind,ro {root}{path}")
        return "; ".join([*lines, ""])

    def remove(self) -> None:
        for container in self.started:
            container.kill()
        for name in self._ids:
            self.builder.call("rm", name)


@contextmanager
def containers(builder: Builder, folder: Path, names: Sequence[str]) -> Iterator[Containers]:
    """Make places for containers; at the end nothing of them is left."""
    with network(names) as made:
        started = Containers(builder, made, folder)
        try:
            yield started
        finally:
            started.remove()


class Volume:
    """A ConfigMap or Secret as a kubelet mounts it: each name is a link, over ``..data``, into a folder
    whose own name is another one in each pod and after each change.

    Args:
        path: What is mounted.
        files: Contents by name.
    """

    def __init__(self, path: Path, files: Mapping[str, bytes]) -> None:
        self.path = path
        path.mkdir()
        path.chmod(0o1777)
        self.write(files)

    def write(self, files: Mapping[str, bytes], mode: int = 0o644) -> None:
        """Replace all files at once."""
        folder = Path(tempfile.mkdtemp(prefix="..2026_11_22_10_00_00.", dir=self.path))
        folder.chmod(0o755)
        for name, content in files.items():
            (folder / name).write_bytes(content)
            (folder / name).chmod(mode)
        (self.path / "..data_tmp").symlink_to(folder.name)
        (self.path / "..data_tmp").replace(self.path / "..data")
        for name in files:
            if not (self.path / name).is_symlink():
                (self.path / name).symlink_to(f"..data/{name}")


def make_key(folder: Path) -> dict[str, bytes]:
    """Make the key pair of a job as the operator does, and return what is in its Secret."""
    folder.mkdir()
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-N", "", "-f", str(folder / "id_rsa")], check=True
    )
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    return {**files, "authorized_keys": files["id_rsa.pub"]}


class MpiJob:
    """A rendered job, carried out as the operator would.

    Args:
        containers: Places named after the pods.
        manifests: What was rendered.
        secrets: Values by ``name/key``.
    """

    def __init__(
        self, containers: Containers, manifests: Sequence[Manifest], secrets: Mapping[str, str] | None = None
    ) -> None:
        self.containers = containers
        self.folder = containers.folder
        config_map, self.mpi_job = manifests[0], manifests[1]
        self.name = self.mpi_job["metadata"]["name"]
        self.secrets = secrets or {}
        self.key = make_key(self.folder / "ssh")
        self.data = self.folder / "data"
        self.data.mkdir()
        os.chown(self.data, 1000, 1000)
        self.config = {name: text.encode() for name, text in config_map["data"].items()}
        self.mpi = Volume(self.folder / "mpi", {})
        self.announce(range(self.mpi_job["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"]))

    def announce(self, numbers: Sequence[int] | range) -> None:
        """Write the operator's files: all workers there should be, and those that run."""
        slots = self.mpi_job["spec"]["slotsPerWorker"]
        hosts = [f"{self.name}-worker-{number}.{self.name}.default.svc" for number in numbers]
        hostfile = "".join(f"{host} slots={slots}\n" for host in hosts)
        script = "\n".join(["#!/bin/sh", *(f"echo {host}" for host in hosts), ""])
        files = {"hostfile": hostfile.encode(), "discover_hosts.sh": script.encode()}
        self.mpi.write(files, mode=0o555)

    def start_worker(self, number: int) -> Container:
        return self._start("Worker", f"{self.name}-worker-{number}", {"K_MPI_JOB_ROLE": "worker"}, {})

    def start_launcher(self, **env: str) -> Container:
        name = f"{self.name}-launcher"
        return self._start("Launcher", name, {**OF_LAUNCHERS, **env}, {"/etc/mpi:ro": self.mpi.path})

    def _start(self, role: str, name: str, env: Mapping[str, str], more: Mapping[str, Path]) -> Container:
        template = self.mpi_job["spec"]["mpiReplicaSpecs"][role]["template"]["spec"]
        (container,) = template["containers"]
        assert template["securityContext"]["runAsUser"] == 1000
        own = {}
        for variable in container.get("env", []):
            reference = variable.get("valueFrom", {}).get("secretKeyRef")
            secret = f"{reference['name']}/{reference['key']}" if reference else ""
            own[variable["name"]] = variable["value"] if not secret else self.secrets[secret]
        paths = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        own_volumes = self.folder / f"volumes-of-{name}-{len(self.containers.started)}"
        own_volumes.mkdir()
        mounts = {
            f"{self.mpi_job['spec']['sshAuthMountPath']}:ro": Volume(own_volumes / "ssh", self.key).path,
            f"{paths['job']}:ro": Volume(own_volumes / "job", self.config).path,
            paths["volume-0"]: self.data,
        }
        service = f"{self.name}.default.svc"
        return self.containers.start(
            name,
            container["command"],
            env={**own, **env},
            mounts={**mounts, **more},
            aliases={
                alias: host
                for host in self.containers.network.addresses
                for alias in (f"{host}.{service}", f"{host}.{self.name}")
            },
        )
