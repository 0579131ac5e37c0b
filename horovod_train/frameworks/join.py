"""Joining the ranks from a loop or script of the user's own, where no launch of ours looks after them."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Mapping

from horovod_train.collectives.base import Communicator, SingleRank
from horovod_train.collectives.horovod import HorovodCommunicator, connect
from horovod_train.config.schema import Health, Job
from horovod_train.errors import HorovodTrainError
from horovod_train.frameworks.devices import gpu_uuid
from horovod_train.health.device_watch import DeviceWatch
from horovod_train.health.heartbeat import PeerWatch, heartbeat_dir
from horovod_train.health.join_watch import JoinWatch
from horovod_train.horovod.environment import require_launcher, started_as_one_of_many

log = logging.getLogger(__name__)

_joined: dict[type[HorovodCommunicator], HorovodCommunicator] = {}


def join(
    communicator_class: type[HorovodCommunicator],
    job: Job | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Communicator:
    """Join the ranks from a loop or script of the user's own; called again, it returns the same world.

    Where no launch of ours looks after the ranks, they look after each other: one that is silent for
    long is named, and those that wait for it for too long end.

    Args:
        communicator_class: Which binding to use.
        job: As in ``connect``; says when a rank has been silent for too long, too.
        environ: What launchers leave in the environment.

    Raises:
        EngineError: It was started as one of several ranks, and Horovod is missing or cannot start.
        UserError: It was started as one of several processes that Horovod does not know.
    """
    if not started_as_one_of_many(environ):
        require_launcher(environ)
        return SingleRank()
    if (joined := _joined.get(communicator_class)) is not None:
        if joined.hvd.is_initialized():
            return joined
        joined.at_close.close()  # a script has left by ``hvd.shutdown``
    health = job.health if job is not None else Health()
    with JoinWatch(health, log.warning, _end):
        world = connect(communicator_class, job, environ)
    assert isinstance(world, HorovodCommunicator)
    _joined[communicator_class] = world
    world.at_close.callback(_joined.pop, communicator_class)
    if world.size > 1 and heartbeat_dir(environ) is None:
        world.at_close.callback(PeerWatch(world, health, log.warning, _end).close)
        atexit.register(world.at_close.close)  # few scripts close it, and no one is to miss this rank then
    if world.size > 1 and gpu_uuid(0):
        world.at_close.callback(DeviceWatch(world, health, log.warning, _end).close)
    return world


def _end(error: HorovodTrainError) -> None:
    """End this rank, which would wait for ever."""
    log.error("%s", error)
    os._exit(error.exit_code)  # the main thread waits in a collective, and cannot be reached there
