"""Models whose weights have no memory yet: they come from a file, and each rank takes its part alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from horovod_train.checkpoint.arrays import ArrayBlob
from horovod_train.checkpoint.plain_weights import FIELD
from horovod_train.errors import CheckpointError, UserError
from horovod_train.frameworks.torch.held import Held, load_model


@contextmanager
def parameters_without_memory() -> Iterator[None]:
    """Let parameters that are made in the block be on the meta device; buffers are made as ever.

    Modules compute some buffers when they are made, such as frequencies of positions, and no file has them.
    """
    plain = torch.nn.Module.register_parameter
    made = WeakIdKeyDictionary()  # what is one weight stays one, and memory is not kept

    def register(self: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            if param not in made:
                empty = torch.nn.Parameter(param.detach().to("meta"), param.requires_grad)
                empty.__dict__.update(param.__dict__)
                made[param] = empty
            param = made[param]
        plain(self, name, param)

    torch.nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = plain  # type: ignore[method-assign]


def give_memory(model: torch.nn.Module, weights_on: torch.device, rest_on: torch.device) -> None:
    """Give weights without memory some, uninitialized; bring everything else to its device.

    What is one weight stays one, which ``to_empty`` does not see to; and buffers keep their numbers.

    Args:
        model: The model.
        weights_on: Where weights that ranks share are.
        rest_on: Where buffers are, and weights that each rank has.

    Raises:
        UserError: A buffer was computed from weights.
    """
    placed: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in placed:
                data = parameter.detach()
                device = weights_on if isinstance(data, DTensor) else rest_on
                there = torch.empty_like(data, device=device) if data.is_meta else data.to(device)
                placed[id(parameter)] = torch.nn.Parameter(there, parameter.requires_grad)
            module._parameters[name] = placed[id(parameter)]  # noqa: SLF001
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if buffer.is_meta:
                raise UserError(
                    f"{FIELD}: the buffer {name!r} of a {type(module).__name__} is computed from weights, "
                    "which come from a file later",
                    hint="compute it in forward, or use strategy: zero, which makes the model whole",
                )
            module._buffers[name] = buffer.to(rest_on)  # noqa: SLF001
    model._apply(lambda tensor: tensor)  # type: ignore[no-untyped-call]  # noqa: SLF001  (lets fully_shard notice)


def load_initial(held: Mapping[str, Held], weights: Mapping[str, ArrayBlob]) -> None:
    """Take over a file's weights.

    Args:
        held: What is wanted.
        weights: Of the file.

    Raises:
        UserError: They are of another model.
    """
    places = {name: _place(each) for name, each in held.items()}
    there = {place for name, place in places.items() if name in weights}
    # Of a weight that has two names, a file may have one.
    wanted = {name: each for name, each in held.items() if name in weights or places[name] not in there}
    try:
        load_model(wanted, weights)
    except (CheckpointError, ValueError, KeyError) as error:
        others = sorted(set(weights) - set(held))
        raise UserError(
            f"{FIELD}: they are of another model: {error}",
            hint=f"the file has {', '.join(others[:5])} besides; names must be those of the model"
            if others
            else "names and shapes must be those of the task's model",
        ) from error


def _place(held: Held) -> tuple[object, ...]:
    """Return what two names of one weight have in common."""
    tensor = held.tensor
    return (tensor.data_ptr(), tensor.shape) if tensor.numel() else (id(tensor),)
