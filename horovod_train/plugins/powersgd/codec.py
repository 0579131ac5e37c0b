"""PowerSGD: low-rank compression with error feedback, in two rounds of all-reduce.

The gradient of a parameter with at least two dimensions is a matrix M (first dimension by all others).
Each rank adds its residual to its M. With Q of the previous step:

    round 1:  P = sum over ranks of M Q        then each rank orthonormalizes the columns of P
    round 2:  Q = sum over ranks of M^T P      P Q^T approximates the sum over ranks of M

The new residual of a rank is the unsent part of its own M: M - P (M^T P)^T. The sum over ranks of sent parts
and residuals is the sum of M. It is sent exactly if its matrix rank is <= ``rank`` and Q spans its rows.
A matrix of n by m elements costs rank * (n + m) elements. Gradients with fewer dimensions, and matrices for
which P and Q are not smaller, are sent uncompressed in round 1.

Source: Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization", arXiv:1905.13727.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from horovod_train.errors import UserError, describe_ranks
from horovod_train.frameworks.torch.codecs import (
    BucketExchange,
    BucketLayout,
    Codec,
    Rounds,
    replace_if_used,
)
from horovod_train.frameworks.torch.comm.collectives import TensorCollectives
from horovod_train.frameworks.torch.state.rank_state import RESIDUAL, Rule, StateKey
from horovod_train.plugins.powersgd import Arguments

FACTOR = "factor"


class PowerSgd(Codec):
    """Codec that sends a low-rank approximation of each gradient matrix.

    Args:
        rank: Rank of the approximation, at least 1.
    """

    rules = MappingProxyType({RESIDUAL: Rule.SUM, FACTOR: Rule.SAME})

    def __init__(self, *, rank: int = 2) -> None:
        self._rank = Arguments(rank=rank).rank

    def message(self, layout: BucketLayout) -> BucketExchange:
        return PowerSgdMessage(layout, self._rank)

    def check(self, ranks: TensorCollectives, layouts: Sequence[BucketLayout]) -> None:
        """Raise ``UserError`` if QR factorizations differ between ranks, so that replicas would diverge.

        Results differ if processors or libraries differ. Collective.
        """
        digest = hashlib.sha256()
        for layout in layouts:
            dtype = torch.float64 if layout.dtype == torch.float64 else torch.float32
            for name, shape in layout.shapes.items():
                if own := rank_of(shape, self._rank):
                    sample = seeded(name, shape[0], own).to(layout.device, dtype)
                    basis = orthonormal(sample)
                    digest.update((basis @ (basis.T @ sample)).cpu().numpy().tobytes())
        everyone = ranks.allgather(digest.digest())
        differing = [rank for rank, each in enumerate(everyone) if each != everyone[0]]
        if differing:
            raise UserError(
                f"codec powersgd: QR factorizations of {describe_ranks(differing)} and of rank 0 are not "
                "bitwise equal: replicas would diverge",
                hint="use hosts with the same processors and libraries, or another codec",
            )


@dataclass(frozen=True)
class Matrix:
    """One compressed gradient.

    Attributes:
        name: Name of the parameter.
        gradient: The gradient and, after the exchange, its sum over ranks; shape [n, m], a view of ``body``.
        left: P, shape [n, rank], a view of the tensor of round 1.
        right: Q, shape [m, rank], a view of the tensor of round 2.
        start: Q of the first step, random and equal on all ranks.
        factor: Q of the last used step; all zeros before the first used step.
        residual: Residual of the last used step, shape [n, m].
        new_residual: Residual of this step.
    """

    name: str
    gradient: torch.Tensor
    left: torch.Tensor
    right: torch.Tensor
    start: torch.Tensor
    factor: torch.Tensor
    residual: torch.Tensor
    new_residual: torch.Tensor


class PowerSgdMessage(BucketExchange):
    """BucketExchange of two tensors. First: uncompressed gradients, all P, and the trailer. Second: all Q."""

    def __init__(self, layout: BucketLayout, rank: int) -> None:
        self._layout = layout
        self._dtype = torch.float64 if layout.dtype == torch.float64 else torch.float32
        self.body = self._zeros(layout, sum(layout.lengths))
        pieces = layout.split(self.body)
        matrix_ranks = {name: rank_of(shape, rank) for name, shape in layout.shapes.items()}
        self._whole = {name: piece for name, piece in pieces.items() if not matrix_ranks[name]}
        shapes = {
            name: (shape[0], len(pieces[name]) // shape[0], matrix_ranks[name])
            for name, shape in layout.shapes.items()
            if matrix_ranks[name]
        }
        num_whole = sum(map(len, self._whole.values()))
        num_left = sum(n * r for n, _, r in shapes.values())
        self._first = self._zeros(layout, num_whole + num_left + layout.trailer_length)
        self._second = self._zeros(layout, sum(m * r for _, m, r in shapes.values()))
        self._sums_of_whole = list(
            torch.split(self._first[:num_whole], [len(p) for p in self._whole.values()])
        )
        self.trailer = self._first[num_whole + num_left :]
        self.size_bytes = self._first.nbytes + self._second.nbytes
        self.matrices = self._matrices(layout, shapes, self._first[num_whole:])
        self._has_exchanged = False

    def _zeros(self, layout: BucketLayout, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=self._dtype, device=layout.device)

    def _matrices(
        self, layout: BucketLayout, shapes: Mapping[str, tuple[int, int, int]], left: torch.Tensor
    ) -> list[Matrix]:
        pieces, right = layout.split(self.body), self._second
        found = []
        for name, (n, m, r) in shapes.items():
            found.append(
                Matrix(
                    name,
                    pieces[name].view(n, m),
                    left[: n * r].view(n, r),
                    right[: m * r].view(m, r),
                    seeded(name, m, r).to(right),
                    self._zeros(layout, m, r),
                    self._zeros(layout, n, m),
                    self._zeros(layout, n, m),
                )
            )
            left, right = left[n * r :], right[m * r :]
        return found

    def exchange(self, ranks: TensorCollectives, name: str) -> Rounds:
        """Sum uncompressed gradients and the low-rank approximations of the other gradients."""
        for total, piece in zip(self._sums_of_whole, self._whole.values(), strict=True):
            total.copy_(piece)
        for each in self.matrices:
            each.gradient.add_(each.residual)
            torch.mm(each.gradient, usable_factor(each), out=each.left)
        yield ranks.start_allreduce(self._first, name)
        for total, piece in zip(self._sums_of_whole, self._whole.values(), strict=True):
            piece.copy_(total)
        if not self.matrices:
            return
        for each in self.matrices:
            each.left.copy_(orthonormal(each.left))
            torch.mm(each.gradient.T, each.left, out=each.right)
            torch.addmm(each.gradient, each.left, each.right.T, alpha=-1, out=each.new_residual)
        yield ranks.start_allreduce(self._second, f"{name}.second")
        for each in self.matrices:
            torch.mm(each.left, each.right.T, out=each.gradient)
        self._has_exchanged = True

    def state(self) -> Mapping[StateKey, torch.Tensor]:
        """Return the residual and the factor of each matrix."""
        residuals = {(each.name, RESIDUAL): each.residual.view(-1) for each in self.matrices}
        return residuals | {(each.name, FACTOR): each.factor for each in self.matrices}

    def commit(self, *, is_used: torch.Tensor | bool) -> None:
        """Store the new residuals and factors if the step is used."""
        if not self._has_exchanged:
            return
        for each in self.matrices:
            replace_if_used(each.residual, each.new_residual, is_used)
            replace_if_used(each.factor, each.right, is_used)


def rank_of(shape: Sequence[int], rank: int) -> int:
    """Return the matrix rank of the approximation of a gradient; 0: the gradient is sent uncompressed.

    >>> rank_of((64, 32), 2), rank_of((64,), 2), rank_of((2, 2), 2)
    (2, 0, 0)
    """
    if len(shape) < 2 or not torch.Size(shape).numel():
        return 0
    n, m = shape[0], torch.Size(shape).numel() // shape[0]
    own = min(rank, n, m)
    return own if own * (n + m) < n * m else 0


def usable_factor(matrix: Matrix) -> torch.Tensor:
    """Return Q of the last used step, scaled to a largest magnitude of 1; ``start`` if that Q is zero."""
    scale = matrix.factor.abs().max()
    return torch.where(scale > 0, matrix.factor / scale, matrix.start)


def seeded(name: str, rows: int, columns: int) -> torch.Tensor:
    """Return a random matrix, seeded by a name and therefore equal on all ranks; shape [rows, columns]."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(rows, columns, generator=generator)


def orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Return an orthonormal basis, shape [n, rank], whose span contains the columns of a matrix."""
    return torch.linalg.qr(matrix).Q
