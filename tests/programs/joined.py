"""A loop of the user's own around an adapter's world, in which ranks meet all the time.

usage: FOLDER WARNING_S SHUTDOWN_S
"""

from __future__ import annotations

import sys
from pathlib import Path

from horovod_train.config.schema import Health, Job
from horovod_train.frameworks.devices import join
from horovod_train.frameworks.torch.comm.collectives import TorchCommunicator

folder, warning_s, shutdown_s = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
health = Health(stall_warning_s=warning_s, stall_shutdown_s=shutdown_s)
world = join(TorchCommunicator, Job(name="own", task="own:Loop", health=health))
(folder / f"rank-{world.rank}.txt").write_text("here")
while True:
    world.allreduce_sum([1.0])
