"""Communicator for the back end of Keras."""

from __future__ import annotations

from horovod_train.collectives.base import Communicator
from horovod_train.config.schema import Job
from horovod_train.frameworks.join import join
from horovod_train.frameworks.keras.back_ends.base import back_end


def init(job: Job | None = None) -> Communicator:
    """Initialize Horovod, and return the communicator; of one rank, if this process was started alone.

    Raises:
        EngineError: The process is one of several ranks, and Horovod is missing or cannot start.
        UserError: The back end of Keras is not supported.
    """
    return join(back_end().communicator_class(), job)
