"""The job description: one frozen model per section, a sentence and a unit for every field.

    Job
    |-- name, framework, task, task_args
    |-- train        how long, how much per step, in which precision
    |-- optimizer    which one, with which arguments
    |-- lr           the rate at a reference batch, and how it follows the batch and the progress
    |-- data         who reads samples, and how
    |-- allreduce    how gradients travel between ranks
    |-- evaluation   when, and when to stop early
    |-- checkpoint   where, when, how many, resume or not
    |-- metrics      Prometheus: where each rank serves
    |-- health       what is checked while training
    `-- launch       how many ranks, where, by which controller

Rules that hold between sections live in ``rules.py``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from horovod_train.config.fields import (
    Count,
    HostName,
    HostSlots,
    ImportPath,
    InterfaceName,
    Name,
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


class Train(Section):
    """How long, how much per step, in which precision."""

    epochs: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    """Passes over the training data."""

    max_steps: Count | None = None
    """Stop after this many optimizer steps, whatever ``epochs`` says; null: no limit."""

    batch_size_per_rank: Annotated[int, Field(ge=1, le=2**24)] = 32
    """Samples per rank and micro-step. The global batch is this x ranks x accumulation steps."""

    accumulation_steps: Annotated[int, Field(ge=1, le=65536)] = 1
    """Micro-steps per optimizer step; ranks communicate on the last one only."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Autocast type of the forward pass; fp16 adds a loss scaler."""

    clip_grad_norm: Annotated[float, Field(gt=0, le=1e12)] | None = None
    """Largest L2 norm of the global gradient; null: no clipping."""

    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Seed of initial weights, shuffling and dropout."""

    deterministic: bool = False
    """Refuse operations whose result can differ from run to run."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model lives; auto: the rank's own GPU when there is one."""

    compile_backend: Annotated[str, StringConstraints(min_length=1)] | None = None
    """``torch.compile`` backend, such as inductor; null: eager."""

    activation_checkpointing: list[Annotated[str, StringConstraints(min_length=1)]] = []
    """Name patterns of modules whose activations are recomputed, such as ``layers.*``."""


class Optimizer(Section):
    """Which optimizer, with which arguments. Its learning rate comes from ``lr``."""

    name: ImportPath | Name = "sgd"
    """sgd, adam, adamw, lars, lamb, or an import path ``module:Class``."""

    args: dict[str, Any] = {}
    """Keyword arguments of the optimizer, such as ``momentum: 0.9``."""


class LearningRate(Section):
    """The rate at a reference batch, and how it follows batch and progress (see lr/policy.py)."""

    base_lr: Annotated[float, Field(gt=0, le=1e6)] = 0.01
    """Learning rate that is right at ``reference_batch_size``."""

    reference_batch_size: Count = 32
    """Global batch size for which ``base_lr`` was chosen."""

    scaling: Literal["linear", "sqrt", "none"] = "linear"
    """How the rate follows the global batch."""

    warmup_epochs: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Length of the linear ramp from the base rate (or ``warmup_start_lr``), in epochs."""

    warmup_start_lr: Annotated[float, Field(ge=0, le=1e6)] | None = None
    """Where the ramp starts; null: the base rate, or the scaled one when that is lower."""

    decay: Literal["constant", "step", "cosine", "polynomial"] = "constant"
    """Shape of the rate after warm-up."""

    milestones_epochs: list[Annotated[float, Field(gt=0, le=1e6)]] = []
    """decay: step. Epochs at which the rate is multiplied by ``gamma``."""

    gamma: Annotated[float, Field(gt=0, le=1)] = 0.1
    """decay: step. Factor at each milestone."""

    power: Annotated[float, Field(gt=0, le=100)] = 1.0
    """decay: polynomial. Exponent."""

    end_factor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """decay: cosine, polynomial. Final rate as a fraction of the scaled rate."""


class Data(Section):
    """How samples are read."""

    num_workers: Annotated[int, Field(ge=0, le=1024)] = 0
    """Loader processes per rank; 0: read in the training process."""

    prefetch_batches: Annotated[int, Field(ge=1, le=1024)] = 2
    """Micro-batches each loader process keeps ready."""

    pin_memory: bool = True
    """Page-locked batches for faster copies to a GPU; without effect on a CPU."""

    shuffle: bool = True
    """A new order each epoch, from seed and epoch."""


class Codec(Section):
    """How gradients are encoded on their way, where not as whole numbers of ``allreduce.wire_dtype``."""

    name: ImportPath | Name
    """Which one (see docs/strategies.md), or an import path ``module:Class``."""

    args: dict[str, Any] = {}
    """Keyword arguments of the codec, such as ``keep: 0.01``."""


class Allreduce(Section):
    """How gradients travel between ranks."""

    bucket_size_mib: Annotated[float, Field(gt=0, le=4096)] = 8.0
    """Gradients are packed into buckets of about this size; a full bucket leaves at once."""

    wire_dtype: Literal["fp32", "fp16"] = "fp32"
    """Type on the wire. fp16 halves the bytes and rounds the gradients."""

    codec: Codec | None = None
    """An encoding that sends less; null: all numbers travel, in ``wire_dtype``."""

    cycle_time_ms: Annotated[float, Field(gt=0, le=1000)] = 0.5
    """How often Horovod's background thread looks for work."""


