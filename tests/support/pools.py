"""Pools: ranks that live as long as tests use them, and run one program after the other."""

from __future__ import annotations

import json
import secrets
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from support.launching import PROGRAMS, TIMEOUT_S, bin_of, environment, name_of, variables_of

# Of two ranks; each framework has one, so that a pool serves several files.
CONTROLLERS = {
    "torch": "mpi",
    "tensorflow": "mpi",
    "keras on tensorflow": "gloo",
    "keras on torch": "mpi",
    "keras on jax": "gloo",
    "jax": "mpi",
    "lightning": "mpi",
    "transformers": "gloo",
    "mxnet": "mpi",
}
# Horovod's threads poll for work: ranks that wait take half a processor from the others.
MAX_POOLS = 1
PROCESSES: set[int] = set()
"""Process numbers of the launchers of pools, which are no leftovers of a test."""


class Pool:
    """Ranks under the real horovodrun.

    Args:
        framework: Whose environment and variables they have.
        num_ranks: How many.
        controller: mpi or gloo.
        log: Where what launchers say goes.
    """

    def __init__(self, framework: str, num_ranks: int, controller: str, log: Path) -> None:
        token = secrets.token_hex(8)
        programs = bin_of(name_of(framework))
        self._streams: dict[int, Any] = {}
        with socket.create_server(("127.0.0.1", 0), backlog=num_ranks) as server, log.open("wb") as output:
            server.settimeout(TIMEOUT_S)
            self._process = subprocess.Popen(
                [
                    *(str(programs / "horovodrun"), f"--{controller}", "-np", str(num_ranks)),
                    *(str(programs / "python"), str(PROGRAMS / "pool_rank.py"), str(server.getsockname()[1])),
                ],
                env=environment(programs=programs, POOL_TOKEN=token, **variables_of(framework)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            PROCESSES.add(self._process.pid)
            while len(self._streams) < num_ranks:
                connection, _ = server.accept()
                connection.settimeout(TIMEOUT_S)
                stream = connection.makefile("rw")
                connection.close()
                hello = json.loads(stream.readline())
                assert hello["token"] == token
                self._streams[hello["rank"]] = stream

    def run(
        self,
        program: str | Path,
        *arguments: str,
        folder: Path,
        alone: bool = False,
        env: Mapping[str, str] | None = None,
        check: bool = True,
    ) -> list[dict[str, Any]]:
        """Run a program on all ranks, or on rank 0 as if there were no others.

        Returns:
            For each rank, its exit code and its output.
        """
        request = {
            "program": str(PROGRAMS / program),
            "arguments": list(arguments),
            "folder": str(folder),
            "alone": alone,
            "env": dict(env or {}),
        }
        try:
            for stream in self._streams.values():
                stream.write(json.dumps(request) + "\n")
                stream.flush()
            answers = [json.loads(self._streams[rank].readline()) for rank in sorted(self._streams)]
        except (OSError, ValueError):
            self.close()  # a rank that hangs or has died takes the pool along
            raise
        if check:
            for rank, answer in enumerate(answers):
                assert answer["code"] == 0, f"rank {rank}: {answer['output'][-6000:]}"
        return answers

    @property
    def is_open(self) -> bool:
        return bool(self._streams)

    def close(self) -> None:
        """End all ranks."""
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            with suppress(OSError):
                stream.close()
        with suppress(psutil.NoSuchProcess):
            family = psutil.Process(self._process.pid).children(recursive=True)
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
            for process in family:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        self._process.wait()
        PROCESSES.discard(self._process.pid)


class Pools:
    """The pools of a test session, made when they are wanted.

    Args:
        folder: For their logs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pools: dict[tuple[str, int, str], Pool] = {}

    def get(self, framework: str, num_ranks: int, controller: str) -> Pool:
        """Return a pool; the one that was not used for longest makes room."""
        key = (framework, num_ranks, controller)
        pool = self._pools.pop(key, None)
        if pool is None or not pool.is_open:
            while len(self._pools) >= MAX_POOLS:
                self._pools.pop(next(iter(self._pools))).close()
            log = self._folder / f"{framework}-{num_ranks}-{controller}.log"
            pool = Pool(framework, num_ranks, controller, log)
        self._pools[key] = pool
        return pool

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
