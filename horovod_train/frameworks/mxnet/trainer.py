"""Gluon Trainer that averages gradients over ranks, for users' own training loops."""

from __future__ import annotations

from typing import Any

import mxnet as mx

from horovod_train.collectives.base import Communicator
from horovod_train.frameworks.arrays import check_same_layout, from_rank_0
from horovod_train.frameworks.join import join
from horovod_train.frameworks.mxnet.collectives import MxnetCommunicator
from horovod_train.frameworks.mxnet.exchange import Exchange


def init() -> Communicator:
    """Initialize Horovod, and return the communicator; of one rank, if this process was started alone.

    Raises:
        EngineError: The process is one of several ranks, and Horovod is missing or cannot start.
    """
    return join(MxnetCommunicator)


class DistributedTrainer(mx.gluon.Trainer):
    """A ``gluon.Trainer`` that averages gradients over ranks; ``step`` receives this rank's batch size.

    The arguments are those of ``gluon.Trainer``, the communicator, and the approximate size of a bucket of
    gradients.
    """

    def __init__(
        self,
        params: Any,
        optimizer: Any,
        world: Communicator,
        optimizer_params: dict[str, Any] | None = None,
        *,
        bucket_size_mib: float = 8.0,
    ) -> None:
        super().__init__(params, optimizer, optimizer_params=optimizer_params, kvstore=None)
        self._exchange = Exchange(world, int(bucket_size_mib * 2**20))
        self._scale /= world.size

    def _allreduce_grads(self) -> None:
        self._exchange.sum([p.grad() for p in self._params if p.grad_req != "null"])


def broadcast(world: Communicator, params: Any) -> None:
    """Assign rank 0's values to parameters. Call this before the first step, when all shapes are known.

    Raises:
        UserError: Ranks have different parameters.
    """
    if world.size == 1:
        return
    by_name = {str(number): param for number, param in enumerate(params.values())}
    check_same_layout(world, {name: param.data().asnumpy() for name, param in by_name.items()})
    for param in by_name.values():
        param.set_data(mx.nd.array(from_rank_0(world, param.data().asnumpy()), dtype=param.dtype))
