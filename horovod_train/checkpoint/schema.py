"""Schemas with which the JSON files of a checkpoint are validated before their content is used.

Checksums detect changes of a file after it was written. They do not show that this product wrote it.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from horovod_train.errors import CheckpointError

FileName = Annotated[
    str,
    Field(pattern=r"^((model|optimizer)(-[0-9]{5,7})?|rng|own)\.safetensors$|^(state|config)\.json$"),
]
Count = Annotated[int, Field(ge=0, le=10**12 - 1)]


class _Document(BaseModel):
    # Fields of later versions are accepted.
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class DigestDocument(_Document):
    """Checksum and size of a file, as stored in a manifest."""

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    size_bytes: Annotated[int, Field(ge=0, le=2**60)]


class SummaryDocument(_Document):
    """Values that lists of checkpoints show."""

    model_config = ConfigDict(frozen=True, strict=True, extra="allow")

    epochs: Annotated[float, Field(ge=0)]
    metrics: dict[str, float]
    unix_time_s: float
    world_size: Annotated[int, Field(ge=1, le=10**7)]


class ManifestDocument(_Document):
    """``manifest.json``, without its own checksum."""

    format: int
    step: Count
    files: dict[FileName, DigestDocument]
    summary: SummaryDocument

    @model_validator(mode="after")
    def _has_a_model(self) -> ManifestDocument:
        if missing := {"state.json", "config.json"} - self.files.keys():
            raise ValueError(f"files: {min(missing)} is missing")
        if not any(name.startswith("model") for name in self.files):
            raise ValueError("files: no model")
        return self


class OrderDocument(_Document):
    """Settings that determine the order of samples."""

    num_samples: Annotated[int, Field(ge=1)]
    seed: Annotated[int, Field(ge=0)]
    shuffle: bool


class PlateauDocument(_Document):
    """State of ``decay: plateau``."""

    factor: Annotated[float, Field(ge=0, le=1)]
    best: float | None
    num_without_improvement: Annotated[int, Field(ge=0)]
    cooldown: Annotated[int, Field(ge=0)]


class NoiseDocument(_Document):
    """Averages of the gradient noise."""

    covariances: list[float]
    square_norms: list[float]
    num_measured: Annotated[int, Field(ge=0)]


class PassedIntervalsDocument(_Document):
    """How often the interval of evaluations had passed at the last evaluation."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    interval: str
    number: Annotated[int, Field(ge=0)]


class ProgressDocument(_Document):
    """Progress of training."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    order: OrderDocument
    step: Count
    epoch: Count
    cursor: Annotated[int, Field(ge=0)]
    metrics: dict[str, float]
    metrics_step: Annotated[int, Field(ge=-1)]
    best_metric: float | None
    num_without_improvement: Annotated[int, Field(ge=0)]
    stopped_early: bool
    plateau: PlateauDocument | None = None
    noise: NoiseDocument | None = None
    scaled_epochs: Annotated[float, Field(ge=0)] | None = None
    evaluation: PassedIntervalsDocument | None = None
    epochs_of_steps: dict[str, Annotated[float, Field(ge=0)]] | None = None
    """These fields are absent in checkpoints of former versions."""


class ResumeDocument(_Document):
    """A resume of training from a checkpoint."""

    checkpoint: str
    unix_time_s: float
    world_size: int
    changes: list[str]

    def as_text(self) -> str:
        """Return a human-readable line."""
        changes = "; ".join(self.changes) or "nothing was changed"
        return f"resumed from {self.checkpoint} on {self.world_size} rank(s): {changes}"


class StateDocument(_Document):
    """``state.json``. Earlier versions do not write the fields that have defaults."""

    progress: ProgressDocument
    optimizer_tree: Any
    scaler: dict[str, float]
    environment: dict[str, str] = {}
    """Versions and digests of code of the run that wrote the checkpoint."""
    history: list[ResumeDocument] = []
    """The latest resumes of this training, up to ``manager.MAX_HISTORY``, with their changes."""


Model = TypeVar("Model", bound=BaseModel)


def checked(model: type[Model], document: object, what: str) -> Model:
    """Validate a parsed JSON document, which error messages call ``what``, with a pydantic model.

    Raises:
        CheckpointError: The document is invalid; the message names the first invalid field.
    """
    try:
        return model.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "the document"
        raise CheckpointError(f"{what}: has an invalid field: {where}: {first['msg']}") from None
