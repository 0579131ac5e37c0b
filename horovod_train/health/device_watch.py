"""Monitor the progress of this rank's GPU.

The host queues work on a GPU and reads results some steps later. Horovod's stall inspector monitors only the
requests of hosts, so it does not detect a GPU that hangs in a kernel, or in an all-reduce because of the
network or another GPU. The watchdog detects that the host waits, and in which phase of the step the GPU is.
"""

from __future__ import annotations

from collections.abc import Callable

from horovod_train.collectives.base import Communicator
from horovod_train.collectives.log import DeviceWork
from horovod_train.config.schema import Health
from horovod_train.errors import GpuError, HorovodTrainError, NcclError, PeerError
from horovod_train.health.wait_watch import Wait, WaitWatch

# The rank that is the cause reports before the ranks that wait for it.
COURTESY_S = 10.0
NCCL_DEBUG_HINT = "NCCL_DEBUG=INFO in launch.env shows more"


class DeviceWatch(WaitWatch):
    """Watchdog that reports a GPU that hangs, and ends the rank if it hangs for too long."""

    def __init__(
        self,
        world: Communicator,
        health: Health,
        warn: Callable[[str], None],
        end: Callable[[HorovodTrainError], None],
    ) -> None:
        self._world = world
        self._shutdown_s = health.stall_shutdown_s
        super().__init__(self._wait, health, warn, end)

    def _wait(self) -> Wait | None:
        work, since_s = self._world.waiting_in, self._world.waiting_since_s
        if not isinstance(work, DeviceWork) or since_s is None:
            return None
        return Wait(
            since_s,
            self._shutdown_s + (COURTESY_S if work.is_collective else 0.0),
            lambda elapsed_s: f"{_state_of(work, elapsed_s)}: {_reason_for(work)}",
            lambda elapsed_s: _error_of(work, elapsed_s),
        )


def _state_of(work: DeviceWork, elapsed_s: float) -> str:
    if work.is_collective:
        return f"this rank's GPU has waited in an all-reduce for {elapsed_s:.0f} s"
    return f"this rank's GPU has been in one step's {work.phase() or 'end'} for {elapsed_s:.0f} s"


def _reason_for(work: DeviceWork) -> str:
    if work.is_collective:
        return f"another rank's GPU has not started it, or the network is blocked ({NCCL_DEBUG_HINT})"
    return "a kernel hangs, or the step is long: see `nvidia-smi`, and XID in `dmesg`"


def _error_of(work: DeviceWork, elapsed_s: float) -> HorovodTrainError:
    state = f"{_state_of(work, elapsed_s)}; ended after health.stall_shutdown_s"
    if not work.is_collective:
        return GpuError(state, hint="see `nvidia-smi`, and XID in the kernel's log (`dmesg | grep -i xid`)")
    error = PeerError(state, hint=f"check links and interfaces between hosts: {NCCL_DEBUG_HINT}")
    error.cause = NcclError.cause
    return error
