"""Classes of the events of a run.

Fields are validated strictly when a line is parsed, because a task may print a line that looks like an event.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

WAIT_PHASE = "allreduce_wait"
"""Phase of a step in which a rank waits for the all-reduce: for other ranks, and for the network."""

PHASES = ("data", "forward", "backward", "compute", WAIT_PHASE, "optimizer")
"""``compute`` is forward and backward, with all-reduce and update if a graph does not separate them."""

MAX_RANKS = 1 << 20
"""Upper limit, so that a damaged number does not create a huge table."""


class Event(BaseModel):
    """Base class of events; ``kind`` is the name of the class in lines and files."""

    model_config = ConfigDict(frozen=True, strict=True, protected_namespaces=())

    kind: ClassVar[str] = ""


class Opened(Event):
    """Start of a run, first event of each start; ``format_version`` increases with incompatible formats."""

    kind = "opened"

    format_version: int
    package_version: str
    job: str
    run_id: str


class StateChanged(Event):
    """A change of the run's state, as in its ``state.json``."""

    kind = "state"

    state: str
    message: str


class Attempt(Event):
    """Start of the ranks; an elastic job may have several attempts.

    Attributes:
        number: Index of the attempt of this run, from 0.
        num_ranks: Number of ranks of this attempt.
        num_wanted: Number of ranks that the job requests.
        hosts: Hosts of the ranks; empty: this host.
    """

    kind = "attempt"

    number: int
    num_ranks: int
    num_wanted: int
    hosts: tuple[str, ...]


class HostsLost(Event):
    """Loss of hosts that do not respond, or whose ranks have no heartbeat."""

    kind = "hosts_lost"

    hosts: tuple[str, ...]
    why: str


class LossSpike(Event):
    """A loss that is far above the last ones.

    Attributes:
        step: Step with this loss.
        loss: The loss.
        usual: Median of the last losses.
        score: Number of deviations above it.
        restored: Step of the checkpoint from which training continues; None: it does not go back.
    """

    kind = "loss_spike"

    step: int
    loss: float
    usual: float
    score: float
    restored: int | None


class Restart(Event):
    """Another start of the ranks after a failure, by ``launch.restarts``.

    Attributes:
        number: Number of failures within ``window_h``, this one included.
        most: The setting ``max``.
        pause_s: Time until the start.
        reason: The failure.
    """

    kind = "restart"

    number: int
    most: int
    pause_s: float
    reason: str


class Hang(Event):
    """Ranks that hang, and what they do.

    Attributes:
        text: A sentence that names the ranks.
        ranks: The ranks.
        report: File with what all ranks do; empty: there is none.
    """

    kind = "hang"

    text: str
    ranks: tuple[int, ...]
    report: str


class Started(Event):
    """Start of training; ``versions`` are those of the packages of rank 0, by name."""

    kind = "started"

    job: str
    num_parameters: int
    world_size: int
    global_batch_size: int
    precision: str
    device: str
    versions: Mapping[str, str] = {}


class Target(BaseModel):
    """Metrics endpoint of one rank: host and port, and the labels of its series."""

    model_config = ConfigDict(frozen=True, strict=True)

    address: str
    labels: Mapping[str, str]


class Targets(Event):
    """Metrics endpoints of some ranks; each rank is reported once."""

    kind = "targets"

    targets: tuple[Target, ...]


class Progress(Event):
    """Progress of training.

    Attributes:
        step: Number of completed optimizer steps.
        num_steps: Total number of steps; 0: unknown (scripts).
        epoch: Current epoch, counted from 0.
        num_epochs: Total number of epochs; 0: unknown.
        loss: Mean loss of the last step, over the samples of all ranks; None: unknown.
        lr: Learning rate of the last step; None: unknown.
        samples_per_s: Throughput of all ranks; None: unknown.
        eta_s: Remaining time; None: unknown.
        loss_is_local: Whether the loss is that of rank 0's samples alone.
        numbers: Further numbers of the last step, by name.
    """

    kind = "progress"

    step: int
    num_steps: int
    epoch: int
    num_epochs: int
    loss: float | None
    lr: float | None
    samples_per_s: float | None
    eta_s: float | None
    loss_is_local: bool = False
    numbers: dict[str, float] = {}


