"""The section ``launch``: number of ranks, hosts, launcher and controller."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, StringConstraints, create_model, field_validator

from horovod_train.config.fields import (
    Count,
    HostName,
    HostSlots,
    InterfaceName,
    OneLine,
    Port,
    ProgramOption,
    Seconds,
    SecretSource,
    Section,
    SshValue,
    VariableName,
    slots_of,
)
from horovod_train.errors import UserError
from horovod_train.registry import LAUNCHERS

Settings = TypeVar("Settings", bound=BaseModel)

AUTO = "auto"
"""The launcher is chosen when a job starts."""


class Ssh(Section):
    """Options of ssh, in addition to the user's ssh configuration."""

    port: Port | None = None
    """Port of sshd on the hosts; null: that of the ssh configuration, or 22."""

    user: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*$")] | None = None
    """User on the hosts; null: that of the ssh configuration, or the current user."""

    identity_file: Annotated[str, StringConstraints(min_length=1)] | None = None
    """Private key; null: ssh's default keys."""

    options: dict[Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9]*$")], SshValue] = {}
    """Further options of ssh_config, such as ``ProxyJump: gateway``."""


class HostSettings(Section):
    """Settings of one host."""

    python: Annotated[str, StringConstraints(pattern=r"^/\S*$")] | None = None
    """Python of the environment on this host; null: the same path as on the launching machine."""

    network_interface: InterfaceName | None = None
    """Network interface to the other hosts; null: that of ``launch``."""

    env: dict[VariableName, str] = {}
    """Environment variables for the ranks on this host."""


class Container(Section):
    """Container image in which ranks run on hosts, with a runtime of HPC sites. MPI is outside and inside.

    This package is installed on the hosts as well, in the same version, without a framework or an engine.
    """

    image: Annotated[str, StringConstraints(pattern=r"^/[^\n\r\x00]*$")]
    """Path of the image, such as ``/apps/horovod_train.sif``; a file, or the folder of a sandbox."""

    runtime: Literal["apptainer", "singularity"] = "apptainer"
    """Program that runs the container."""

    python: Annotated[str, StringConstraints(pattern=r"^[\w/.+-]+$")] = "python3"
    """Python in the image, which has this package and an engine."""

    binds: list[Annotated[str, StringConstraints(pattern=r"^/[^,\n\r\x00]*$")]] = []
    """Further folders to mount, as ``folder[:folder inside[:ro]]``. The folders of the run and the current
    folder are mounted."""

    options: list[ProgramOption] = []
    """Further options of the runtime, such as ``--writable-tmpfs``. GPUs are made available automatically."""


class Elastic(Section):
    """Continue with fewer ranks when hosts are lost, and with more when hosts return.

    When the hosts change, ranks restart from a checkpoint; learning rate and data shards follow their number.
    """

    min_ranks: Count
    """Minimum number of ranks; with fewer, the job waits for hosts."""

    max_ranks: Count | None = None
    """Maximum number of ranks; null: launch.num_ranks, or the slots of launch.hosts."""

    discover: OneLine | None = None
    """Host discovery script that prints hosts in hostfile format; null: launch.hosts. Not for Kubernetes."""

    ranks_per_host: Annotated[int, Field(ge=1, le=1024)] = 1
    """Slots of hosts that the script prints without slots."""

    poll_s: Seconds = 5.0
    """Interval of host discovery, in seconds."""

    cooldown_s: Seconds = 60.0
    """Time for which a lost host is blacklisted, in seconds, doubled on each failure; also the minimum time
    between a start and the addition of hosts."""

    wait_s: Seconds = 600.0
    """Maximum time to wait for ``min_ranks``, in seconds."""

    max_failures: Annotated[int, Field(ge=0, le=1_000_000)] = 3
    """Maximum number of consecutive failures without a new checkpoint."""


class Restarts(Section):
    """Start the ranks again after a failure, from the newest checkpoint.

    Not after errors of the configuration, exhausted memory, numbers that are not finite, or if the task
    raises the same error after the same step twice. A host that has failed twice is not used again; hosts
    beyond ``num_ranks`` are spares.
    """

    max: Annotated[int, Field(ge=1, le=1_000_000)] = 10
    """Maximum number of restarts within ``window_h``."""

    window_h: Annotated[float, Field(gt=0, le=1e6)] = 24.0
    """Time for which a failure counts, in hours."""

    backoff_s: Annotated[list[Seconds], Field(min_length=2, max_length=2)] = [5.0, 300.0]
    """Shortest and longest pause before a restart, in seconds; it doubles with each failure without a new
    checkpoint."""

    @field_validator("backoff_s")
    @classmethod
    def _is_in_order(cls, value: list[float]) -> list[float]:
        """Require the shortest pause first."""
        if value[0] > value[1]:
            raise ValueError("must have the shortest pause first")
        return value


