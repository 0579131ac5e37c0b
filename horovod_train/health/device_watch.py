"""Whether this rank's device gets on with its work.

The host gives a GPU work and sees its results some steps later, so that Horovod's stall inspector, which
looks at what hosts ask for, sees nothing wrong when a GPU stands still: in a kernel that does not end, or in
an all-reduce that the network does not carry or another GPU does not come to. What is seen from here is that
the host waits, and in which phase of the step its device is.
"""

from __future__ import annotations

from collections.abc import Callable

from horovod_train.collectives.base import Communicator
from horovod_train.collectives.log import DeviceWork
from horovod_train.config.schema import Health
from horovod_train.errors import GpuError, HorovodTrainError, NcclError, PeerError
from horovod_train.health.wait_watch import Wait, WaitWatch

INTERVAL_S = 1.0
# Whoever is the cause says so before those that wait for it.
COURTESY_S = 10.0
NCCL_DEBUG_HINT = "NCCL_DEBUG=INFO in launch.env shows more"


class DeviceWatch(WaitWatch):
    """Reports a GPU that stands still, and ends the rank when it does so for too long.

    Args:
        world: The ranks.
        health: When to report, and when to end.
        warn: Prints a warning.
        end: Ends this process with an error.
    """

    def __init__(
        self,
        world: Communicator,
        health: Health,
        warn: Callable[[str], None],
        end: Callable[[HorovodTrainError], None],
    ) -> None:
        self._world = world
        self._shutdown_s = health.stall_shutdown_s
        super().__init__(
            self._wait, interval_s=INTERVAL_S, warning_s=health.stall_warning_s, warn=warn, end=end
        )

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
        return f"another rank's GPU has not come to it, or the network does not carry it ({NCCL_DEBUG_HINT})"
    return "does a kernel hang, or is the step so long? see `nvidia-smi`, and XID in `dmesg`"


def _error_of(work: DeviceWork, elapsed_s: float) -> HorovodTrainError:
    state = f"{_state_of(work, elapsed_s)}; ended after health.stall_shutdown_s"
    if not work.is_collective:
        return GpuError(state, hint="see `nvidia-smi`, and XID in the kernel's log (`dmesg | grep -i xid`)")
    error = PeerError(state, hint=f"a link or an interface between hosts, perhaps: {NCCL_DEBUG_HINT}")
    error.cause = NcclError.cause
    return error
