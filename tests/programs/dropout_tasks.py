"""Tasks with dropout and evaluations: do evaluations draw from the generators of the training?"""

from __future__ import annotations

import random

import numpy as np


class Numbers:
    def __init__(self, num_samples, seed):
        numbers = np.random.RandomState(seed)
        self.x = numbers.randn(num_samples, 6).astype(np.float32)
        self.y = (self.x.sum(1) > 0).astype(np.int64)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Named(Numbers):
    def __getitem__(self, index):
        return {"x": self.x[index], "labels": self.y[index]}


class OfTorch:
    def model(self):
        import torch
        from torch import nn

        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.Linear(16, 2))

    def loss(self, model, batch):
        from torch import nn

        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model, batch):
        import torch
        from torch import nn

        noise = torch.randn_like(batch[0]) * random.random() * np.random.rand()  # of all generators
        return {"loss": nn.functional.cross_entropy(model(batch[0] + noise), batch[1])}

    def train_data(self):
        return Numbers(40, 0)

    def eval_data(self):
        return Numbers(30, 1)


class OfTransformers:
    def model(self):
        import torch
        from torch import nn

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.net = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.Linear(16, 2))

            def forward(self, x, labels):
                logits = self.net(x)
                return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

        torch.manual_seed(0)
        return Net()

    def train_data(self):
        return Named(40, 0)

    def eval_data(self):
        return Named(30, 1)


class OfLightning:
    def model(self):
        import lightning
        import torch
        from torch import nn

        class Module(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.net = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.Linear(16, 2))

            def training_step(self, batch, batch_idx):
                return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

            def validation_step(self, batch, batch_idx):
                noise = torch.randn_like(batch[0])  # a metric that draws
                self.log("loss", nn.functional.cross_entropy(self.net(batch[0] + noise), batch[1]))

            def on_train_batch_end(self, outputs, batch, batch_idx):
                with torch.no_grad():  # after all callbacks
                    self.net[0].weight.clamp_(-0.3, 0.3)

        torch.manual_seed(0)
        return Module()

    def train_data(self):
        return Numbers(40, 0)

    def eval_data(self):
        return Numbers(30, 1)


class OfKeras:
    def model(self):
        import keras

        layers = keras.layers
        return keras.Sequential([keras.Input((6,)), layers.Dense(16), layers.Dropout(0.3), layers.Dense(2)])

    def compile(self):
        import keras

        return {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}

    def train_data(self):
        return Numbers(40, 0)

    def eval_data(self):
        return Numbers(30, 1)
