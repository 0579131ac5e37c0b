"""A class for each kind of event that the ranks of a run tell.

A task may print a line that looks like an event and is not one, so fields are checked strictly when a line
is read: users of an event can rely on the types of its class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

WAIT_PHASE = "allreduce_wait"
"""The phase of a step in which a rank waits for the all-reduce: for others, and for the network."""

PHASES = ("data", "forward", "backward", "compute", WAIT_PHASE, "optimizer")
"""``compute`` is forward and backward, with all-reduce and update if a graph does not separate them."""


MAX_RANKS = 1 << 20
"""Upper limit, so that a damaged number does not create a huge table."""


class Event(BaseModel):
    """One thing that happened on a rank.

    Attributes:
        kind: Name of the class in lines and files.
    """

    model_config = ConfigDict(frozen=True, strict=True, protected_namespaces=())

    kind: ClassVar[str] = ""


class Opened(Event):
    """A start of the run: its first event.

    Attributes:
        format_version: Grows when a reader of the file has to change.
        package_version: Of this package.
    """

    kind = "opened"

    format_version: int
    package_version: str
    job: str
    run_id: str


class StateChanged(Event):
    """The state of the run, as in its ``state.json``."""

    kind = "state"

    state: str
    message: str


class Attempt(Event):
    """Ranks are started; several times in an elastic job.

    Attributes:
        number: How often ranks of this run were started before.
        num_ranks: How many are started now.
        num_wanted: How many the job asked for.
        hosts: Where; empty: on this machine.
    """

    kind = "attempt"

    number: int
    num_ranks: int
    num_wanted: int
    hosts: tuple[str, ...]


class HostsLost(Event):
    """Hosts do not respond, or ranks on them have no heartbeat."""

    kind = "hosts_lost"

    hosts: tuple[str, ...]
    why: str


class Started(Event):
    """Training begins."""

    kind = "started"

    job: str
    num_parameters: int
    world_size: int
    global_batch_size: int
    precision: str
    device: str


class Target(BaseModel):
    """Where one rank serves its metrics.

    Attributes:
        address: Host and port.
        labels: Labels of its series.
    """

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
        step: Optimizer steps made.
        num_steps: Steps that are to be made; 0: not known, as of a script.
        epoch: The epoch under way, counted from 0.
        num_epochs: Epochs that are to be made; 0: not known.
        loss: Of the last step, the mean over all ranks' samples; None: not known.
        lr: Learning rate of the last step; None: not known.
        samples_per_s: Samples a second of all ranks; None: not known.
        eta_s: Time that is left; None: not known.
        loss_is_local: The loss is that of rank 0's samples alone.
        numbers: Further numbers of the last step that are shown, by name.
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
        seconds: Time for which the others have been waiting.
    """

    kind = "stalled"

    collective: str
    absent_ranks: list[int]
    seconds: float


class RankTimes(Event):
    """Times of some ranks since the last such event, summed over steps, in the order of ranks.

    Attributes:
        first_rank: Rank of the first number; further ranks follow.
        seconds: Wall time since the last event.
        steps: Optimizer steps of each rank.
        samples: Samples that each rank read; empty where that is not known.
        step_s: Time of its steps.
        phases_s: Time of its steps by phase, as far as known.
        waiting_s: Time that it waited for ranks that came later; empty where that is not known.
        waited_for_s: Time that others waited for it, added up over them; empty where that is not known.
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
    """Results of an evaluation."""

    kind = "evaluation"

    epoch: int
    metrics: Mapping[str, float]


class CheckpointWritten(Event):
    """A checkpoint was written; if ``error`` is not empty, it could not be written."""

    kind = "checkpoint"

    path: str
    seconds: float
    error: str


class Resumed(Event):
    """Training resumes from a checkpoint."""

    kind = "resumed"

    checkpoint: str
    epoch: float
    step: int


class Notice(Event):
    """A message for the user."""

    kind = "notice"

    text: str


class Preempted(Event):
    """This rank was preempted, and has saved a checkpoint."""

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
    """Time in which two hosts exchange a message."""

    kind = "pair_time"

    hosts: tuple[str, str]
    seconds: float


class BenchmarkDone(Event):
    """All measurements of the network are complete."""

    kind = "benchmark_done"

    world_size: int


class Summary(Event):
    """Training is complete."""

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
    """The script of this rank has exited with code 0."""

    kind = "script_done"

    steps: int
    seconds: float


class Failure(Event):
    """This rank ends with an error.

    Attributes:
        host: Where it ran.
        message: What went wrong.
        traceback: Where in the code; empty where the message says it all.
        is_cause: Whether it is more than the notice that another rank is gone.
        exit_code: With which code it ends.
        cause: What kind of failure it is, one of a few words; empty: an older version has not said.
    """

    kind = "failure"

    host: str
    message: str
    traceback: str
    is_cause: bool
    exit_code: int
    cause: str = ""


KINDS: Mapping[str, type[Event]] = {each.kind: each for each in Event.__subclasses__()}
