"""On every rank: a LightningModule with Trainer alone, in several ways. usage: OUT_FOLDER.

Alone: resume what the ranks have saved there."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import lightning
import torch
from frameworks.net import BATCH_SIZE, Samples
from frameworks.torch_task import network
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional
from torch.utils.data import DataLoader

from horovod_train.plugins.lightning import HorovodStrategy

out = Path(sys.argv[1])
NUM_SAMPLES = 48
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(lightning.LightningModule):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.net = network()
        self.lr = lr
        self.seen = []
        self.sums_per_batch = []

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)

    def training_step(self, batch, batch_idx):
        x, y, index = batch
        self.seen.append(index.tolist())
        self.log("rank", float(self.global_rank), sync_dist=True, on_step=False, on_epoch=True)
        return functional.cross_entropy(self.net(x).float(), y)

    def on_train_batch_start(self, batch, batch_idx):
        count_sums()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.sums_per_batch.append(count_sums())


class Indexed(Samples):
    def __getitem__(self, index):
        return (*super().__getitem__(index), index)


begun = []


def count_sums() -> int:
    """How many collectives were begun since the last call."""
    found = len(begun)
    begun.clear()
    return found


def count_collectives(hvd) -> None:
    def counted(name, inner):
        def call(*args, **kwargs):
            begun.append(name)
            return inner(*args, **kwargs)

        return call

    for name in dir(hvd):
        if name.startswith(("allreduce", "grouped_allreduce", "allgather")):
            setattr(hvd, name, counted(name, getattr(hvd, name)))


def train(strategy, lr=0.05, epochs=3, ckpt_path=None, **settings):
    module = Module(lr)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(rank)  # a module that draws its weights on each rank
    trainer = lightning.Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=True,
        default_root_dir=out / "lightning",
        **{"enable_checkpointing": False, **settings},
    )
    trainer.fit(module, DataLoader(Indexed(NUM_SAMPLES, 1), BATCH_SIZE, num_workers=0), ckpt_path=ckpt_path)
    w1, b1, w2, b2 = (p.detach().double().numpy() for p in module.net.parameters())
    return {
        "weights": [array.ravel().tolist() for array in (w1.T, b1, w2.T, b2)],
        "seen": module.seen,
        "sums_per_batch": module.sums_per_batch,
        "logged": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "strategy": type(trainer.strategy).__name__,
        "steps": trainer.global_step,
    }


strategy = HorovodStrategy()
rank, world = strategy.world.rank, strategy.world
scaled = {"scale_learning_rate": "linear", "world": world}
saved = out / "saved by 0" / "epoch-1.ckpt"
if world.size == 1:
    found = {"resumed": train(HorovodStrategy(**scaled), 0.01, ckpt_path=saved)}
else:
    count_collectives(world.hvd)
    found = {
        "by object": train(strategy),
        "by name": train("horovod"),
        "accumulation, clipping": train("horovod", accumulate_grad_batches=3, gradient_clip_val=0.3),
        "bf16": train("horovod", precision="bf16-mixed"),
    }
    saving = ModelCheckpoint(dirpath=out / f"saved by {rank}", filename="epoch-1")
    train(HorovodStrategy(**scaled), 0.01, epochs=1, enable_checkpointing=True, callbacks=[saving])
    found["resumed"] = train(HorovodStrategy(**scaled), 0.01, ckpt_path=saved)
    found["undisturbed"] = train(HorovodStrategy(**scaled), 0.01)
(out / f"rank-{rank}.json").write_text(json.dumps(found))
world.close()
