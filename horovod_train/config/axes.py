"""Arrangement of ranks along a data, a pipeline and a tensor axis.

    rank = (data x num_pipeline + pipeline) x num_tensor + tensor

Consecutive ranks, usually of one host, are along the tensor axis, because it communicates most. The next axis
is the pipeline axis, the outermost the data axis.
"""

from __future__ import annotations

from dataclasses import dataclass

from horovod_train.errors import UserError


@dataclass(frozen=True)
class Axes:
    """Lengths of the axes.

    Attributes:
        data: Number of groups that read different samples.
        pipeline: Number of ranks in a pipeline.
        tensor: Number of ranks among which each layer is sharded.
    """

    data: int
    pipeline: int = 1
    tensor: int = 1

    @classmethod
    def of(cls, world_size: int, *, pipeline: int | None = 1, tensor: int | None = 1) -> Axes:
        """Return the axes of ``world_size`` ranks; with None, an axis has the maximum length.

        >>> Axes.of(8, pipeline=2, tensor=2)
        Axes(data=2, pipeline=2, tensor=2)

        Raises:
            UserError: ``pipeline * tensor`` does not divide the number of ranks.
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
        """Return the coordinates of a rank along the axes data, pipeline and tensor.

        >>> Axes(data=2, pipeline=2, tensor=2).place(5)
        (1, 0, 1)
        """
        rest, tensor = divmod(rank, self.tensor)
        data, pipeline = divmod(rest, self.pipeline)
        return data, pipeline, tensor

    def rank(self, data: int, pipeline: int, tensor: int) -> int:
        """Return the rank at these coordinates."""
        return (data * self.pipeline + pipeline) * self.tensor + tensor

    def pipelines(self) -> list[list[int]]:
        """Return the ranks of each pipeline, in the order of stages.

        >>> Axes(data=2, pipeline=2).pipelines()
        [[0, 1], [2, 3]]
        """
        return [
            [self.rank(data, pipeline, tensor) for pipeline in range(self.pipeline)]
            for data in range(self.data)
            for tensor in range(self.tensor)
        ]

    def data_groups(self) -> list[list[int]]:
        """Return the groups of ranks that store the same part of the model and read different samples.

        >>> Axes(data=2, tensor=2).data_groups()
        [[0, 2], [1, 3]]
        """
        return [
            [self.rank(data, pipeline, tensor) for data in range(self.data)]
            for pipeline in range(self.pipeline)
            for tensor in range(self.tensor)
        ]
