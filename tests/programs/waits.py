"""How much of a processor a rank takes that waits for one that is stopped. usage: OUT_FOLDER."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import horovod.torch as hvd

SECONDS = 2.0

hvd.init()
pids = hvd.allgather_object(os.getpid())
if hvd.rank() == 0:
    os.kill(pids[1], signal.SIGSTOP)
    begun = time.process_time()
    time.sleep(SECONDS)
    share = (time.process_time() - begun) / SECONDS
    os.kill(pids[1], signal.SIGCONT)
    (Path(sys.argv[1]) / "rank-0.json").write_text(json.dumps(share))
hvd.shutdown()
