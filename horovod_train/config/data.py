"""The section ``data`` of a job: where samples come from, which of them are used, and who loads them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints, field_validator

from horovod_train.config.fields import Count, ImportPath, Name, Section
from horovod_train.config.optimization import as_list

Text = Annotated[str, StringConstraints(min_length=1)]


class Files(Section):
    """Files with samples. Without a source, the task's methods return the data."""

    source: ImportPath | Name | None = None
    """Format of the files (see docs/data.md), ``module:Class`` or ``file.py:Class``; null: ``train_data()``
    and ``eval_data()`` of the task."""

    source_args: dict[str, Any] = {}
    """Arguments of the source, such as ``length: 1024`` of tokens."""

    files: Annotated[list[Text], BeforeValidator(as_list, json_schema_input_type=str | list[str])] = []
    """Files, with braces (``train-{000..255}.tar``) and ``*``: paths relative to the job file, or URLs such
    as ``s3://bucket/train-*.tar``."""

    decode: ImportPath | None = None
    """Function of a sample as it is stored, which returns that of the task; null: one of the source."""

    keep: ImportPath | None = None
    """Function of a sample as it is stored, whether to use it. It is called once, for the index of the files.
    null: all samples are used."""

    exclude: Text | None = None
    """File with the names of files that are left out, or of samples: the name of a file, a tab, and a number,
    as ``data verify`` writes it."""


class Part(Files):
    """One of several sources of the training data."""

    proportion: Annotated[float, Field(gt=0, le=1e9)] = 1.0
    """Part of the samples, relative to that of the other parts."""


class Sampling(Section):
    """How often samples are used. The functions are called once, for the index of the files."""

    weight: ImportPath | None = None
    """Function of a sample as it is stored, which returns its weight: samples are drawn in proportion to it.
    null: each sample is used once."""

    balance: ImportPath | None = None
    """Function of a sample as it is stored, which returns its class: classes are drawn equally often."""

    replacement: bool = True
    """Draw with replacement. Without it, an epoch has each sample at most once, and classes or samples of
    large weight come first."""

    length: ImportPath | None = None
    """Function of a sample as it is stored, which returns its length: global batches have samples of similar
    length. null: any length."""


class Cache(Section):
    """Folder of each host for copies of remote files, and for files that must be unpacked."""

    dir: Text | None = None
    """The folder; null: ``horovod_train-<user id>`` in $SLURM_TMPDIR, or else in $TMPDIR, or else in /tmp."""

    size_gib: Annotated[float, Field(gt=0, le=2**30)] = 100.0
    """Files that were not used for the longest time are removed above this size, unless they are in use."""


class Data(Files):
    """Samples, their order, and their loading."""

    eval: Files | None = None
    """Files of the evaluation data; ``source``, ``source_args``, ``decode`` and ``exclude`` are those of the
    training data unless given (of a mixture, of its first part). null: ``eval_data()`` of the task, if it has
    this method."""

    mixture: list[Part] = []
    """Sources that are mixed in proportions, in place of ``source``."""

    sampling: Sampling | None = None
    """Weights, classes and lengths of samples; null: each sample is used once in a pass."""

    collate: ImportPath | None = None
    """Function of a list of samples, which returns a batch; null: arrays are stacked."""

    cache: Cache = Cache()
    index_dir: Text | None = None
    """Folder of the indices of files, which hosts may share; null: ``.index`` in ``run_dir``."""

    num_workers: Annotated[int, Field(ge=0, le=1024)] = 0
    """Loader processes per rank; 0: load in the training process."""

    prefetch_batches: Annotated[int, Field(ge=1, le=1024)] = 2
    """Micro-batches that each loader process prefetches."""

    pin_memory: bool = True
    """Store batches in page-locked memory, for faster copies to a GPU; no effect on a CPU."""

    shuffle: bool = True
    """Shuffle in each epoch, seeded by ``train.seed`` and the epoch."""

    samples_per_epoch: Count | None = None
    """Samples of an epoch, for data that takes long to read once, or that is drawn: epochs are then parts of
    one pass after the other. null: an epoch is a pass over the data."""

    augmentation: Literal["batch", "sample"] = "batch"
    """batch: random numbers of the dataset are seeded for each micro-batch; sample: for each sample, so that
    a sample is the same on any number of ranks."""

    @field_validator("mixture")
    @classmethod
    def _has_several(cls, value: list[Part]) -> list[Part]:
        """Require two parts."""
        if len(value) == 1:
            raise ValueError("has one part: write its fields in data itself")
        return value