class Stalled(Event):
    """Ranks are missing from a collective of ``torch.distributed``.

    Attributes:
        collective: Name of the collective.
        absent_ranks: Ranks that have not entered it.
        seconds: Time for which the reporting rank has waited in it.
    """

    kind = "stalled"

    collective: str
    absent_ranks: list[int]
    seconds: float


class RankTimes(Event):
    """Times of some ranks since the last such event, summed over steps, in the order of ranks.

    Attributes:
        first_rank: Rank of the first number; consecutive ranks follow.
        seconds: Wall time since the last event.
        steps: Optimizer steps of each rank.
        samples: Samples that each rank read; empty: unknown.
        step_s: Time of each rank's steps.
        phases_s: Time of each rank's steps by phase, as far as known.
        waiting_s: Time that each rank waited for later ranks; empty: unknown.
        waited_for_s: Time that other ranks waited for each rank, summed over them; empty: unknown.
    """

    kind = "rank_times"

    first_rank: int = Field(ge=0, lt=MAX_RANKS)
    seconds: float
    steps: tuple[int, ...]
    samples: tuple[int, ...]
    step_s: tuple[float, ...]
    phases_s: Mapping[str, tuple[float, ...]]
    waiting_s: tuple[float, ...]
    waited_for_s: tuple[float, ...]


class Evaluation(Event):
    """Results of an evaluation.

    Attributes:
        epoch: Completed epochs.
        metrics: Results by name.
        step: Completed steps; None: written by an older version.
        is_within_epoch: Whether another epoch has begun, as at the end of a job with ``train.max_steps``.
    """

    kind = "evaluation"

    epoch: int
    metrics: Mapping[str, float]
    step: int | None = None
    is_within_epoch: bool = False


class ComparedWithOneProcess(Event):
    """Comparison of the gradient with that of one process.

    Attributes:
        step: Completed steps.
        text: What differs, or why nothing is compared; empty: the gradients are equal.
    """

    kind = "one_process"

    step: int
    text: str


class CheckpointWritten(Event):
    """End of writing a checkpoint; if ``error`` is not empty, it could not be written."""

    kind = "checkpoint"

    path: str
    seconds: float
    error: str


class Resumed(Event):
    """Resume from a checkpoint."""

    kind = "resumed"

    checkpoint: str
    epoch: float
    step: int


class Notice(Event):
    """A message for the user.

    Attributes:
        text: The message.
        is_stall: A watchdog reports that this rank hangs.
    """

    kind = "notice"

    text: str
    is_stall: bool = False


class Preempted(Event):
    """Preemption of this rank, after a checkpoint was saved."""

    kind = "preempted"

    step: int
    epoch: float


class AllreduceTime(Event):
    """Median time of an all-reduce of one size; ``via`` is the library: horovod, nccl, mpi4py."""

    kind = "allreduce_time"

    via: str
    size_bytes: int
    seconds: float
    bytes_per_s: float


class PairTime(Event):
    """Median time of a message exchange between two hosts."""

    kind = "pair_time"

    hosts: tuple[str, str]
    seconds: float


class BenchmarkDone(Event):
    """End of all measurements of the network."""

    kind = "benchmark_done"

    world_size: int


class Summary(Event):
    """End of training, with its results."""

    kind = "summary"

    job: str
    epochs: float
    steps: int
    seconds: float
    metrics: Mapping[str, float]
    samples_per_s: float
    world_size: int
    global_batch_size: int
    lr_scaling: str
    base_lr: float
    reference_batch_size: int
    peak_lr: float
    metrics_addresses: tuple[str, ...]
    checkpoint: str


class ScriptDone(Event):
    """End of this rank's script with exit code 0."""

    kind = "script_done"

    steps: int
    seconds: float


class Failure(Event):
    """Failure of this rank.

    Attributes:
        host: Host of the rank.
        message: Error message.
        traceback: Traceback; empty for errors of this package.
        is_cause: False for a ``PeerError``, which is a consequence of another rank's failure.
        exit_code: Exit code of the rank.
        cause: Kind of the failure (``HorovodTrainError.cause``); empty: written by an older version.
        step: Number of steps that were done; None: unknown.
    """

    kind = "failure"

    host: str
    message: str
    traceback: str
    is_cause: bool
    exit_code: int
    cause: str = ""
    step: int | None = None


KINDS: Mapping[str, type[Event]] = {each.kind: each for each in Event.__subclasses__()}
