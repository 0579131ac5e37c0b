"""Tracker for MLflow 3: a database on this machine, or a server."""

from __future__ import annotations

import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from time import monotonic, time
from typing import Any
from urllib.parse import urlsplit
from zlib import crc32

from horovod_train.config.fields import Section
from horovod_train.config.problems import flat
from horovod_train.config.support import TrackerSupport
from horovod_train.errors import UserError
from horovod_train.system.machine import import_optional
from horovod_train.telemetry.tracking import OneValuePerStep, SummaryValues, TrackedRun

EXTRA = "pip install 'horovod_train[mlflow]'"
FLUSH_S = 2.0
MAX_BATCH = 500
"""Values are sent every ``FLUSH_S``, or when this many are pending: a request per step would cost time."""

MAX_PARAMS_PER_REQUEST = 100
MAX_KEY_CHARS = 200
LEFT_S = 3600.0
"""Age from which an incomplete database is removed."""
DATABASE = "mlflow.db"
FOLDER_TAG, RUN_TAG = "horovod_train.folder", "horovod_train.run_id"
STATES = {"succeeded": "FINISHED", "preempted": "KILLED", "failed": "FAILED"}


class Arguments(Section):
    """Arguments of MLflow."""

    uri: str | None = None
    """Tracking URI; null: ``MLFLOW_TRACKING_URI``, or else the database ``mlflow.db`` in ``run_dir``."""

    experiment: str | None = None
    """Name of the experiment; null: ``MLFLOW_EXPERIMENT_NAME``, or else the name of the job."""


SUPPORT = TrackerSupport(f"{__name__}:MlFlow", Arguments, default_place="../mlflow.db")


