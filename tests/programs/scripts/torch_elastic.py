"""A script with Horovod's elastic loop, in a world that does not change."""

import horovod.torch as hvd
import torch
from torch.nn import functional

hvd.init()
torch.manual_seed(1)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


@hvd.elastic.run
def train(state):
    while state.batch < 30:
        inputs, labels = torch.randn(8, 16), torch.randint(4, (8,))
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        state.batch += 1
        if state.batch % 10 == 0:
            state.commit()


train(hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0))
print("trained")
