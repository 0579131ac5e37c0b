"""A script that sums gradients by hand, all in one call, with no optimizer of Horovod's."""

import horovod.torch as hvd
import torch
from torch.nn import functional

hvd.init()
torch.manual_seed(1)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for step in range(30):
    inputs, labels = torch.randn(8, 16), torch.randint(4, (8,))
    optimizer.zero_grad()
    functional.cross_entropy(model(inputs), labels).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    handle = hvd.grouped_allreduce_async_(gradients, op=hvd.Average, name=f"step.{step}")
    hvd.synchronize(handle)
    optimizer.step()
print("trained")
