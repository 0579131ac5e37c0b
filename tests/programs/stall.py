"""Rank 0 waits in a collective that rank 1 does not join for a long time."""

import time

import horovod.torch as hvd
import torch

hvd.init()
if hvd.rank() == 1:
    time.sleep(200)
hvd.allreduce(torch.ones(1), name="only_on_rank_0")
