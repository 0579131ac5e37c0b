"""Notices writes to weights where a strategy would lose them.

PyTorch counts writes to a tensor, but not those through ``.data``. Comparing contents costs as much as
reading them. Therefore counts are compared each time, and the content of one group of weights in turn. At the
start, the content of each small group is compared, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from horovod_train.frameworks.torch.comm.buckets import to_local

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of the size of an element."""
NUM_FIRST = 64
"""So many times at the start, the content of a small group is compared."""
SMALL = 2**16
"""Largest number of elements of a small group."""


class Turns:
    """Gives each group of weights of a model its turn.

    Attributes:
        count: Number of groups.
    """

    def __init__(self) -> None:
        self.count = 0


class WeightWatch:
    """Compares weights at two times.

    Args:
        turns: Shared by all groups of weights of a model, among which this is one more; None: only counts of
            writes are compared.
    """

    def __init__(self, turns: Turns | None) -> None:
        self._turns = turns
        self._number: int | None = None
        self._num_begun = 0
        self._before: list[tuple[torch.Tensor, int]] = []
        self._content: torch.Tensor | None = None
        self._pending: torch.Tensor | None = None

    def begin(self, weights: Iterable[torch.Tensor]) -> None:
        """Record the weights as they are."""
        self._before = [(weight, weight._version) for weight in weights]  # noqa: SLF001  (no public API)
        is_turn = bool(self._before) and self._is_turn()
        self._content = content_sums([weight for weight, _ in self._before]) if is_turn else None

    def _is_turn(self) -> bool:
        """Return whether this group's content is compared: first and in turn, once per number of groups."""
        if self._turns is None:
            return False
        if self._number is None:
            self._number = self._turns.count
            self._turns.count += 1
        self._num_begun += 1
        if self._num_begun <= NUM_FIRST and sum(weight.numel() for weight, _ in self._before) <= SMALL:
            return True
        return (self._num_begun + self._number) % self._turns.count == 0

    def end(self) -> torch.Tensor | None:
        """Return a weight that was written since ``begin``; None: none was.

        On a GPU, a difference of contents is found at a later call, because nothing waits for the GPU.
        """
        before, self._before = self._before, []
        for weight, version in before:
            if weight._version != version:  # noqa: SLF001
                return weight
        is_found = self._pending is not None and bool(self._pending)
        if self._content is not None and all(_has_memory(weight) for weight, _ in before):
            differs = (content_sums([weight for weight, _ in before]) != self._content).any()
            if differs.is_cuda:
                self._pending = torch.zeros((), dtype=torch.bool, pin_memory=True)
                self._pending.copy_(differs, non_blocking=True)
            else:
                is_found = bool(differs)
        return before[0][0] if before and is_found else None


def _has_memory(weight: torch.Tensor) -> bool:
    """Return whether a strategy has not released the memory of a gathered weight."""
    local = to_local(weight.detach())
    return local.numel() > 0 and local.untyped_storage().size() > 0


@torch.no_grad()
def content_sums(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the bits of each weight, and the bits of its sum, int64, shape [2, weights].

    In one of them alone, changes may cancel each other, such as those of signs. Of a ``DTensor``, the local
    part is summed up. Sums are in the types of the elements: others take ten times as long on a CPU.
    """
    device = weights[0].device
    bits = torch.zeros(len(weights), dtype=torch.int64, device=device)
    sums = torch.zeros(len(weights), dtype=torch.float64, device=device)
    for number, each in enumerate(map(to_local, weights)):
        real = torch.view_as_real(each.resolve_conj()) if each.is_complex() else each
        flat = real.detach().reshape(-1)
        sums[number] += (flat if flat.element_size() > 1 else flat.float()).sum()  # float8 has no sum
        for part in _parts_of_8_bytes(flat):
            bits[number] += part.sum()  # modulo 2**64
    return torch.stack([bits, sums.view(torch.int64)])


def _parts_of_8_bytes(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the bits of a tensor as int64, and those of the rest as smaller integers."""
    per_8_bytes = 8 // flat.element_size()
    is_aligned = flat.storage_offset() % per_8_bytes == 0
    whole = len(flat) - len(flat) % per_8_bytes if is_aligned else 0
    if whole:
        yield flat[:whole].view(torch.int64)
    if whole < len(flat):
        yield flat[whole:].view(INTEGERS[flat.element_size()])