class MlFlow:
    """Tracker for MLflow: parameters, metrics, tags, and the path of the newest checkpoint.

    A run and all its resumes are one MLflow run. This tracker stores one value per step: after a resume or a
    return to a checkpoint, repeated steps keep their first values, and the tag ``horovod_train.returned_to``
    is the first step that was repeated last.

    Args:
        uri: Tracking URI; None: ``MLFLOW_TRACKING_URI``, or else the database ``mlflow.db`` in the folder
            that contains all jobs. Credentials are read from MLflow's environment variables.
        experiment: Name of the experiment; None: ``MLFLOW_EXPERIMENT_NAME``, or else the name of the job.
            With ``MLFLOW_RUN_ID``, the run of a job is a child of that run, in its experiment.

    Raises:
        UserError: MLflow is not installed, or the URI contains credentials.
    """

    def __init__(self, uri: str | None = None, experiment: str | None = None) -> None:
        if find_spec("mlflow") is None:  # importing it takes seconds, and is left to the tracker's thread
            raise UserError("the tracker mlflow: the package mlflow is not installed", hint=EXTRA)
        if uri is not None and "@" in urlsplit(uri).netloc:
            raise UserError(
                "the tracker mlflow: `uri` contains credentials",
                hint="set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD by launch.secrets",
            )
        self._uri = uri
        self._experiment = experiment
        self._metrics: list[Any] = []
        self._flushed_s = 0.0
        self.is_preparing = not (uri or os.environ.get("MLFLOW_TRACKING_URI"))

    def start(self, run: TrackedRun) -> None:
        """Create an MLflow run, or continue that of the run that is resumed."""
        try:
            self._start(run)
        finally:
            self.is_preparing = False

    def _start(self, run: TrackedRun) -> None:
        mlflow = import_optional("mlflow", needed_by="the tracker mlflow", hint=EXTRA)
        self._entities, self._error = mlflow.entities, mlflow.exceptions.MlflowException
        store = run.folder.parent
        uri = self._uri or mlflow.environment_variables.MLFLOW_TRACKING_URI.get()
        if not uri:
            _create_database(mlflow.MlflowClient, store / DATABASE)
        self._client = mlflow.MlflowClient(tracking_uri=uri or f"sqlite:///{store / DATABASE}")
        last = {"step": 0, "evaluation": 0}
        tags = {FOLDER_TAG: str(run.folder), RUN_TAG: run.run_id, "horovod_train.ranks": str(run.world_size)}
        if parent := os.environ.get("MLFLOW_RUN_ID"):
            experiment_id = self._client.get_run(parent).info.experiment_id
            tags["mlflow.parentRunId"] = parent
        else:
            name = self._experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or str(run.job["name"])
            experiment_id = self._find_experiment(name, None if uri else store / "mlflow-artifacts")
        earlier = self._find_run(experiment_id, run.folder) if run.step else None
        fields = {name: str(value) for name, value in flat(run.job)}
        if earlier is None:
            made = self._client.create_run(experiment_id, run_name=run.run_id, tags=tags)
            self._id = made.info.run_id
            params = {**fields, **{f"version.{name}": each for name, each in run.versions.items()}}
            self._log_params(params)
        else:
            last = self._continue(earlier, fields, tags)
        self._steps = OneValuePerStep(last, run.step, self._note_return)
        for step, values in run.missing(last):
            self.log(step, math.nan, values)

    def _continue(self, earlier: Any, fields: Mapping[str, str], tags: Mapping[str, str]) -> dict[str, int]:
        """Continue an MLflow run, and return its last stored step by kind."""
        self._id = earlier.info.run_id
        self._client.update_run(self._id, status="RUNNING")
        changed = {  # parameters cannot be changed
            f"changed.{name}": value
            for name, value in fields.items()
            if earlier.data.params.get(_key(name), value) != value
        }
        self._set_tags({**tags, **changed})
        names = [name for name in earlier.data.metrics if name.startswith("eval/")]
        return {"step": self._last_step(["loss"]), "evaluation": self._last_step(names)}

    def _note_return(self, step: int) -> None:
        self._set_tags({"horovod_train.returned_to": str(step)})

    def log(self, step: int, epochs: float, values: Mapping[str, float]) -> None:
        """Store values, unless this or a later step is already stored."""
        if not self._steps.accepts(step, values):
            return
        now_ms = int(time() * 1000)
        self._metrics += [
            self._entities.Metric(_key(name), value, now_ms, step) for name, value in values.items()
        ]
        if len(self._metrics) >= MAX_BATCH or monotonic() - self._flushed_s > FLUSH_S:
            self._flush()

    def summarize(self, values: SummaryValues) -> None:
        """Store summary values as metrics of the last step, and the checkpoint's path as tag and artifact."""
        now_ms = int(time() * 1000)
        self._metrics += [
            self._entities.Metric(_key(f"summary/{name}"), value, now_ms, self._steps.last_step)
            for name, value in values.items()
            if not isinstance(value, str)
        ]
        self._state = str(values.get("state", "failed"))
        if "checkpoint" in values:
            self._set_tags({"horovod_train.checkpoint": str(values["checkpoint"])})
            self._client.log_text(self._id, f"{values['checkpoint']}\n", "checkpoint.txt")

    def end(self) -> None:
        """Send the remaining values, and set the status of the run."""
        self._flush()
        self._client.set_terminated(self._id, STATES.get(self._state, "FAILED"))

    _state = "failed"

    def _flush(self) -> None:
        for begin in range(0, len(self._metrics), MAX_BATCH):
            self._client.log_batch(self._id, metrics=self._metrics[begin : begin + MAX_BATCH])
        self._metrics = []
        self._flushed_s = monotonic()

    def _find_experiment(self, name: str, artifacts: Path | None) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        try:
            return str(self._client.create_experiment(name, str(artifacts) if artifacts else None))
        except self._error:
            found = self._client.get_experiment_by_name(name)  # another job has created it
            if found is None:
                raise
            return str(found.experiment_id)

    def _find_run(self, experiment_id: str, folder: Path) -> Any:
        """Return the newest run of a folder; None: there is none."""
        quote = '"' if "'" in str(folder) else "'"
        runs = self._client.search_runs(
            [experiment_id],
            f"tags.`{FOLDER_TAG}` = {quote}{folder}{quote}",
            order_by=["attributes.start_time DESC"],
            max_results=1,
        )
        return runs[0] if runs else None

    def _last_step(self, names: list[str]) -> int:
        """Return the last step that has a value of one of some metrics."""
        histories = (self._client.get_metric_history(self._id, name) for name in names)
        return max((each.step for history in histories for each in history), default=0)

    def _log_params(self, params: Mapping[str, str]) -> None:
        named = {_key(name): value for name, value in params.items()}
        listed = [self._entities.Param(name, value) for name, value in named.items()]
        for begin in range(0, len(listed), MAX_PARAMS_PER_REQUEST):
            self._client.log_batch(self._id, params=listed[begin : begin + MAX_PARAMS_PER_REQUEST])

    def _set_tags(self, tags: Mapping[str, str]) -> None:
        listed = [self._entities.RunTag(_key(name), value) for name, value in tags.items()]
        self._client.log_batch(self._id, tags=listed)


def _create_database(client: Callable[..., object], path: Path) -> None:
    """Create a database atomically, because MLflow cannot use one whose creation was interrupted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{path.name}-*"):  # a rank was killed while it created one
        with suppress(FileNotFoundError):  # another job has just completed its own
            if time() - left.stat().st_mtime > LEFT_S:
                shutil.rmtree(left, ignore_errors=True)
    if path.exists():
        return
    folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}-"))
    try:
        client(tracking_uri=f"sqlite:///{folder / path.name}")
        if not path.exists():
            (folder / path.name).rename(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _key(name: str) -> str:
    """Return a name that MLflow accepts; if it differs, with a checksum, because it must be unique."""
    found = re.sub(r"/+", "/", re.sub(r"[^\w./ -]", "_", name, flags=re.ASCII)).strip("/")
    if found == name and len(name) <= MAX_KEY_CHARS and ".." not in name:
        return name
    return f"{found[:MAX_KEY_CHARS].replace('..', '__')}_{crc32(name.encode(errors='replace')):08x}"
