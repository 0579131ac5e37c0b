"""The job description: one frozen model per section, a sentence and a unit for every field.

    Job
    |-- name, framework, task, task_args
    |-- train        how long, how much per step, in which precision
    |-- optimizer    which one, with which arguments
    |-- ema          an average of the weights
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

from pydantic import Field, StringConstraints, model_validator

from horovod_train.config.fields import (
    Count,
    ImportPath,
    Name,
    Port,
    Seconds,
    Section,
    VariableName,
)
from horovod_train.config.launch import Launch


class Compile(Section):
    """How ``torch.compile`` compiles the model."""

    backend: Annotated[str, StringConstraints(min_length=1)] = "inductor"
    """Which compiler; aot_eager compiles nothing and shows whether the model can be."""

    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    """What inductor aims at."""

    dynamic: bool | None = None
    """Compile for any shape at once; null: anew for the first new shape, then for any."""


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

    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """32-bit matrix products on a GPU: in 32 bits, TF32 or bf16 (``set_float32_matmul_precision``)."""

    channels_last: bool = False
    """Keep images and the weights of convolutions with channels last, which tensor cores want."""

    compile: Compile | None = None
    """Compile the model; null: eager."""

    cuda_graph: bool | Literal["auto"] = False
    """Record a step on the GPU and replay it: for models whose steps are short. auto: where it is faster."""

    activation_checkpointing: list[Annotated[str, StringConstraints(min_length=1)]] = []
    """Name patterns of modules whose activations are recomputed, such as ``layers.*``."""

    activations_mib: Annotated[float, Field(gt=0)] | None = None
    """Most that a micro-batch keeps for backward, in MiB: as many layers recompute theirs as that takes."""

    sync_batch_norm: bool = False
    """Batch normalization with mean and variance of all ranks' samples, as one process with the joint batch
    has it."""

    average_buffers: list[Annotated[str, StringConstraints(min_length=1)]] = []
    """Name patterns of buffers that passes change by the rank's own samples, such as a codebook's running
    mean: they are averaged over ranks after each step, weighted by samples."""

    initial_weights: Annotated[str, StringConstraints(min_length=1)] | None = None
    """A safetensors file, or a folder of them, with the weights that training begins from."""

    @model_validator(mode="before")
    @classmethod
    def _as_it_was_called(cls, values: Any) -> Any:
        """Take over ``compile_backend``, which descriptions of the version before have."""
        if not isinstance(values, dict) or "compile_backend" not in values:
            return values
        taken = dict(values)
        backend = taken.pop("compile_backend")
        if backend is None:
            return taken
        if taken.get("compile") is not None:
            raise ValueError("compile_backend is compile.backend now, and both are there: leave one out")
        return {**taken, "compile": {"backend": backend}}


class Optimizer(Section):
    """Which optimizer, with which arguments. Its learning rate comes from ``lr``."""

    name: ImportPath | Name = "sgd"
    """sgd, adam, adamw, lars, lamb, or an import path ``module:Class``."""

    args: dict[str, Any] = {}
    """Keyword arguments of the optimizer, such as ``momentum: 0.9``."""


class Ema(Section):
    """An exponential moving average of the weights, which is evaluated and can be exported."""

    decay: Annotated[float, Field(gt=0, lt=1)] = 0.999
    """Part of the average that stays after an update; the rest comes from the weights."""

    every_steps: Count = 1
    """Update it after each so many optimizer steps."""

    warmup: bool = False
    """Use the smaller decay (1 + n) / (10 + n) in the n-th update, so that the first weights do not stay for
    long."""

    evaluate: bool = True
    """Evaluate the average; false: the weights that are trained."""


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

    wire_dtype: Literal["fp32", "fp16", "bf16"] = "fp32"
    """Type on the wire. fp16 and bf16 halve the bytes and round the gradients; bf16 does not overflow."""

    codec: Codec | None = None
    """An encoding that sends less; null: all numbers travel, in ``wire_dtype``."""

    cycle_time_ms: Annotated[float, Field(gt=0, le=1000)] = 0.5
    """How often Horovod's background thread looks for work."""


