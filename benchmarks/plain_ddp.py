"""The same loop with DistributedDataParallel over Gloo, tuned. usage: MODEL STEPS BUCKET_MB."""

import sys

import torch
import torch.distributed as dist
from models import MODELS
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(0)
task = MODELS[sys.argv[1]]()
num_steps = int(sys.argv[2])
model = DistributedDataParallel(
    task.model(), bucket_cap_mb=float(sys.argv[3]), gradient_as_bucket_view=True, static_graph=True
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * dist.get_world_size(), momentum=0.9)
dataset = task.train_data()
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=task.batch_size, sampler=sampler)
step = epoch = 0
model.train()
while step < num_steps:
    sampler.set_epoch(epoch)
    for batch in loader:
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        loss.item()
        step += 1
        if step == num_steps:
            break
    epoch += 1
dist.barrier()  # Gloo aborts when a rank leaves while the other is still in its last exchange
dist.destroy_process_group()
