"""How ranks are arranged: along which axis they read different samples, and along which they share a model.

    rank = (data x num_pipeline + pipeline) x num_tensor + tensor

Ranks next to each other, of one host, are along the tensor axis, which exchanges most; then come stages of a
pipeline, then replicas.
"""

from __future__ import annotations

from dataclasses import dataclass

from horovod_train.errors import UserError


@dataclass(frozen=True)
class Axes:
    """The lengths of the axes.

    Attributes:
        data: Groups of ranks that read different samples.
        pipeline: Stages of a pipeline.
        tensor: Ranks that share each layer.
    """

    data: int
    pipeline: int = 1
    tensor: int = 1

    @classmethod
    def of(cls, world_size: int, *, pipeline: int | None = 1, tensor: int | None = 1) -> Axes:
        """Return the axes of so many ranks, given two of them; None: as many ranks as there are.

        >>> Axes.of(8, pipeline=2, tensor=2)
        Axes(data=2, pipeline=2, tensor=2)

        Raises:
            UserError: They do not divide the number of ranks.
        """
        tensor = max(1, world_size // (pipeline or 1)) if tensor is None else tensor
        pipeline = max(1, world_size // tensor) if pipeline is None else pipeline
        data, rest = divmod(world_size, pipeline * tensor)
        if rest or not data:
            found = " x ".join(
                f"{length} {name}"
                for name, length in (("stages", pipeline), ("tensor ranks", tensor))
                if length > 1
            )
            raise UserError(
                f"strategy: {found} do not divide {world_size} ranks",
                hint=f"start a multiple of {pipeline * tensor} ranks, or change strategy.args",
            )
        return cls(data, pipeline, tensor)

    def place(self, rank: int) -> tuple[int, int, int]:
        """Return where a rank stands along data, pipeline and tensor.

        >>> Axes(data=2, pipeline=2, tensor=2).place(5)
        (1, 0, 1)
        """
        rest, tensor = divmod(rank, self.tensor)
        data, pipeline = divmod(rest, self.pipeline)
        return data, pipeline, tensor

    def rank(self, data: int, pipeline: int, tensor: int) -> int:
        """Return the rank that stands there."""
        return (data * self.pipeline + pipeline) * self.tensor + tensor

    def pipelines(self) -> list[list[int]]:
        """Return the groups of ranks between which micro-batches pass, in the order of stages.

        >>> Axes(data=2, pipeline=2).pipelines()
        [[0, 1], [2, 3]]
        """
        return [
            [self.rank(data, pipeline, tensor) for pipeline in range(self.pipeline)]
            for data in range(self.data)
            for tensor in range(self.tensor)
        ]

    def data_groups(self) -> list[list[int]]:
        """Return the groups of ranks that have the same part of the model and read different samples.

        >>> Axes(data=2, tensor=2).data_groups()
        [[0, 2], [1, 3]]
        """
        return [
            [self.rank(data, pipeline, tensor) for data in range(self.data)]
            for pipeline in range(self.pipeline)
            for tensor in range(self.tensor)
        ]