class Strategy(Section):
    """How ranks stay in step. ``strategy: zero`` is short for ``strategy: {name: zero}``."""

    name: ImportPath | Name = "allreduce"
    """Which one (see docs/strategies.md), or an import path ``module:Class``."""

    args: dict[str, Any] = {}
    """Arguments of the strategy."""

    @model_validator(mode="before")
    @classmethod
    def _a_name_alone(cls, values: Any) -> Any:
        """Take a name for the strategy of that name; local_sgd was called local-sgd."""
        taken = {"name": values} if isinstance(values, str) else values
        if isinstance(taken, dict) and taken.get("name") == "local-sgd":
            return {**taken, "name": "local_sgd"}
        return taken


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


class Tracking(Section):
    """Where losses and metrics go besides Prometheus; rank 0 tells them."""

    name: ImportPath | Name
    """Which tracker: ``csv``, or an import path ``module:Class`` (see docs/monitoring.md)."""

    args: dict[str, Any] = {}
    """Keyword arguments of the tracker, such as ``path: metrics.csv``. Not for secrets."""

    every_steps: Count = 1
    """Of which steps it is told; it is told of every evaluation."""


class MetricsTls(Section):
    """Metrics are served over TLS: files that each host has."""

    certificate: Annotated[str, StringConstraints(min_length=1)]
    """File with the certificate, and those above it, in PEM format."""

    key: Annotated[str, StringConstraints(min_length=1)]
    """File with its private key."""

    client_ca: Annotated[str, StringConstraints(min_length=1)] | None = None
    """File with the authority whose clients alone may read; null: a client needs no certificate."""


class MetricsAuth(Section):
    """Metrics are given to who knows a password (HTTP basic authentication). Use it with TLS."""

    user: Annotated[str, StringConstraints(pattern=r"^[^:\x00-\x1f]+$")]
    """Name of the user."""

    password_variable: VariableName
    """Variable that has the password, one of ``launch.secrets``."""


class Metrics(Section):
    """Prometheus: where each rank serves its metrics; and trackers."""

    enabled: bool = True
    """Serve metrics."""

    port: Port = 9400
    """Rank with local rank k serves on port + k."""

    host: Annotated[str, StringConstraints(min_length=1)] = "127.0.0.1"
    """Address to listen on. Anything but loopback can be read by others."""

    targets_dir: Annotated[str, StringConstraints(min_length=1)] | None = None
    """Folder for another copy of Prometheus' targets, ``<name>.json``, readable by everyone; null: none."""

    tls: MetricsTls | None = None
    """Serve over TLS; null: plain HTTP."""

    basic_auth: MetricsAuth | None = None
    """Ask for a password; null: whoever reaches the address may read."""

    textfile_dir: Annotated[str, StringConstraints(min_length=1)] | None = None
    """Folder for each rank's last metrics, ``<name>-rank-<n>.prom``, for node_exporter; null: none."""

    push_url: Annotated[str, StringConstraints(pattern=r"^https?://[^\s@]+$")] | None = None
    """Pushgateway that gets each rank's last metrics; null: none."""

    device_peak_flops: Annotated[float, Field(gt=0, le=9e15)] | None = None
    """Operations a second that a rank's device can do at most; null: of known GPUs, what NVIDIA says."""

    grad_norm_every_steps: Count = 50
    """The gradient norm costs a pass over all gradients; it is taken this often (or when clipping)."""

    trackers: list[Tracking] = []
    """Who else keeps losses and metrics, ``[{name: csv}]`` for one (see docs/monitoring.md)."""


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

    verify_strategy: bool = True
    """Compare the first steps under any strategy but allreduce with those of the plain model on the same
    samples; end the job with exit code 2 if they differ."""

    max_clock_offset_s: Seconds = 5.0
    """Refuse to start when the clocks of two hosts differ by more, in seconds."""


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
    ema: Ema | None = None
    """An average of the weights; null: none is kept."""

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
        """Samples per optimizer step on so many ranks that read different samples."""
        return self.train.batch_size_per_rank * self.train.accumulation_steps * num_ranks
