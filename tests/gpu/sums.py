"""Two ranks, one GPU: what their sum is. usage: sums.py DTYPE FILE"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import horovod.torch as hvd
import torch

hvd.init()
os.environ["NCCL_HOSTID"] = f"{socket.gethostname()}-{hvd.local_rank()}"
os.environ["NCCL_SOCKET_IFNAME"] = "lo"
torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
mine = torch.full((2,), 1.0 + hvd.rank(), dtype=getattr(torch, sys.argv[1]), device="cuda")
total = hvd.allreduce(mine, op=hvd.Sum, name="sum")
if hvd.rank() == 0:
    Path(sys.argv[2]).write_text(json.dumps(total.float().tolist()))
hvd.shutdown()
