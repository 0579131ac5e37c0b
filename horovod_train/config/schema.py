"""The job description: a frozen model for each section, with a description of each field.

Rules that relate several fields are in ``rules.py``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from horovod_train.config.data import Data
from horovod_train.config.fields import (
    Count,
    Duration,
    ImportPath,
    Interval,
    Name,
    Port,
    Seconds,
    Section,
    VariableName,
)
from horovod_train.config.launch import Launch
from horovod_train.config.optimization import AUTO, Checkpoint, Ema, Evaluation, LearningRate, Optimizer
from horovod_train.registry import DEFAULT_STRATEGY, SCRIPT

MAX_EPOCHS = 1_000_000


class Compile(Section):
    """Arguments of ``torch.compile``."""

    backend: Annotated[str, StringConstraints(min_length=1)] = "inductor"
    """Compiler backend; aot_eager compiles nothing, but shows whether the model can be compiled."""

    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    """Optimization mode of inductor."""

    dynamic: bool | None = None
    """Compile for any shape at the first call; null: recompile at the first new shape, then for any shape."""


class BatchWarmup(Section):
    """Growth of the global batch: linear in the samples, from ``start`` to the global batch of the job."""

    start: Count
    """Samples per optimizer step at the start of training, over all ranks."""

    length: Interval
    """Duration after which the global batch has its full size."""


class Train(Section):
    """Duration, batch size and precision."""

    epochs: Annotated[int, Field(ge=1, le=MAX_EPOCHS)] | None = None
    """Passes over the training data; null: 1, or with ``max_steps`` or ``max_samples`` as many as needed."""

    max_steps: Count | None = None
    """Length in optimizer steps, if it ends before ``epochs``; schedules end with it. null: no limit."""

    max_samples: Count | None = None
    """Length in samples, on any number of ranks: the job ends with the first step that reaches this number.
    Otherwise as ``max_steps``."""

    stop_at_step: Count | None = None
    """End the job after this many optimizer steps, as if it was interrupted: schedules are those of the whole
    job. null: train to the end."""

    batch_size_per_rank: Annotated[int, Field(ge=1, le=2**24)] = 32
    """Samples per rank and micro-batch. Global batch: this x data-parallel ranks x accumulation steps."""

    accumulation_steps: Annotated[int, Field(ge=1, le=65536)] = 1
    """Micro-batches per optimizer step. Under allreduce, gradients are all-reduced only on the last one."""

    global_batch_size: Count | None = None
    """Samples per optimizer step over all ranks, for any number of ranks: ``accumulation_steps`` is computed,
    and ``batch_size_per_rank`` limits the micro-batches. null: the product of both and the ranks."""

    batch_warmup: BatchWarmup | None = None
    """Start with a smaller global batch, which grows; null: the same global batch in all steps."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Autocast data type of the forward pass; fp16 adds a loss scaler."""

    clip_grad_norm: Annotated[float, Field(gt=0, le=1e12)] | None = None
    """Maximum L2 norm of the global gradient; null: no clipping."""

    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Seed of initial weights, shuffling and dropout."""

    randomness: Literal["rank", "sample"] = "rank"
    """rank: each rank draws its own random numbers (dropout, augmentation); sample: random numbers depend on
    the sample, so that results do not depend on the number of ranks (docs/scaling.md)."""

    deterministic: bool = False
    """Refuse operations with nondeterministic results."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model; auto: the rank's GPU if there is one."""

    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """Float32 matrix products on a GPU: in float32, TF32 or bf16 (``set_float32_matmul_precision``)."""

    channels_last: bool = False
    """Use the channels_last memory format for images and convolutions, which is faster on tensor cores."""

    compile: Compile | None = None
    """Compile the model; null: run it eagerly."""

    cuda_graph: bool | Literal["auto"] = False
    """Capture steps as CUDA graphs, for models with short steps. auto: measure, and use the faster mode."""

    activation_checkpointing: list[Annotated[str, StringConstraints(min_length=1)]] = []
    """Name patterns of modules whose activations are recomputed, such as ``layers.*``."""

    activation_memory_mib: Annotated[float, Field(gt=0)] | None = None
    """Maximum activation memory per micro-batch, in MiB; as many layers as needed recompute their
    activations."""

    sync_batch_norm: bool = False
    """Synchronize batch normalization: use the mean and variance of the samples of all ranks."""

    average_buffers: list[Annotated[str, StringConstraints(min_length=1)]] = []
    """Name patterns of buffers that depend on a rank's samples, such as a codebook's running mean. They are
    averaged over ranks after each step, weighted by samples."""

    initial_weights: Annotated[str, StringConstraints(min_length=1)] | None = None
    """Safetensors file with the initial weights, or a folder of such files."""

    @property
    def most_epochs(self) -> int:
        """Passes over the training data after which the job ends, unless ``limit`` ends it earlier."""
        if self.epochs is not None:
            return self.epochs
        return 1 if self.limit is None else MAX_EPOCHS

    @property
    def limit(self) -> Duration | None:
        """``max_steps`` or ``max_samples``; a rule refuses both."""
        if self.max_steps is not None:
            return Duration(self.max_steps, "steps")
        return None if self.max_samples is None else Duration(self.max_samples, "samples")


