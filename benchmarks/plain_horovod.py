"""The hand-written loop: what a careful user writes with Horovod alone. usage: MODEL STEPS."""

import sys

import horovod.torch as hvd
import torch
from models import MODELS
from torch.utils.data import DataLoader, DistributedSampler

hvd.init()
torch.manual_seed(0)
task = MODELS[sys.argv[1]]()
num_steps = int(sys.argv[2])
model = task.model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
dataset = task.train_data()
sampler = DistributedSampler(dataset, hvd.size(), hvd.rank())
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
