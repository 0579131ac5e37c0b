"""Tracker for Weights & Biases."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from horovod_train.config.fields import Section
from horovod_train.config.problems import flat
from horovod_train.config.support import TrackerSupport
from horovod_train.errors import UserError
from horovod_train.system.machine import import_optional
from horovod_train.telemetry.tracking import OneValuePerStep, SummaryValues, TrackedRun, kind_of

EXTRA = "pip install 'horovod_train[wandb]'"
FILE_HEADER_BYTES, BLOCK_BYTES, RECORD_HEADER_BYTES = 7, 32 * 1024, 7
FIRST, MIDDLE = 2, 3  # types of a record that continues


class Arguments(Section):
    """Arguments of Weights & Biases."""

    project: str | None = None
    """Name of the project; null: ``WANDB_PROJECT``, or else the name of the job."""

    entity: str | None = None
    """Name of the account or team; null: that of the API key."""

    mode: Literal["online", "offline"] | None = None
    """online or offline; null: ``WANDB_MODE``, or else online if ``WANDB_API_KEY`` is set."""


SUPPORT = TrackerSupport(f"{__name__}:WeightsAndBiases", Arguments, default_place="wandb")


class WeightsAndBiases:
    """Tracker for Weights & Biases: configuration, metrics, and a summary.

    A run and all its resumes are one W&B run. This tracker stores one value per step: after a resume or a
    return to a checkpoint, repeated steps keep their first values, and ``returned_to`` in the summary is the
    first step that was repeated last. Offline, files are written to ``wandb`` in the folder of
    the job's runs; ``wandb sync`` sends them. The API key is read from ``WANDB_API_KEY``.

    Args:
        project: Name of the project; None: ``WANDB_PROJECT``, or else the name of the job.
        entity: Name of the account or team; None: that of the API key.
        mode: online or offline; None: ``WANDB_MODE``, or else online if ``WANDB_API_KEY`` is set.

    Raises:
        UserError: The package is not installed.
    """

    def __init__(
        self,
        project: str | None = None,
        entity: str | None = None,
        mode: Literal["online", "offline"] | None = None,
    ) -> None:
        if find_spec("wandb") is None:  # importing it takes a second, and is left to the tracker's thread
            raise UserError("the tracker wandb: the package wandb is not installed", hint=EXTRA)
        if mode not in (None, "online", "offline"):
            raise UserError(f"the tracker wandb: mode is {mode!r}; allowed: online, offline")
        has_key = bool(os.environ.get("WANDB_API_KEY"))
        self._mode = mode or os.environ.get("WANDB_MODE") or ("online" if has_key else "offline")
        self._project = project or os.environ.get("WANDB_PROJECT")
        self._entity = entity

    def start(self, run: TrackedRun) -> None:
        """Create a W&B run, or continue that of the run that is resumed."""
        self._wandb = wandb = import_optional("wandb", needed_by="the tracker wandb", hint=EXTRA)
        folders = sorted((run.folder / "wandb").glob("*run-*-*/")) if run.step else []
        newest = max(folders, key=lambda each: each.stat().st_mtime, default=None)
        run_id = run.run_id if newest is None else newest.name.partition("run-")[2].partition("-")[2]
        run.folder.mkdir(parents=True, exist_ok=True)
        self._run: Any = wandb.init(
            project=self._project or str(run.job["name"]),
            entity=self._entity,
            id=run_id,
            name=run_id,
            dir=run.folder,
            config={**dict(flat(run.job)), "versions": dict(run.versions), "ranks": run.world_size},
            resume="allow",
            mode=self._mode,
            # Its own measurements and its capture of the output cost time in the process of the rank.
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True, disable_git=True),
        )
        stored = [each for folder in folders if folder.name.endswith(run_id) for each in _history(folder)]
        # A row may have values of a step and of the evaluation after it.
        last = {
            kind: max((step for step, name in stored if kind_of([name]) == kind), default=0)
            for kind in ("step", "evaluation")
        }
        last["step"] = max(last["step"], self._run.step - 1)  # online: as the server knows it
        self._steps = OneValuePerStep(last, run.step, self._note_return)
        for step, values in run.missing(last):
            self.log(step, math.nan, values)

    def _note_return(self, step: int) -> None:
        self._run.summary["returned_to"] = step

    def log(self, step: int, epochs: float, values: Mapping[str, float]) -> None:
        """Store values, unless this or a later step is already stored."""
        if self._steps.accepts(step, values):
            self._run.log(dict(values), step=step)

    def summarize(self, values: SummaryValues) -> None:
        """Store summary values."""
        self._run.summary.update(values)
        self._exit_code = 0 if values.get("state") == "succeeded" else 1

    def end(self) -> None:
        """Finish the run; W&B shows it as failed unless training succeeded."""
        self._run.finish(exit_code=self._exit_code)
        self._wandb.teardown()  # its process, and the connections to it

    _exit_code = 1


def _history(folder: Path) -> Iterator[tuple[int, str]]:
    """Yield step and name of each value in the files of an offline run."""
    records = import_optional("wandb.proto.wandb_internal_pb2", needed_by="the tracker wandb", hint=EXTRA)
    for path in sorted(folder.glob("*.wandb")):
        for data in framed(path.read_bytes()):
            record = records.Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                for each in record.history.item:
                    name = each.key or "/".join(each.nested_key)
                    if not name.startswith("_"):
                        yield record.history.step.num, name


def framed(content: bytes) -> Iterator[bytes]:
    """Yield the records of a file in LevelDB's log format, without those that a kill has truncated.

    A record consists of fragments, which do not cross the borders of blocks of 32 KiB: checksum (4 bytes),
    length (2), type (1: whole, 2: first, 3: middle, 4: last), data. A block may end with up to 6 zeros.
    """
    at, begun = FILE_HEADER_BYTES, b""
    while at + RECORD_HEADER_BYTES <= len(content):
        left = BLOCK_BYTES - at % BLOCK_BYTES
        if left < RECORD_HEADER_BYTES:
            at += left
            continue
        size_bytes, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        data = content[at + RECORD_HEADER_BYTES : at + RECORD_HEADER_BYTES + size_bytes]
        if len(data) < size_bytes or not kind:
            return
        at += RECORD_HEADER_BYTES + size_bytes
        begun += data
        if kind not in (FIRST, MIDDLE):
            yield begun
            begun = b""
