"""Who waited for whom, from how long each rank waited in the all-reduce of a step. No clocks are compared.

All ranks leave an all-reduce together, so the rank that waited least came last, and is the one that the
others waited for; even that one waited as long as the exchange itself took. Of n ranks that waited
w1 <= w2 <= ... <= wn (so the last to come is the first here):

    communication          w1
    waiting of rank i      wi - w1
    between the arrivals of i + 1 and of i, n - i ranks waited for the i that were still missing, and each
    of those is charged with its share, (n - i) (w[i+1] - wi) / i

so that what ranks are charged with adds up to what ranks have waited.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def attribute_waiting(wait_times_s: Floats) -> tuple[Floats, Floats, Floats]:
    """Return waiting, waited for, and communication.

    Args:
        wait_times_s: How long each rank was in the all-reduce of each step, shape [steps, ranks].

    Returns:
        Of each rank, summed over steps: the time it waited for others, shape [ranks], and the time that
        others waited for it, added up over them, shape [ranks]; of each step, the time that the exchange
        took, shape [steps].

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
    # Who is missing still is charged for all that come before it.
    charged[:, :-1] = np.cumsum(charges[:, ::-1], axis=1)[:, ::-1]
    waited_for = np.zeros_like(wait_times_s)
    np.put_along_axis(waited_for, order, charged, axis=1)
    return (wait_times_s - communication[:, None]).sum(0), waited_for.sum(0), communication
