"""Checks that a task does not change gradients or weights where a strategy would not notice.

GradientWatch   refuses a loss that changes gradients itself, or registers hooks of gradients
WeightWatch     notices writes to weights where a strategy would lose them
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import is_

import torch

from horovod_train.errors import UserError
from horovod_train.frameworks.torch.state.local import to_local
from horovod_train.frameworks.torch.step.gradient_hooks import num_hooks
from horovod_train.frameworks.torch.strategies.base import Strategy

Gradients = list[torch.Tensor | None]


class GradientWatch:
    """Comparison of gradients and hooks before and after the loss of a micro-batch.

    Gradients are weighted by the rank's part of the samples, and are sent during the backward pass. A
    gradient that the loss creates would count as that of the whole batch, and a hook that the loss
    registers would run after the gradient is sent.

    ``parameters`` returns the parameters that may have gradients. ``strategy`` refuses a backward pass while
    the loss is computed.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        strategy: Strategy,
        parameters: Callable[[], Sequence[torch.nn.Parameter]],
    ) -> None:
        self._model, self._strategy, self._parameters = model, strategy, parameters
        self._num_hooks = 0
        self._gradients: Gradients = []
        self._versions: list[int] = []

    def watched(self, share: float) -> AbstractContextManager[None]:
        """Return the context of the task's loss, for a micro-batch with a fraction of the step's samples.

        Without other micro-batches and ranks, the loss may change gradients.
        """
        return self._watched() if share < 1 else nullcontext()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Compare gradients and hooks before and after the block, which computes the task's loss.

        Raises:
            UserError: The loss has changed a gradient, or registered a hook.
        """
        parameters = self._parameters()
        self._gradients = [parameter.grad for parameter in parameters]
        self._versions = _versions(self._gradients)
        self._num_hooks = self._hooks_of(parameters)
        self._strategy.is_in_loss = True
        try:
            yield
        finally:
            self._strategy.is_in_loss = False
        changed = self._changed(parameters)
        if changed is not None:
            raise UserError(
                f"the task's loss creates or changes the gradient of {self._name_of(changed)!r} itself (by "
                "``backward()`` or .grad): it would not be weighted by the rank's part of the batch",
                hint="return the sum of all terms, or detach what is not to be trained",
            )
        if self._hooks_of(parameters) != self._num_hooks:
            raise UserError(
                "the task's loss registers a hook of a parameter's gradient: it would run after the gradient "
                "was sent",
                hint="register it in the task's model()",
            )

    def _changed(self, parameters: Sequence[torch.nn.Parameter]) -> torch.nn.Parameter | None:
        """Return a parameter whose gradient was replaced or written; discard the recorded gradients."""
        before, self._gradients = self._gradients, []
        now = [parameter.grad for parameter in parameters]
        versions = _versions(now)
        # Called in each micro-batch: comparing whole lists takes half the time of a loop over parameters.
        if all(map(is_, before, now)) and versions == self._versions:
            return None
        same = (a is b and v == w for a, b, v, w in zip(before, now, self._versions, versions, strict=True))
        return next(parameter for parameter, is_same in zip(parameters, same, strict=True) if not is_same)

    def _hooks_of(self, parameters: Iterable[torch.nn.Parameter]) -> int:
        return sum(map(num_hooks, parameters))

    def _name_of(self, parameter: torch.nn.Parameter) -> str:
        return next((name for name, each in self._model.named_parameters() if each is parameter), "")


def _versions(gradients: Gradients) -> list[int]:
    """Return the version counter of each gradient; 0: there is none."""
    return [0 if gradient is None else gradient._version for gradient in gradients]  # noqa: SLF001


INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of the size of an element."""
NUM_FIRST = 64
"""So many times at the start, the content of a small group is compared."""
SMALL = 2**16
"""Largest number of elements of a small group."""


class Rotation:
    """Gives each group of weights of a model its turn.

    Attributes:
        count: Number of groups.
    """

    def __init__(self) -> None:
        self.count = 0


class WeightWatch:
    """Compares weights at two times.

    PyTorch counts writes to a tensor, but not those through ``.data``. Comparing contents costs as much as
    reading them. Therefore counts are compared each time, and the content of one group of weights in turn.
    At the start, the content of each small group is compared, too.

    Args:
        rotation: Shared by all groups of weights of a model, of which this is one; None: only counts of
            writes are compared.
    """

    def __init__(self, rotation: Rotation | None) -> None:
        self._rotation = rotation
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
        """Return whether this group's content is compared: first, and later in turn."""
        if self._rotation is None:
            return False
        if self._number is None:
            self._number = self._rotation.count
            self._rotation.count += 1
        self._num_begun += 1
        if self._num_begun <= NUM_FIRST and sum(weight.numel() for weight, _ in self._before) <= SMALL:
            return True
        return (self._num_begun + self._number) % self._rotation.count == 0

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
    bits, sums = [], []
    for each in map(to_local, weights):
        real = torch.view_as_real(each.resolve_conj()) if each.is_complex() else each
        flat = real.detach().reshape(-1)
        sums.append((flat if flat.element_size() > 1 else flat.float()).sum().double())  # float8 has no sum
        parts = [part.sum() for part in _parts_of_8_bytes(flat)]  # modulo 2**64
        bits.append(sum(parts[1:], parts[0]) if parts else torch.zeros_like(sums[-1], dtype=torch.int64))
    return torch.stack([torch.stack(bits), torch.stack(sums).view(torch.int64)])


def _parts_of_8_bytes(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the bits of a tensor as int64, and those of the rest as smaller integers."""
    per_8_bytes = 8 // flat.element_size()
    is_aligned = flat.storage_offset() % per_8_bytes == 0
    whole = len(flat) - len(flat) % per_8_bytes if is_aligned else 0
    if whole:
        yield flat[:whole].view(torch.int64)
    if whole < len(flat):
        yield flat[whole:].view(INTEGERS[flat.element_size()])
