"""What the JSON files of a checkpoint have to look like before anything in them is used.

A checksum says that a file is as it was written, not that it was written by this product.
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
    """What a manifest says of a file."""

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    size_bytes: Annotated[int, Field(ge=0, le=2**60)]


class SummaryDocument(_Document):
    """What lists show."""

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
    """What fixes the order of samples."""

    num_samples: Annotated[int, Field(ge=1)]
    seed: Annotated[int, Field(ge=0)]
    shuffle: bool


class ProgressDocument(_Document):
    """Where training stands."""

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


class ResumeDocument(_Document):
    """One time that training has gone on from a checkpoint."""

    checkpoint: str
    unix_time_s: float
    world_size: int
    changes: list[str]

    def as_text(self) -> str:
        """Return it for a person."""
        changes = "; ".join(self.changes) or "nothing was changed"
        return f"resumed from {self.checkpoint} on {self.world_size} rank(s): {changes}"


class StateDocument(_Document):
    """``state.json``; what has a default here was not written by earlier versions."""

    progress: ProgressDocument
    optimizer_tree: Any
    scaler: dict[str, float]
    environment: dict[str, str] = {}
    """Versions and code that it was trained with."""
    history: list[ResumeDocument] = []
    """How often it was resumed on the way, and what was changed each time; the last of many."""


Model = TypeVar("Model", bound=BaseModel)


def checked(model: type[Model], document: object, what: str) -> Model:
    """Return a document as its model.

    Args:
        model: What it has to be.
        document: What was read.
        what: Names it for a person.

    Raises:
        CheckpointError: It is something else; names the first thing that is wrong.
    """
    try:
        return model.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "the document"
        raise CheckpointError(f"{what}: is not what a checkpoint holds: {where}: {first['msg']}") from None
