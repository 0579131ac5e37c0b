"""Tracker that writes event files for TensorBoard, without importing TensorFlow."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from time import time
from types import ModuleType

from horovod_train.config.fields import Section
from horovod_train.config.problems import flat
from horovod_train.config.support import TrackerSupport
from horovod_train.system.machine import import_optional
from horovod_train.telemetry.tracking import SummaryValues, TrackedRun, kind_of

VERSION = "brain.Event:2"
HEAD_BYTES, CHECKSUM_BYTES = 12, 4  # of a TFRecord: length (8) and its checksum; checksum of the data
EXTRA = "pip install 'horovod_train[tensorboard]'"


class Arguments(Section):
    """Arguments of TensorBoard's event files."""

    path: str | None = None
    """Folder, relative to the folder of the job's runs; null: ``tensorboard``."""


SUPPORT = TrackerSupport(f"{__name__}:TensorBoard", Arguments, default_place="tensorboard")


class TensorBoard:
    """Tracker for TensorBoard: scalars, and the job's fields as hyperparameters.

    A run and all its resumes are one TensorBoard run, named after the first of them. A resume adds a file to
    the same folder; TensorBoard then discards values of later steps, as after a return to a checkpoint.

    Args:
        path: Folder, relative to the folder of the job's runs; None: ``tensorboard``. An absolute path gets a
            folder for each job.

    Raises:
        UserError: TensorBoard is not installed.
    """

    def __init__(self, path: str | None = None) -> None:
        self._folder = Path(path or "tensorboard")
        self._events = _module("compat.proto.event_pb2")
        self._summaries = _module("compat.proto.summary_pb2")
        self._records = _module("summary.writer.record_writer")

    def start(self, run: TrackedRun) -> None:
        """Create an event file.

        Raises:
            OSError: The file cannot be created.
        """
        folder = run.folder / self._folder.expanduser()
        if self._folder.expanduser().is_absolute():  # jobs may share it
            folder /= str(run.job["name"])
        earlier = [each for each in folder.glob("*/") if each.is_dir()] if run.step else []
        folder = max(earlier, key=lambda each: each.stat().st_mtime, default=folder / run.run_id)
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a run in the order of their names.
        before = sorted(folder.glob("events.out.tfevents.*"))
        newest_s = max((int(path.name.split(".")[3]) for path in before), default=0)
        begun_s = max(int(time()), newest_s)  # the clock may have been set back
        host = socket.gethostname()
        name = f"events.out.tfevents.{begun_s:010d}.{len(before):06d}.{host}.{os.getpid()}"
        self._file = (folder / name).open("xb")
        self._writer = self._records.RecordWriter(self._file)
        self._last_step = run.step
        # A resume may repeat the evaluation of the step at which it begins.
        is_evaluated = any(self._has_evaluation(path, run.step) for path in before)
        self._last_evaluation = run.step if is_evaluated else run.step - 1
        self._write(file_version=VERSION)
        if run.step:
            self._discard_from(run.step + 1)
        self._write(summary=_hyperparameters(self._summaries, {**dict(flat(run.job)), **run.versions}))

    def log(self, step: int, epochs: float, values: Mapping[str, float]) -> None:
        """Write values; discard those of later steps after a return to a checkpoint."""
        if kind_of(values) == "step":
            if step <= self._last_step:
                self._discard_from(step)
            self._last_step = step
        elif step <= self._last_evaluation:
            return
        else:
            self._last_evaluation = step
        value = self._summaries.Summary.Value
        numbers = {**values} if math.isnan(epochs) else {**values, "epochs": epochs}
        scalars = [value(tag=name, simple_value=number) for name, number in numbers.items()]
        self._write(step=step, summary=self._summaries.Summary(value=scalars))

    def summarize(self, values: SummaryValues) -> None:
        """Write the numbers of the summary as scalars of the last step."""
        value = self._summaries.Summary.Value
        scalars = [
            value(tag=f"summary/{name}", simple_value=number)
            for name, number in values.items()
            if not isinstance(number, str)
        ]
        self._write(step=self._last_step, summary=self._summaries.Summary(value=scalars))

    def end(self) -> None:
        """Close the file."""
        self._file.close()

    def _has_evaluation(self, path: Path, step: int) -> bool:
        """Return whether an event file contains an evaluation of a step."""
        with path.open("rb") as file:
            while len(head := file.read(HEAD_BYTES)) == HEAD_BYTES:
                data = file.read(int.from_bytes(head[:8], "little"))
                if len(file.read(CHECKSUM_BYTES)) < CHECKSUM_BYTES:
                    return False  # cut by a kill
                event = self._events.Event.FromString(data)
                if event.step == step and any(each.tag.startswith("eval/") for each in event.summary.value):
                    return True
        return False

    def _discard_from(self, step: int) -> None:
        self._last_evaluation = min(self._last_evaluation, step - 1)
        log = self._events.SessionLog
        self._write(step=step, session_log=log(status=log.START))

    def _write(self, **fields: object) -> None:
        self._writer.write(self._events.Event(wall_time=time(), **fields).SerializeToString())
        self._file.flush()


def _module(name: str) -> ModuleType:
    found: ModuleType = import_optional(
        f"tensorboard.{name}", needed_by="the tracker tensorboard", hint=EXTRA
    )
    return found


def _hyperparameters(summaries: ModuleType, values: Mapping[str, str | float | bool]) -> object:
    """Return the summary that TensorBoard's plugin hparams reads."""
    plugin = _module("plugins.hparams.plugin_data_pb2")
    metadata = _module("plugins.hparams.metadata")
    started = plugin.SessionStartInfo(start_time_secs=time())
    for name, value in values.items():
        match value:
            case bool():
                started.hparams[name].bool_value = value
            case str():
                started.hparams[name].string_value = value
            case _:
                started.hparams[name].number_value = value
    content = metadata.create_summary_metadata(plugin.HParamsPluginData(session_start_info=started))
    named = summaries.Summary.Value(tag=metadata.SESSION_START_INFO_TAG, metadata=content)
    named.tensor.CopyFrom(metadata.NULL_TENSOR)
    return summaries.Summary(value=[named])
