"""Two tests at a time, and never two that compute: ``pytest -n 2`` (pytest-xdist).

Most tests that start ranks wait for much of their time: for imports, for a host that stays away, for a
signal. Tests on pools of ranks compute. So one worker takes the pools, one after the other, and then helps
with everything else, which the others have begun.
"""

from __future__ import annotations

from pathlib import PurePath

from xdist.scheduler import LoadScopeScheduling

from support.matrix import COLUMNS
from support.pools import CONTROLLERS

# Their cases begin with the name of the framework whose pool they use; without one, they use torch's.
ON_POOLS = (
    *("test_batch_equality", "test_every_framework", "test_every_framework_recovers", "test_examples"),
    *("test_keras", "test_library", "test_lightning", "test_stock_scripts", "test_strategies", "test_vit"),
)
POOL = "pools of "


def pool_of(item):
    """The pool that a test uses, as what it is sorted by; those that use none come first."""
    if "pools" not in item.fixturenames:
        return ()
    assert item.path.stem in ON_POOLS
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    framework = next((v for v in values if isinstance(v, str) and v in COLUMNS), "torch")
    world = next((v for v in values if isinstance(v, tuple)), (2, CONTROLLERS[framework]))
    return list(COLUMNS).index(framework), *world


class Lanes(LoadScopeScheduling):
    """Hands groups of tests to workers: pools to the first one only."""

    def __init__(self, config, log):
        config.option.loadscopereorder = False  # what starts ranks comes before unit tests, which fill gaps
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        """Return the group of a test: all that use a framework's pools, or all of a file."""
        path, _, test = nodeid.partition("::")
        if (file := PurePath(path).stem) not in ON_POOLS:
            return file
        case = test.partition("[")[2]
        return POOL + next((name for name in COLUMNS if case.startswith(name)), "torch")

    def _assign_work_unit(self, node):
        """Give a worker the next group of its lane; nothing if there is none."""
        is_first = node is self.nodes[0]
        groups = sorted(self.workqueue, key=lambda group: not group.startswith(POOL))
        mine = groups if is_first else [group for group in groups if not group.startswith(POOL)]
        if mine:
            self.workqueue.move_to_end(mine[0], last=False)
            super()._assign_work_unit(node)
