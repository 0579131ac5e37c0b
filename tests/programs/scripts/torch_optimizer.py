"""A script in the style of Horovod's documentation: DistributedOptimizer around a loop of one's own."""

import argparse
import signal
import sys
import time

import horovod.torch as hvd
import torch
from torch.nn import functional

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--passes", type=int, default=1)
parser.add_argument("--slow-rank", type=int, default=-1)
parser.add_argument("--end", default="")
parser.add_argument("--save", default="")
args = parser.parse_args()


def save_and_leave(*_):
    print("saved by the script itself", flush=True)
    sys.exit(75)


if args.save:
    signal.signal(signal.SIGTERM, save_and_leave)
hvd.init()
torch.manual_seed(1)
torch.set_num_threads(1)
data = torch.utils.data.TensorDataset(torch.randn(4096, 16), torch.randint(4, (4096,)))
sampler = torch.utils.data.distributed.DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
loader = torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.9)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=args.passes
)

batches = iter(loader)
for step in range(args.steps):
    optimizer.zero_grad()
    for _ in range(args.passes):
        try:
            inputs, labels = next(batches)
        except StopIteration:
            batches = iter(loader)
            inputs, labels = next(batches)
        loss = functional.cross_entropy(model(inputs), labels)
        if hvd.rank() == args.slow_rank:
            time.sleep(0.03)
        loss.backward()
    optimizer.step()
    time.sleep(0.005)
    if step == args.steps // 2 and args.end == "raise":
        raise ValueError("label 11 is out of range")
    if step == args.steps // 2 and args.end.startswith("exit"):
        raise SystemExit(int(args.end.removeprefix("exit")))
print("trained to", loss.item(), "on", hvd.size(), __name__)
