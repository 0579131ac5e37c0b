"""How often ranks without work ask each other for some. usage: OUT_FOLDER."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch

SECONDS = 2.0

hvd.init()
folder = Path(sys.argv[1])
timeline = folder / "timeline.json"
hvd.allreduce(torch.ones(1), name="work")
if hvd.rank() == 0:
    hvd.start_timeline(str(timeline), mark_cycles=True)
time.sleep(SECONDS)
if hvd.rank() == 0:
    hvd.stop_timeline()
    time.sleep(0.5)  # it is written by a thread of its own
    (folder / "rank-0.json").write_text(json.dumps(timeline.read_text().count("CYCLE_START") / SECONDS))
hvd.shutdown()
