"""Initial weights from a file; a model on the meta device loads only this rank's shard."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch.utils.weak import WeakIdKeyDictionary

from horovod_train.checkpoint.arrays import ArrayBlob
from horovod_train.checkpoint.plain_weights import FIELD
from horovod_train.errors import CheckpointError, UserError
from horovod_train.frameworks.torch.state.local_tensors import LocalTensor, load_model

log = logging.getLogger(__name__)


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Place parameters that are created in the block on the meta device.

    Buffers are created as usual, because the file lacks those that constructors compute, such as the
    frequencies of positional encodings.
    """
    plain = torch.nn.Module.register_parameter
    made = WeakIdKeyDictionary()  # shared weights remain shared; weak keys, so that memory is freed

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


def load_initial(
    model: torch.nn.Module, local_tensors: Mapping[str, LocalTensor], weights: Mapping[str, ArrayBlob]
) -> None:
    """Load the weights of a file into a model.

    Args:
        model: The model. If it registers a weight under several names, the file may contain only one of them.
        local_tensors: This rank's shard of the model, by name.
        weights: Arrays of the file.

    Raises:
        UserError: The weights belong to another model.
    """
    one = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    loaded = {one[name] for name in weights if name in one}
    wanted = {
        name: each for name, each in local_tensors.items() if name in weights or one.get(name) not in loaded
    }
    if unused := sorted(set(weights) - set(local_tensors) - set(one)):
        log.warning(
            "%s: the file has %d tensors that the model does not have, first %r: they are not used",
            FIELD,
            len(unused),
            unused[0],
        )
    try:
        load_model(wanted, weights)
    except (CheckpointError, ValueError, KeyError) as error:
        others = sorted(set(weights) - set(local_tensors))
        raise UserError(
            f"{FIELD}: they are of another model: {error}",
            hint=f"the file also contains {', '.join(others[:5])}; names must be those of the model"
            if others
            else "names and shapes must be those of the task's model",
        ) from error
