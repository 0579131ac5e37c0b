"""Whether this rank's device gets on with its work.

The host gives a GPU work and sees its results some steps later, so that Horovod's stall inspector, which
looks at what hosts ask for, sees nothing wrong when a GPU stands still: in a kernel that does not end, or in
an all-reduce that the network does not carry or another GPU does not come to. What is seen from here is that
the host waits, and in which phase of the step its device is.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread

from horovod_train.collectives.base import Communicator
from horovod_train.collectives.log import DeviceWork
from horovod_train.config.schema import Health
from horovod_train.errors import GpuError, HorovodTrainError, NcclError, PeerError

INTERVAL_S = 1.0
# Whoever is the cause says so before those that wait for it.
COURTESY_S = 10.0
NCCL_TELLS_MORE = "NCCL_DEBUG=INFO in launch.env shows more"


class DeviceWatch:
    """Looks at what this rank waits for, in a thread.

    Args:
        world: The ranks.
        health: When to speak, and when to end.
        tell: Told once of each wait that is long.
        end: Ends this process with an error: the main thread cannot be reached.
    """

    def __init__(
        self,
        world: Communicator,
        health: Health,
        tell: Callable[[str], None],
        end: Callable[[HorovodTrainError], None],
    ) -> None:
        self._world = world
        self._warning_s = health.stall_warning_s
        self._shutdown_s = health.stall_shutdown_s
        self._tell = tell
        self._end = end
        self._over = Event()
        self._thread = Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop looking. Safe to call twice."""
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        since_s, waited_s, has_told = None, 0.0, False
        # Counted, and not taken from a clock: this process may have been stopped itself.
        while not self._over.wait(INTERVAL_S):
            work = self._world.waiting_in
            if not isinstance(work, DeviceWork) or self._world.waiting_since_s != since_s:
                since_s, waited_s, has_told = self._world.waiting_since_s, 0.0, False
                continue
            waited_s += INTERVAL_S
            if waited_s >= self._warning_s and not has_told:
                has_told = True
                self._tell(f"{_state_of(work, waited_s)}: {_reason_for(work)}")
            courtesy_s = COURTESY_S if work.waits_for_others else 0.0
            if waited_s >= self._shutdown_s + courtesy_s:
                self._end(_error_of(work, waited_s))


def _state_of(work: DeviceWork, waited_s: float) -> str:
    if work.waits_for_others:
        return f"this rank's GPU has waited in an all-reduce for {waited_s:.0f} s"
    return f"this rank's GPU has been in one step's {work.phase() or 'end'} for {waited_s:.0f} s"


def _reason_for(work: DeviceWork) -> str:
    if work.waits_for_others:
        return f"another rank's GPU has not come to it, or the network does not carry it ({NCCL_TELLS_MORE})"
    return "does a kernel hang, or is the step so long? see `nvidia-smi`, and XID in `dmesg`"


def _error_of(work: DeviceWork, waited_s: float) -> HorovodTrainError:
    state = f"{_state_of(work, waited_s)}; ended after health.stall_shutdown_s"
    if not work.waits_for_others:
        return GpuError(state, hint="see `nvidia-smi`, and XID in the kernel's log (`dmesg | grep -i xid`)")
    error = PeerError(state, hint=f"a link or an interface between hosts, perhaps: {NCCL_TELLS_MORE}")
    error.cause = NcclError.cause
    return error
