"""Attribution of waiting to ranks, from the time that each rank waited in the all-reduce of a step.

Clocks of hosts are not compared. All ranks exit an all-reduce at the same time, so the rank with the shortest
wait arrived last, and its wait is the time of the communication. For n ranks with waits w1 <= w2 <= ... <= wn
(rank 1 arrived last):

    communication        w1
    waiting of rank i    wi - w1
    waited for           between the arrivals of ranks i + 1 and i, n - i ranks waited for i missing ranks;
                         each missing rank is charged with (n - i) (w[i+1] - wi) / i

The sum of the charges equals the sum of the waiting.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def attribute_waiting(wait_times_s: Floats) -> tuple[Floats, Floats, Floats]:
    """Return waiting, waited for, and communication.

    Args:
        wait_times_s: Wait of each rank in the all-reduce of each step, shape [steps, ranks].

    Returns:
        Time that each rank waited for others, summed over steps, shape [ranks]; time that others waited for
        it, summed over steps and other ranks, shape [ranks]; time of the communication, shape [steps].

    >>> waiting, waited_for, communication = attribute_waiting(np.array([[3.0, 1.0, 3.0]]))
    >>> waiting.tolist(), waited_for.tolist(), communication.tolist()
    ([2.0, 0.0, 2.0], [0.0, 4.0, 0.0], [1.0])
    """
    num_steps, num_ranks = wait_times_s.shape
    order = np.argsort(wait_times_s, axis=1, kind="stable")
    ordered = np.take_along_axis(wait_times_s, order, axis=1)
    communication = ordered[:, 0] if num_ranks else np.zeros(num_steps)
    missing = np.arange(1, num_ranks)
    charged = np.zeros_like(wait_times_s)
    charges = np.diff(ordered, axis=1) * ((num_ranks - missing) / missing)
    # A rank is charged for all intervals in which it is missing.
    charged[:, :-1] = np.cumsum(charges[:, ::-1], axis=1)[:, ::-1]
    waited_for = np.zeros_like(wait_times_s)
    np.put_along_axis(waited_for, order, charged, axis=1)
    return (wait_times_s - communication[:, None]).sum(0), waited_for.sum(0), communication