class Codec(Section):
    """Gradient compression by a codec, in place of ``allreduce.wire_dtype``."""

    name: ImportPath | Name
    """Name of the codec (see docs/strategies.md), ``module:Class`` or ``file.py:Class``."""

    args: dict[str, Any] = {}
    """Keyword arguments of the codec, such as ``keep: 0.01``."""


class Allreduce(Section):
    """All-reduce of gradients by Horovod."""

    bucket_size_mib: Annotated[float, Field(gt=0, le=4096)] = 8.0
    """Approximate bucket size, in MiB; independent of HOROVOD_FUSION_THRESHOLD. A bucket is all-reduced as
    soon as all its gradients are ready."""

    wire_dtype: Literal["fp32", "fp16", "bf16"] = "fp32"
    """Data type of gradients in messages. fp16 and bf16 halve the bytes and round; bf16 does not overflow."""

    codec: Codec | None = None
    """Gradient compression; null: none."""

    cycle_time_ms: Annotated[float, Field(gt=0, le=1000)] = 0.5
    """Cycle time of Horovod's background thread (HOROVOD_CYCLE_TIME), in milliseconds."""


class Strategy(Section):
    """Parallelism strategy. ``strategy: zero`` is short for ``strategy: {name: zero}``."""

    name: ImportPath | Name = DEFAULT_STRATEGY
    """Name of the strategy (see docs/strategies.md), ``module:Class`` or ``file.py:Class``."""

    args: dict[str, Any] = {}
    """Arguments of the strategy."""

    @model_validator(mode="before")
    @classmethod
    def _a_name_alone(cls, values: object) -> object:
        """Convert a name to a section."""
        return {"name": values} if isinstance(values, str) else values


class Tracking(Section):
    """Experiment tracker to which rank 0 logs losses and metrics."""

    name: ImportPath | Name
    """csv, jsonl, tensorboard, mlflow, wandb (docs/reports.md), ``module:Class`` or ``file.py:Class``."""

    args: dict[str, Any] = {}
    """Keyword arguments of the tracker, such as ``path: metrics.csv``. Not for secrets."""

    every_steps: Count = 1
    """Interval of logged steps; all evaluations are logged."""


class MetricsTls(Section):
    """TLS for metrics. The files must exist on each host."""

    certificate: Annotated[str, StringConstraints(min_length=1)]
    """PEM file of the certificate chain."""

    key: Annotated[str, StringConstraints(min_length=1)]
    """PEM file of the private key."""

    client_ca: Annotated[str, StringConstraints(min_length=1)] | None = None
    """CA certificate; only clients with a certificate of this CA are accepted (mTLS). null: all clients."""


