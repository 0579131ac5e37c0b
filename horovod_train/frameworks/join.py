"""Initialization of Horovod in users' own training loops and scripts."""

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
from horovod_train.horovod.launched import require_world, started_as_one_of_many

log = logging.getLogger(__name__)

_joined: dict[type[HorovodCommunicator], HorovodCommunicator] = {}


def join(
    communicator_class: type[HorovodCommunicator],
    job: Job | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Communicator:
    """Initialize Horovod, and return the communicator. Later calls return the same communicator.

    If no agent of this package monitors the ranks, they monitor each other: they report a rank whose
    heartbeat is missing, and exit if it is missing for too long. The job's ``health`` section specifies the
    times; the other settings of the job are used as by ``connect``.

    Raises:
        EngineError: The process is one of several ranks, and Horovod is missing or cannot start.
        UserError: A launcher that Horovod does not support has started several processes.
    """
    if not started_as_one_of_many(environ):
        require_world(environ, 1)
        return SingleRank()
    if (joined := _joined.get(communicator_class)) is not None:
        if joined.hvd.is_initialized():
            return joined
        joined.at_close.close()  # the script has called ``hvd.shutdown``
    health = job.health if job is not None else Health()
    with JoinWatch(health, log.warning, _end):
        world = connect(communicator_class, job, environ)
    assert isinstance(world, HorovodCommunicator)
    _joined[communicator_class] = world
    world.at_close.callback(_joined.pop, communicator_class)
    if world.size > 1 and heartbeat_dir(environ) is None:
        world.at_close.callback(PeerWatch(world, health, log.warning, _end).close)
        atexit.register(world.at_close.close)  # reports a normal exit to other ranks; few scripts call it
    if world.size > 1 and gpu_uuid(0):
        world.at_close.callback(DeviceWatch(world, health, log.warning, _end).close)
    return world


def _end(error: HorovodTrainError) -> None:
    """Log an error, and exit this rank, which would hang otherwise."""
    log.error("%s", error)
    os._exit(error.exit_code)  # the main thread is blocked in a collective