class LaunchFields(Section):
    """Number of ranks, hosts and launcher."""

    launcher: Annotated[str, StringConstraints(min_length=1)] = AUTO
    """Name of a launcher, or auto: one process for one rank; otherwise horovodrun, or mpirun if horovodrun
    does not support the MPI library."""

    num_ranks: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """World size; null: the slots of ``hosts``, or 1. A rank fails if the actual world size differs."""

    hosts: list[HostSlots] = []
    """Hosts, as ``host:slots``; empty: this machine."""

    host_settings: dict[HostName, HostSettings] = {}
    """Settings of individual hosts, by name."""

    controller: Literal["mpi", "gloo"] = "mpi"
    """Horovod's controller backend."""

    ssh: Ssh = Ssh()
    """Options of ssh."""

    network_interface: InterfaceName | None = None
    """Network interface to the other hosts, such as eth0; null: that of the ssh connection."""

    host_timeout_s: Annotated[float, Field(ge=5, le=1e6)] = 20.0
    """Time after which a host that does not respond is lost, and the job ends, in seconds."""

    elastic: Elastic | None = None
    """Continue when hosts are lost or added; null: the job ends when a host is lost."""

    restarts: Restarts | None = None
    """Start the ranks again after a failure; null: a failure ends the job, or ``elastic`` decides."""

    ship_code: bool = False
    """Copy the folder of the task's file to the hosts; false: it must exist there at the same path."""

    grace_s: Seconds = 30.0
    """Grace period of a preemption: time to save before ranks are killed, in seconds."""

    cpu_binding: Literal["auto", "none", "cores", "numa"] = "auto"
    """CPU binding of ranks. cores: an equal part of the host's cores; numa: a NUMA node; auto: numa if the
    host has several."""

    container: Container | None = None
    """Container image of the ranks; null: ranks use the Python environment of the host."""

    share_gpus: bool = False
    """Allow several ranks per GPU, for tests; slower than one rank per GPU."""

    threads_per_rank: Annotated[int, Field(ge=1, le=4096)] | None = None
    """OMP_NUM_THREADS of a rank; null: the host's cores divided by its ranks."""

    env: dict[VariableName, str] = {}
    """Environment variables of all ranks. Not for secrets: they are written to the resolved job."""

    secrets: dict[VariableName, SecretSource] = {}
    """Sources of secret environment variables; values are not written to command lines, logs or run files."""

    @property
    def slots(self) -> int:
        """Total number of slots of ``hosts``; 0: ``hosts`` is empty."""
        return sum(map(slots_of, self.hosts))

    @property
    def is_alone(self) -> bool:
        """Whether one rank starts on this machine."""
        is_elsewhere = self.hosts or (self.elastic is not None and self.elastic.discover is not None)
        return not is_elsewhere and self.most_ranks == 1

    @property
    def most_ranks(self) -> int:
        """Maximum world size."""
        most = self.elastic.max_ranks if self.elastic is not None else None
        return most or self.num_ranks or self.slots or 1

    def settings(self, model: type[Settings]) -> Settings:
        """Return the section of a launcher, such as ``launch.slurm``, by its model.

        Raises:
            UserError: The package of the launcher could not be imported when this module was.
        """
        for _, section in self:
            if type(section) is model:
                return section
        raise UserError(
            f"launch has no section with the settings {model.__module__}.{model.__name__}",
            hint="the module of a support object may not import horovod_train.config.schema or launch",
        )


def launcher_sections() -> Iterator[tuple[str, str, type[Section]]]:
    """Yield the sections of launchers in ``launch``: the name, the launcher's name and the model."""
    for name in LAUNCHERS.rows:
        support = LAUNCHERS.support_or_none(name)
        # Not typed: importing config/support.py, which imports the schema of jobs, would be a circle.
        section, settings = getattr(support, "section", ""), getattr(support, "settings", None)
        if section and isinstance(settings, type) and issubclass(settings, Section):
            yield section, name, settings


def _with_sections() -> type[LaunchFields]:
    """Return the section ``launch`` with the sections of all launchers, also those of other packages."""
    sections: dict[str, Any] = {
        name: (model, Field(default=model(), description=f"Settings of the launcher {launcher}."))
        for name, launcher, model in launcher_sections()
    }
    return create_model("Launch", __base__=LaunchFields, __doc__=LaunchFields.__doc__, **sections)


if TYPE_CHECKING:
    Launch = LaunchFields
else:
    Launch = _with_sections()