class MetricsAuth(Section):
    """HTTP basic authentication for metrics. Use it with TLS."""

    user: Annotated[str, StringConstraints(pattern=r"^[^:\x00-\x1f]+$")]
    """Name of the user."""

    password_variable: VariableName
    """Environment variable with the password, one of ``launch.secrets``."""


class Metrics(Section):
    """Prometheus endpoint of each rank, and experiment trackers."""

    enabled: bool = True
    """Serve metrics."""

    port: Port = 9400
    """Base port; a rank serves on ``port`` + its local rank."""

    host: Annotated[str, StringConstraints(min_length=1)] = "127.0.0.1"
    """Address to listen on. Unless it is a loopback address, other hosts can read the metrics."""

    targets_dir: Annotated[str, StringConstraints(min_length=1)] | None = None
    """Additional folder for the Prometheus target file ``<name>.json``, readable by everyone; null: none."""

    tls: MetricsTls | None = None
    """Serve over TLS; null: plain HTTP."""

    basic_auth: MetricsAuth | None = None
    """HTTP basic authentication; null: none."""

    textfile_dir: Annotated[str, StringConstraints(min_length=1)] | None = None
    """Folder for the last metrics of each rank, ``<name>-rank-<n>.prom``, for node_exporter's textfile
    collector; null: none."""

    push_url: Annotated[str, StringConstraints(pattern=r"^https?://[^\s@]+$")] | None = None
    """Pushgateway for the last metrics of each rank; null: none."""

    device_peak_flops: Annotated[float, Field(gt=0, le=9e15)] | None = None
    """Peak FLOP/s of a rank's device; null: NVIDIA's datasheet value for known GPUs."""

    grad_norm_every_steps: Count = 50
    """Interval at which the gradient norm is computed, in steps; with clipping, each step."""

    noise_scale_every_steps: Count | None = None
    """Interval at which the gradient noise scale is measured, in steps; null: never. It needs at least two
    ranks or micro-batches per step (docs/scaling.md)."""

    noise_scale_groups: bool = False
    """Also measure the noise scale of each parameter group of the optimizer."""

    trackers: list[Tracking] = []
    """Experiment trackers, for example ``[{name: csv}]`` (see docs/reports.md)."""