class Strategy(Section):
    """How ranks stay in step."""

    name: ImportPath | Name = "allreduce"
    """Which one (see docs/strategies.md), or an import path ``module:Class``."""

    args: dict[str, Any] = {}
    """Keyword arguments of the strategy."""


class EarlyStopping(Section):
    """Stop when a metric of the evaluation no longer improves."""

    metric: Annotated[str, StringConstraints(min_length=1)]
    """Name of an evaluation metric."""

    mode: Literal["min", "max"]
    """Whether smaller or larger is better."""

    patience: Count = 3
    """Evaluations without an improvement before all ranks stop."""

    min_delta: Annotated[float, Field(ge=0, le=1e12)] = 0.0
    """Smallest change that counts as an improvement."""


class Evaluation(Section):
    """When to evaluate."""

    every_epochs: Count = 1
    """Evaluate after each so many epochs, and after the last."""

    batch_size_per_rank: Annotated[int, Field(ge=1, le=2**24)] | None = None
    """Samples per rank and step; null: as in training."""

    early_stopping: EarlyStopping | None = None
    """Null: train all epochs."""


class Best(Section):
    """Which checkpoint is the best one."""

    metric: Annotated[str, StringConstraints(min_length=1)]
    """Name of an evaluation metric."""

    mode: Literal["min", "max"]
    """Whether smaller or larger is better."""


class Checkpoint(Section):
    """Where, when, how many, resume or not."""

    dir: Annotated[str, StringConstraints(min_length=1)] | None = None
    """Folder all ranks can read; null: ``checkpoints`` in the folder of the run."""

    every_epochs: Count | None = 1
    """Save after each so many epochs; null: only by steps. The end is always saved."""

    every_steps: Count | None = None
    """Save after each so many optimizer steps as well."""

    keep_last: Count = 3
    """How many of the newest are kept."""

    best: Best | None = None
    """Keep the best one too."""

    resume: Literal["auto", "never", "required"] = "auto"
    """auto: from the newest valid one if there is one; required: fail if there is none."""

    background: bool = True
    """Write while training goes on."""


class Metrics(Section):
    """Prometheus: where each rank serves its metrics."""

    enabled: bool = True
    """Serve metrics."""

    port: Port = 9400
    """Rank with local rank k serves on port + k."""

    host: Annotated[str, StringConstraints(min_length=1)] = "127.0.0.1"
    """Address to listen on. Anything but loopback can be read by others."""

    targets_dir: Annotated[str, StringConstraints(min_length=1)] | None = None
    """Folder for another copy of Prometheus' targets, ``<name>.json``, readable by everyone; null: none."""

    grad_norm_every_steps: Count = 50
    """The gradient norm costs a pass over all gradients; it is taken this often (or when clipping)."""


class Health(Section):
    """What is checked while training."""

    sync_check_every_steps: Annotated[int, Field(ge=0, le=2**53)] = 0
    """Compare a hash of the whole state between ranks this often; 0: at start, resume and end."""

    non_finite: Literal["stop", "skip"] = "stop"
    """A loss or gradient that is NaN or infinite: stop with exit code 3, or skip the step."""

    max_skipped_steps: Count = 10
    """non_finite: skip. Stop when so many steps in a row had to be skipped."""

    stall_warning_s: Seconds = 60.0
    """Name the ranks that are missing from a collective after this time, in seconds."""

    stall_shutdown_s: Seconds = 600.0
    """End the job when they are still missing after this time, in seconds."""

    max_clock_offset_s: Seconds = 5.0
    """Refuse to start when the clocks of two hosts differ by more, in seconds."""


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
    """Let ranks of a host share its GPUs: to try things out; slow, and not with NCCL."""

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


class Job(Section):
    """One training job."""

    name: Name
    """Name of the job: a metric label and a folder."""

    framework: Annotated[str, StringConstraints(min_length=1)] = "torch"
    """Which framework trains."""

    task: ImportPath | Name
    """What is trained: the name of a shipped task, ``module:Class`` or ``file.py:Class``."""

    task_args: dict[str, Any] = {}
    """Keyword arguments of the task's class."""

    run_dir: Annotated[str, StringConstraints(min_length=1)] = "runs"
    """Runs are kept in ``<run_dir>/<name>``."""

    run_dir_access: Literal["private", "group", "everyone"] = "private"
    """Who may read ``<run_dir>/<name>`` besides this user; decided when the folder is made."""

    train: Train = Train()
    optimizer: Optimizer = Optimizer()
    lr: LearningRate = LearningRate()
    data: Data = Data()
    allreduce: Allreduce = Allreduce()
    strategy: Strategy = Strategy()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    metrics: Metrics = Metrics()
    health: Health = Health()
    launch: Launch = Launch()

    def global_batch_size(self, world_size: int) -> int:
        """Samples per optimizer step on ``world_size`` ranks."""
        return self.train.batch_size_per_rank * self.train.accumulation_steps * world_size
