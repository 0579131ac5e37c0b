"""The job's section ``launch``: how many ranks, where, by which launcher and controller."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from horovod_train.config.fields import (
    Count,
    HostName,
    HostSlots,
    InterfaceName,
    OneLine,
    Port,
    Seconds,
    SecretSource,
    Section,
    SshValue,
    VariableName,
    slots_of,
)
from horovod_train.config.kubernetes import Kubernetes


class Ssh(Section):
    """How hosts are reached. The rest stands in the user's own ssh configuration."""

    port: Port | None = None
    """Port of sshd on the hosts; null: what ssh's configuration says, or 22."""

    user: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*$")] | None = None
    """User on the hosts; null: what ssh's configuration says, or the same as here."""

    identity_file: Annotated[str, StringConstraints(min_length=1)] | None = None
    """Private key; null: those that ssh finds by itself."""

    options: dict[Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9]*$")], SshValue] = {}
    """Further options of ssh_config, such as ``ProxyJump: gateway``."""


class HostSettings(Section):
    """What is different on one host."""

    python: Annotated[str, StringConstraints(pattern=r"^/\S*$")] | None = None
    """Python of the environment there; null: at the same path as here."""

    network_interface: InterfaceName | None = None
    """Interface that reaches the other hosts; null: as in ``launch``."""

    env: dict[VariableName, str] = {}
    """Environment variables for the ranks on this host."""


class Slurm(Section):
    """What Slurm is asked for. ``run_dir`` has to be a folder that all nodes share."""

    options: dict[Annotated[str, StringConstraints(pattern=r"^[a-z][a-z-]*$")], OneLine] = {}
    """Further long options of sbatch, such as ``partition: gpu``, ``time: "2:00:00"``, ``gres: "gpu:4"``."""

    ranks_per_node: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Ranks on each node; null: as Slurm places them."""

    requeue: bool = True
    """Put the job back into the queue when its time is nearly over and it has saved."""

    setup: list[OneLine] = []
    """Shell commands before anything else on the first node, such as ``module load cuda``."""


class Elastic(Section):
    """Go on with fewer ranks when hosts are lost, and with more when they come back.

    Whenever the hosts change, ranks start again from a checkpoint; the learning rate and the shards of
    the data follow the number of ranks.
    """

    min_ranks: Count
    """With fewer, wait for hosts."""

    max_ranks: Count | None = None
    """Ranks at most; null: launch.num_ranks, or the slots of launch.hosts."""

    discover: OneLine | None = None
    """Command that prints the hosts there are, as in a hostfile; null: launch.hosts. Not for Kubernetes."""

    ranks_per_host: Annotated[int, Field(ge=1, le=1024)] = 1
    """Ranks on a host that is printed without slots."""

    poll_s: Seconds = 5.0
    """Time between two looks at which hosts there are, in seconds."""

    cooldown_s: Seconds = 60.0
    """A lost host is left alone for so long, then twice as long; newcomers wait as long after a start."""

    wait_s: Seconds = 600.0
    """How long to wait for ``min_ranks`` before that is an error, in seconds."""

    max_failures: Annotated[int, Field(ge=0, le=1_000_000)] = 3
    """Losses in a row, without a checkpoint in between, after which that is an error."""


class Launch(Section):
    """How many ranks, where, by which controller."""

    launcher: Annotated[str, StringConstraints(min_length=1)] = "auto"
    """auto: horovodrun, or this process alone for one rank; or a name from the table."""

    num_ranks: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Ranks in the world; null: one per slot of ``hosts``, or one. A worker refuses another world."""

    hosts: list[HostSlots] = []
    """``host:slots`` for each host; empty: this machine."""

    host_settings: dict[HostName, HostSettings] = {}
    """What is different on some hosts, by their names."""

    controller: Literal["mpi", "gloo"] = "mpi"
    """Who coordinates the ranks."""

    ssh: Ssh = Ssh()
    """How hosts are reached."""

    network_interface: InterfaceName | None = None
    """Interface that reaches the other hosts, such as eth0; null: the one that ssh comes in through."""

    host_timeout_s: Annotated[float, Field(ge=5, le=1e6)] = 20.0
    """A host that has not answered for so long is lost, and the job ends, in seconds."""

    elastic: Elastic | None = None
    """Go on when hosts come and go; null: the job ends when one is lost."""

    ship_code: bool = False
    """Send the folder of the task's file to the hosts; false: it is there, at the same path."""

    grace_s: Seconds = 30.0
    """Time the ranks get to save and leave when they are asked to, before they are killed, in seconds."""

    cpu_binding: Literal["auto", "none", "cores", "numa"] = "auto"
    """Bind a rank to its share of the host's cores, or to a NUMA node; auto: numa, if there are several."""

    slurm: Slurm = Slurm()
    """For the launcher slurm."""

    kubernetes: Kubernetes = Kubernetes()
    """For the launcher mpijob."""

    share_gpus: bool = False
    """Let ranks of a host share its GPUs: to try things out; slower than one rank per GPU."""

    threads_per_rank: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Compute threads of a rank; null: its host's cores divided by the ranks on it."""

    env: dict[VariableName, str] = {}
    """Environment variables for every rank. Not for secrets: they stand in the resolved job."""

    secrets: dict[VariableName, SecretSource] = {}
    """Variables whose values stay off command lines, logs and files of the run: where each comes from."""

    @property
    def slots(self) -> int:
        """Ranks that there is room for on ``hosts``; 0: none are named."""
        return sum(map(slots_of, self.hosts))

    @property
    def most_ranks(self) -> int:
        """Ranks that the world has at most."""
        most = self.elastic.max_ranks if self.elastic is not None else None
        return most or self.num_ranks or self.slots or 1
