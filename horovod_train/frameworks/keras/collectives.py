"""The ranks, for the back end that Keras uses."""

from __future__ import annotations

from horovod_train.collectives.base import Communicator
from horovod_train.config.schema import Job
from horovod_train.frameworks.join import join
from horovod_train.frameworks.keras.back_ends.base import back_end


def init(job: Job | None = None) -> Communicator:
    """Join the ranks this process was started with; a world of one when there are none.

    Raises:
        EngineError: Started as one of several ranks, and Horovod is missing or cannot start.
        UserError: Keras uses a back end that cannot train on several ranks.
    """
    return join(back_end().communicator_class(), job)
