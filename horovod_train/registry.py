"""Registries: tables from names in a job description to import paths.

A row ``name -> "module:attribute"`` is imported on first use, so that ``--help`` imports nothing. It leads to
a class or function, or, as ``module:SUPPORT`` (or another name with this end), to an object that declares
what a job may ask of it (``config/support.py``). Validation imports such a module, which therefore imports no
framework; the attribute ``factory`` of the object leads to the class or function. Other packages add rows
through entry points. These rows cannot replace rows of this package, and a row that cannot be imported
affects only jobs that use it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from horovod_train.errors import HorovodTrainError, UnknownNameError, UserError, result_of

OF_A_FILE = "horovod_train_task_"
"""Begin of the names of modules that are imported from files."""

SUPPORT = "SUPPORT"
"""End of the name of an object that declares what a job may ask of a row."""


@dataclass(frozen=True)
class Registry:
    """One table of names and import paths.

    Attributes:
        kind: Kind of the rows, for messages, such as ``launcher``.
        group: Entry-point group through which other packages add rows.
        builtin: Rows of this package.
        is_light: The modules of all rows import no framework: validation may import them.
    """

    kind: str
    group: str
    builtin: Mapping[str, str]
    is_light: bool = False

    @cached_property
    def rows(self) -> dict[str, str]:
        """All rows; rows of this package replace rows of other packages with the same name."""
        outside = {point.name: point.value for point in entry_points(group=self.group)}
        return {**outside, **self.builtin}

    def location(self, name: str) -> str:
        """Return ``module:attribute`` of a name.

        Raises:
            UnknownNameError: The table has no such name.
        """
        if name in self.builtin:  # avoids scanning the entry points of all packages, which is slow
            return self.builtin[name]
        try:
            return self.rows[name]
        except KeyError:
            raise UnknownNameError(self.kind, name, self.rows) from None

    def load(self, name: str) -> Any:
        """Import and return the class or function of a row, or of an import path.

        Raises:
            UnknownNameError: The table has no such name.
            UserError: The import path is not valid.
        """
        location = name if ":" in name else self.location(name)
        found = self._attribute(location, name)
        return self._attribute(found.factory, name) if location.endswith(SUPPORT) else found

    def support(self, name: str) -> object | None:
        """Import and return the support object of a row or of ``module:SUPPORT``; None: there is none.

        Raises:
            UnknownNameError: The table has no such name.
            UserError: The import path is not valid.
        """
        location = name if ":" in name else self.location(name)
        return self._attribute(location, name) if location.endswith(SUPPORT) else None

    def support_or_none(self, name: str) -> object | None:
        """Import and return the support object of a row; None: there is none, or it cannot be imported."""
        try:
            return self.support(name)
        except HorovodTrainError:
            return None

    def _attribute(self, location: str, name: str) -> Any:
        if location.rpartition(":")[0].endswith(".py"):
            return load_location(location, self)
        return load_attribute(location, what=f"{self.kind} {name!r}")

    def make(self, name: str, call: Callable[[Any], Any], *, args_field: str) -> Any:
        """Import the class of a row, of ``module:Class`` or of ``/path/file.py:Class``; return an instance.

        ``call`` calls the class or function with the job's arguments, which are in the field ``args_field``.

        Raises:
            UnknownNameError: The table has no such name.
            UserError: The class cannot be imported, or raises TypeError or ValueError for its arguments.
        """
        factory = self.load(name)
        try:
            return call(factory)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{self.kind} {name!r} cannot be created: {error}",
                hint=f"{args_field} must fit the arguments of its class",
            ) from error


def load_attribute(location: str, *, what: str) -> Any:
    """Import and return the attribute of an import path such as ``torch.optim:SGD``.

    Raises:
        UserError: The module cannot be imported or lacks the attribute; the message begins with ``what``.
    """
    module_name, _, attribute = location.partition(":")
    module, error = result_of(lambda: importlib.import_module(module_name))
    if error is not None:
        kind = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
        raise UserError(
            f"{what}: cannot import {module_name!r}: {kind}{error}",
            hint="install the package it comes from, or correct the name",
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise UserError(f"{what}: module {module_name!r} has no {attribute!r}") from None


def load_location(location: str, table: Registry) -> Any:
    """Return the object of a row of a table, of ``module:name``, or of ``/path/file.py:name``.

    A file is imported once per process, under a module name that is derived from the file's.

    Raises:
        UnknownNameError: The table has no such row.
        UserError: The object cannot be imported.
    """
    if ":" not in location:
        return table.load(location)
    what = f"{table.kind} {location}"
    file, _, name = location.rpartition(":")
    if not file.endswith(".py"):
        make_task_importable(location)
        return load_attribute(location, what=what)
    module_name = f"{OF_A_FILE}{Path(file).stem}"
    known = sys.modules.get(module_name)
    if known is not None and known.__file__ != file:  # a file of the same name in another folder
        module_name = f"{module_name}_{zlib.crc32(os.fsencode(file)):08x}"
    if module_name not in sys.modules:
        _import_file(file, module_name, what)
    return load_attribute(f"{module_name}:{name}", what=what)


def _import_file(file: str, module_name: str, what: str) -> None:
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None or not Path(file).is_file():
        raise UserError(f"{what}: no such file", hint="every host needs the file at this path")
    module = importlib.util.module_from_spec(spec)
    # Objects that are pickled for loader processes refer to their classes by module name.
    sys.modules[module_name] = module
    sys.path.insert(0, str(Path(file).parent))
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        raise UserError(
            f"{what}: {error}",
            hint=f"install the package; a file of yours belongs into {Path(file).parent}, and into "
            "submit(..., files=[...]) if a server runs the job",
        ) from error


def make_task_importable(location: str) -> None:
    """Add the current folder to ``sys.path`` if it contains the module of a task ``module:Class``.

    Otherwise ``sys.path`` is not changed, because a file in the current folder could replace a module of this
    package or of Python. Other forms of ``location`` have no effect.
    """
    module, colon, _ = location.rpartition(":")
    if not colon or module.endswith(".py"):
        return
    folder, top = Path.cwd(), module.partition(".")[0]
    if (folder / f"{top}.py").is_file() or (folder / top).is_dir():
        sys.path[:] = [str(folder), *(path for path in sys.path if path not in ("", str(folder)))]


def load_function(location: str) -> Callable[..., object]:
    """Return the function at ``module:name`` or ``/path/file.py:name``.

    Raises:
        UserError: It cannot be imported.
    """
    found: Callable[..., object] = load_location(location, Registry("function", "", {}))
    return found


FRAMEWORKS = Registry(
    kind="framework",
    group="horovod_train.frameworks",
    builtin={
        "torch": "horovod_train.frameworks.torch:SUPPORT",
        "tensorflow": "horovod_train.plugins.tensorflow:SUPPORT",
        "jax": "horovod_train.plugins.jax:SUPPORT",
        "keras": "horovod_train.plugins.keras:SUPPORT",
        "lightning": "horovod_train.plugins.lightning:SUPPORT",
        "transformers": "horovod_train.plugins.transformers:SUPPORT",
        "mxnet": "horovod_train.plugins.mxnet:SUPPORT",
    },
)

SCRIPT = "script"
"""Framework of a job whose task is a script, ``train.py:__main__``."""

LAUNCHERS = Registry(
    kind="launcher",
    group="horovod_train.launchers",
    builtin={
        "local": "horovod_train.launch.launchers:SUPPORT",
        "horovodrun": "horovod_train.launch.launchers.hosts:HorovodrunLauncher",
        "mpirun": "horovod_train.launch.launchers.hosts:MpirunLauncher",
        "slurm": "horovod_train.launch.launchers.slurm:SUPPORT",
        "mpijob": "horovod_train.plugins.kubernetes:SUPPORT",
        "slurm-allocation": "horovod_train.launch.launchers.slurm.launcher:SlurmAllocationLauncher",
        "pbs": "horovod_train.plugins.pbs:SUPPORT",
        "pbs-allocation": "horovod_train.plugins.pbs.launcher:PbsAllocationLauncher",
        "gridengine": "horovod_train.plugins.gridengine:SUPPORT",
        "gridengine-allocation": ("horovod_train.plugins.gridengine.launcher:GridEngineAllocationLauncher"),
        "flux": "horovod_train.plugins.flux:SUPPORT",
        "flux-allocation": "horovod_train.plugins.flux.launcher:FluxAllocationLauncher",
        "lsf": "horovod_train.plugins.lsf:SUPPORT",
        "lsf-allocation": "horovod_train.plugins.lsf.launcher:LsfAllocationLauncher",
    },
)

PROCESS_MANAGERS = Registry(
    kind="process manager",
    group="horovod_train.process_managers",
    builtin={
        name: f"horovod_train.launch.mpi:{name}" for name in ("orte", "prrte", "hydra", "pals", "jsrun")
    },
)

_TORCH_OPTIMIZERS = Registry(
    kind="optimizer",
    group="horovod_train.optimizers.torch",
    builtin={
        "sgd": "torch.optim:SGD",
        "adam": "torch.optim:Adam",
        "adamw": "torch.optim:AdamW",
        "lars": "pytorch_optimizer:LARS",
        "lamb": "horovod_train.frameworks.torch.state.optimizer:Lamb",
    },
)

_KERAS_OPTIMIZERS = Registry(
    kind="optimizer",
    group="horovod_train.optimizers.keras",
    builtin={
        "sgd": "keras.optimizers:SGD",
        "adam": "keras.optimizers:Adam",
        "adamw": "keras.optimizers:AdamW",
        "lamb": "keras.optimizers:Lamb",
    },
)

_OPTAX_OPTIMIZERS = Registry(
    kind="optimizer",
    group="horovod_train.optimizers.optax",
    builtin={
        "sgd": "optax:sgd",
        "adam": "optax:adam",
        "adamw": "optax:adamw",
        "lars": "optax:lars",
        "lamb": "optax:lamb",
    },
)

_MXNET_OPTIMIZERS = Registry(
    kind="optimizer",
    group="horovod_train.optimizers.mxnet",
    builtin={
        "sgd": "mxnet.optimizer:SGD",
        "adam": "mxnet.optimizer:Adam",
        "lars": "mxnet.optimizer:LARS",
        "lamb": "mxnet.optimizer:LAMB",
    },
)

OPTIMIZERS: Mapping[str, Registry] = {
    "torch": _TORCH_OPTIMIZERS,
    "lightning": _TORCH_OPTIMIZERS,
    "transformers": _TORCH_OPTIMIZERS,
    "tensorflow": _KERAS_OPTIMIZERS,
    "keras": _KERAS_OPTIMIZERS,
    "jax": _OPTAX_OPTIMIZERS,
    "mxnet": _MXNET_OPTIMIZERS,
}


def optimizers_of(framework: str) -> Registry:
    """Return the optimizers of a framework; for a framework of another package, only entry points."""
    nothing = Registry("optimizer", f"horovod_train.optimizers.{framework}", {})
    return OPTIMIZERS.get(framework, nothing)


CODECS = Registry(
    kind="codec",
    group="horovod_train.codecs",
    builtin={
        "fp32": "horovod_train.frameworks.torch.codecs:fp32",
        "fp16": "horovod_train.frameworks.torch.codecs:fp16",
        "bf16": "horovod_train.frameworks.torch.codecs:bf16",
        "powersgd": "horovod_train.plugins.powersgd:SUPPORT",
        "top-k": "horovod_train.plugins.top_k:SUPPORT",
    },
)

STRATEGIES = Registry(
    kind="strategy",
    group="horovod_train.strategies",
    builtin={
        "adasum": "horovod_train.plugins.adasum:SUPPORT",
        "allreduce": "horovod_train.frameworks.torch.strategies.allreduce:SUPPORT",
        "data_parallel": "horovod_train.plugins.data_parallel:SUPPORT",
        "ddp": "horovod_train.frameworks.torch.strategies.ddp:SUPPORT",
        "deepspeed": "horovod_train.plugins.deepspeed:SUPPORT",
        "fsdp": "horovod_train.frameworks.torch.strategies.fsdp:SUPPORT",
        "local_sgd": "horovod_train.plugins.local_sgd:SUPPORT",
        "mesh": "horovod_train.plugins.mesh:SUPPORT",
        "parameter_server": "horovod_train.plugins.parameter_server:SUPPORT",
        "pipeline": "horovod_train.plugins.pipeline:SUPPORT",
        "tensor_parallel": "horovod_train.frameworks.torch.strategies.tensor_parallel:SUPPORT",
        "zero": "horovod_train.frameworks.torch.strategies.zero:SUPPORT",
    },
)

SOURCES = Registry(
    kind="source",
    group="horovod_train.sources",
    builtin={
        "arrays": "horovod_train.plugins.formats.arrays:ArrayRows",
        "arrow": "horovod_train.plugins.formats.arrow:Arrow",
        "images": "horovod_train.plugins.formats.images:ImageFolder",
        "jsonl": "horovod_train.plugins.formats.json_lines:JsonLines",
        "mds": "horovod_train.plugins.formats.mds:Mds",
        "parquet": "horovod_train.plugins.formats.arrow:Parquet",
        "saved_dataset": "horovod_train.plugins.formats.arrow:SavedDataset",
        "tfrecord": "horovod_train.plugins.formats.tfrecord:TfRecord",
        "tokens": "horovod_train.plugins.formats.tokens:Tokens",
        "webdataset": "horovod_train.plugins.formats.webdataset:WebDataset",
    },
    is_light=True,
)

SCALINGS = Registry(
    kind="scaling rule",
    group="horovod_train.scalings",
    builtin={
        "linear": "horovod_train.lr.scaling:linear",
        "sqrt": "horovod_train.lr.scaling:square_root",
        "none": "horovod_train.lr.scaling:unscaled",
        "legw": "horovod_train.lr.scaling:legw",
        "adam_sqrt": "horovod_train.lr.scaling:adam_sqrt",
        "adascale": "horovod_train.lr.scaling:adascale",
    },
    is_light=True,
)

SCHEDULES = Registry(
    kind="schedule",
    group="horovod_train.schedules",
    builtin={
        "constant": "horovod_train.lr.schedules:Constant",
        "step": "horovod_train.lr.schedules:Step",
        "points": "horovod_train.lr.schedules:PiecewiseLinear",
        "cosine": "horovod_train.lr.schedules:Cosine",
        "cosine_restarts": "horovod_train.lr.schedules:CosineRestarts",
        "polynomial": "horovod_train.lr.schedules:Polynomial",
        "inverse_sqrt": "horovod_train.lr.schedules:InverseSqrt",
        "wsd": "horovod_train.lr.schedules:WarmupStableDecay",
        "one_cycle": "horovod_train.lr.schedules:OneCycle",
        "plateau": "horovod_train.lr.schedules:Plateau",
    },
    is_light=True,
)

TRACKERS = Registry(
    kind="tracker",
    group="horovod_train.trackers",
    builtin={
        "csv": "horovod_train.telemetry.trackers.csv_file:SUPPORT",
        "jsonl": "horovod_train.telemetry.trackers.json_lines:SUPPORT",
        "mlflow": "horovod_train.plugins.mlflow:SUPPORT",
        "tensorboard": "horovod_train.plugins.tensorboard:SUPPORT",
        "wandb": "horovod_train.plugins.wandb:SUPPORT",
    },
)

ADVICE = ("horovod_train.plugins.study.table:advice_for",)
"""Functions of a job and its number of ranks that return a warning before it starts; empty: there is none."""

OBSERVERS = (  # hooks of jobs and of users' own loops, in the order in which they are called
    "horovod_train.training.hooks.checks:CheckReplicasIdentical",
    "horovod_train.training.hooks.base:ScheduleArguments",
    "horovod_train.training.hooks.steps:MeasureNoise",  # before the hooks that report its numbers
    "horovod_train.training.hooks.steps:RecordMetrics",
    "horovod_train.training.hooks.steps:AttributeWaiting",
    "horovod_train.training.hooks.steps:ReportProgress",
    "horovod_train.training.hooks.steps:Track",
)

HOOKS = (  # hooks of jobs: the observers, and those that need checkpoints
    "horovod_train.training.hooks.checks:KeepGenerators",
    "horovod_train.training.hooks.saving:EvaluateWithinEpoch",  # before others see the metrics
    *OBSERVERS,
    "horovod_train.training.hooks.checks:CompareWithOneProcess",  # before a checkpoint is written
    "horovod_train.training.hooks.saving:SaveCheckpoints",
    "horovod_train.training.hooks.saving:StopWhenPreempted",
    "horovod_train.training.hooks.spikes:WatchLoss",
    "horovod_train.training.hooks.faults:Inject",  # after a checkpoint of the same step
    "horovod_train.training.hooks.checks:WatchPythonState",  # after the exchange between ranks
)

DEFAULT_STRATEGY = "allreduce"
DEFAULT_SCHEDULE = "constant"
DEFAULT_SCALING = "linear"
"""Rows that a job has if it names none; the scaling rule of optimizers such as SGD, and of unknown ones."""

SCALING_OF_ADAM = "sqrt"
"""Scaling rule of optimizers that divide a gradient by the root of its mean square."""

EXAMPLE_TASK = "digits"
"""Task that needs no data of the user."""

TASKS = Registry(
    kind="task",
    group="horovod_train.tasks",
    builtin={
        "digits": "horovod_train.tasks.digits:Digits",
        "gpt": "horovod_train.tasks.gpt:Gpt",
        "vit-digits": "horovod_train.tasks.vit_digits:VitDigits",
    },
)
