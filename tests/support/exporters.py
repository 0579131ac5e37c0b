"""Ranks that only serve metrics: the real recorder and exporter, fed with steps of a given length."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Event, Thread

from horovod_train.collectives.base import SingleRank
from horovod_train.telemetry.catalog import StepRecord, WaitRecord
from horovod_train.telemetry.exporter import Exporter
from horovod_train.telemetry.recorder import Recorder

STEP_S = 0.05


class ServedRanks:
    """Ranks whose steps take equally long, each with so much time of its own.

    Args:
        own_s: Own time of a step, by rank; the rest of a step it waits.
        port: Rank r serves on ``port + r``.
        phase: What its own time is spent in.
    """

    def __init__(self, own_s: list[float], port: int, phase: str = "data") -> None:
        self.own_s = own_s
        self.phase = phase
        self.num_steps = 0
        self.recorders = [
            Recorder("served", "r1", SingleRank(rank, len(own_s), rank, f"n{rank}"), len(own_s))
            for rank in range(len(own_s))
        ]
        self.exporters = [
            Exporter(recorder.registry, "127.0.0.1", port + rank)
            for rank, recorder in enumerate(self.recorders)
        ]
        self._over = Event()
        self._thread = Thread(target=self._work)
        self._thread.start()

    @property
    def addresses(self) -> list[str]:
        return [str(exporter.address) for exporter in self.exporters]

    def write_targets(self, path: Path) -> Path:
        groups = [
            {
                "targets": [address],
                "labels": {"training_job": "served", "run": "r1", "rank": str(rank), "host": f"n{rank}"},
            }
            for rank, address in enumerate(self.addresses)
        ]
        path.write_text(json.dumps(groups))
        return path

    def step(self) -> None:
        """Make one step on all ranks."""
        self.num_steps += 1
        longest_s = max(self.own_s)
        for own_s, recorder in zip(self.own_s, self.recorders, strict=True):
            phases = {self.phase: own_s / 2, "forward": own_s / 2, "allreduce_wait": STEP_S - own_s}
            recorder.record(
                StepRecord(
                    seconds=STEP_S, phase_seconds=phases, num_samples=8, epochs=self.num_steps / 100,
                    loss=2.0 - self.num_steps / 1e4, local_loss=1.0, lr=0.125,
                    is_finite=True, own_seconds=own_s, numbers={"sent_bytes": 1000},
                )
            )  # fmt: skip
            late_s = (longest_s - own_s) if len(self.own_s) > 1 else 0.0
            recorder.record(WaitRecord(late_s, STEP_S - longest_s, 0.0))

    def stop(self) -> None:
        """Make no more steps; go on serving."""
        self._over.set()
        self._thread.join()

    def close(self) -> None:
        self.stop()
        for exporter in self.exporters:
            exporter.close()

    def _work(self) -> None:
        while not self._over.wait(STEP_S):
            self.step()