class Fault(Section):
    """A fault that a job injects into itself."""

    kind: Literal["kill", "stop", "terminate", "exit", "raise", "hang", "slow"]
    """kill, stop, terminate: the signal SIGKILL, SIGSTOP or SIGTERM; exit: with code 1; raise: an exception;
    hang: forever; slow: pauses."""

    rank: Annotated[int, Field(ge=0)] = 0
    """The rank."""

    step: Count
    """Number of steps after which it happens, once in a run; slow: after this one and all later steps."""

    seconds: Seconds = 1.0
    """slow: length of a pause."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        """Convert a text such as ``kill:rank=1,step=20``."""
        if not isinstance(value, str):
            return value
        kind, _, rest = value.partition(":")
        try:
            texts = dict(each.split("=") for each in rest.split(","))
            numbers = {name: float(text) if name == "seconds" else int(text) for name, text in texts.items()}
        except ValueError:
            raise ValueError("must be KIND:rank=N,step=N (slow: also seconds=S)") from None
        return {"kind": kind, **numbers}


class LossSpikes(Section):
    """Losses that are far above the last ones."""

    action: Literal["warn", "rollback"] = "warn"
    """warn: report them; rollback: continue from the newest checkpoint before the spike, without the samples
    from there to the spike. Not for keras, lightning and transformers, whose loops cannot go back."""

    threshold: Annotated[float, Field(gt=0, le=1e9)] = 10.0
    """Number of deviations above the median of the last losses (1.4826 times the median of their absolute
    deviations) from which a loss is a spike."""

    window_steps: Annotated[int, Field(ge=4, le=100_000)] = 100
    """Number of last losses; spikes are looked for after half of it."""

    max_rollbacks: Annotated[int, Field(ge=1, le=1000)] = 3
    """Largest number of rollbacks to the same checkpoint; one more ends the job with exit code 3."""


class Health(Section):
    """Checks during training."""

    sync_check_every_steps: Annotated[int, Field(ge=0, le=2**53)] = 0
    """Interval at which ranks compare hashes of replicas, in steps; 0: only at start, resume, end and before
    checkpoints."""

    non_finite: Literal["stop", "skip"] = "stop"
    """Reaction to a loss or gradient that is NaN or infinite: stop with exit code 3, or skip the step."""

    max_skipped_steps: Count = 10
    """non_finite: skip. Maximum number of consecutive skipped steps; one more ends the job."""

    stall_warning_s: Seconds = 60.0
    """Time in seconds after which a rank that waits for others in a collective, one that waits for its data,
    and frozen ranks are reported, with what all ranks do. It is also the interval at which Horovod looks for
    missing ranks, in frameworks whose collectives only Horovod knows."""

    stall_shutdown_s: Seconds = 600.0
    """Time after which such ranks end the job, in seconds."""

    verify_strategy: bool = True
    """Compare the first steps with those of the plain model on the same samples, under all strategies but
    allreduce, adasum, local_sgd and parameter_server; end the job with exit code 2 if they differ."""

    one_process: Literal["refuse", "warn", "off"] = "refuse"
    """Compare the gradient of all ranks with that of one process on the same samples (at most 8), after steps
    1, 2, 4, ..., and every 1,000 steps. refuse: differences that are errors of the training end the job
    with exit code 2; layers that normalize over the samples of a rank, and losses that compare samples, are
    warnings (docs/strategies.md)."""

    loss_spike: LossSpikes | None = None
    """Reaction to spikes of the loss; null: none. ``{action: rollback}`` skips what causes them."""

    inject: list[Fault] = []
    """Faults that the job injects into itself, to test its recovery; a text such as ``kill:rank=1,step=20``
    is converted."""

    max_clock_offset_s: Seconds = 5.0
    """Maximum clock offset between two hosts, in seconds; with a larger offset, the job does not start."""

    @field_validator("one_process", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: object) -> object:
        """Convert false: YAML reads ``off`` without quotes as a boolean."""
        return "off" if value is False else value


class Job(Section):
    """One training job."""

    name: Name
    """Name of the job, used as a metric label and as a folder."""

    framework: Annotated[str, StringConstraints(min_length=1)] = "torch"
    """Training framework."""

    task: ImportPath | Name
    """Task to train: the name of a shipped task, ``module:Class`` or ``file.py:Class``."""

    task_args: dict[str, Any] = {}
    """Keyword arguments of the task's class."""

    run_dir: Annotated[str, StringConstraints(min_length=1)] = "runs"
    """Folder of all runs; those of this job are in ``<run_dir>/<name>``."""

    run_dir_access: Literal["private", "group", "everyone"] = "private"
    """Read access of other users to ``<run_dir>/<name>``; applied when the folder is created."""

    train: Train = Train()
    optimizer: Optimizer = Optimizer()
    ema: Ema | None = None
    """Exponential moving average of the weights; null: none."""

    lr: LearningRate = LearningRate()
    data: Data = Data()
    allreduce: Allreduce = Allreduce()
    strategy: Strategy = Strategy()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    metrics: Metrics = Metrics()
    health: Health = Health()
    launch: Launch = Launch()

    def global_batch_size(self, num_ranks: int) -> int:
        """Return the number of samples per optimizer step on a number of data-parallel ranks."""
        train = self.train
        return train.global_batch_size or train.batch_size_per_rank * train.accumulation_steps * num_ranks

    @model_validator(mode="after")
    def _choose_scaling(self) -> Self:
        """Replace ``lr.scaling: auto`` by the rule for the optimizer, if there is one; scripts have none."""
        if self.framework != SCRIPT and self.lr.scaling == AUTO and self.optimizer.scaling is not None:
            chosen = self.lr.model_copy(update={"scaling": self.optimizer.scaling})
            chosen.__pydantic_fields_set__.discard("scaling")  # another optimizer has another rule
            object.__setattr__(self, "lr", chosen)  # sections are frozen
        return self
