"""A LightningModule on any number of ranks.  usage: lightning_module.py [BATCH_SIZE_PER_RANK]."""

import sys

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Subset, TensorDataset

from horovod_train.plugins.lightning import HorovodStrategy


class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch, batch_idx):
        return functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.002 * batch_size, momentum=0.9)


batch_size = int(sys.argv[1]) if len(sys.argv) > 1 else 32
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
train, test = Subset(data, range(1536)), Subset(data, range(1536, 1796))
lightning.seed_everything(0)
module, strategy = Digits(), HorovodStrategy(scale_learning_rate="linear")
trainer = lightning.Trainer(strategy=strategy, accelerator="cpu", max_epochs=5, logger=False)
trainer.fit(module, DataLoader(train, batch_size, shuffle=True), DataLoader(test, 64))
accuracy = float(trainer.callback_metrics["accuracy"])
print(f"rank {trainer.global_rank} of {trainer.world_size}: accuracy {accuracy:.3f}", flush=True)
print(f"weights {sum(float(p.abs().sum()) for p in module.parameters()):.4f}", flush=True)
