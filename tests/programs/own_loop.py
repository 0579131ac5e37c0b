"""A user's own loop with the library, trained, saved, resumed.

usage: OUT CHECKPOINTS EPOCHS PORT [stop | leave | STRATEGY]
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import urllib.request
from pathlib import Path

import torch
from cases import NUM_SAMPLES, Net, data
from torch.nn import functional
from torch.utils.data import TensorDataset

import horovod_train as ht

out, folder, epochs = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
torch.set_num_threads(1)
modes = {"stop", "leave"}
strategy = next((each for each in sys.argv[5:] if each not in modes), "allreduce")
with ht.init("own-loop", strategy=strategy) as session:
    torch.manual_seed(7)
    model = Net(partly_used=True).to(session.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    replica = session.prepare(model, optimizer, clip_grad_norm=0.5, bucket_size_mib=0.001)
    loader = session.loader(
        TensorDataset(*data(NUM_SAMPLES, 1)), batch_size=4, accumulation_steps=2, shuffle=False
    )
    policy = session.learning_rate(
        loader, epochs=epochs, base_lr=0.05, reference_batch_size=8, scaling="none"
    )
    metrics = session.metrics(port=int(sys.argv[4]))
    checkpoints = session.checkpoints(folder, replica, loader)
    preemption = session.preemption(checkpoints)
    resumed = checkpoints.resume()
    steps = 0
    for epoch in range(loader.progress.epoch, epochs):
        for step in loader.epoch(epoch, replica):
            for inputs, labels in step:
                step.backward(functional.cross_entropy(model(inputs), labels))
            lr = policy.at(loader.epochs_passed)
            outcome = step.finish(lr=lr)
            steps += 1
            if loader.progress.step == 6 and sys.argv[5:] == ["stop"]:
                checkpoints.save(wait=True)
                sys.exit(0)
            if loader.progress.step == 6 and sys.argv[5:] == ["leave"] and session.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if sys.argv[5:] == ["leave"]:
                time.sleep(0.3)  # ranks agree about twice a second
            preemption.after_step()
    correct = total = 0
    model.eval()
    for inputs, labels in session.eval_batches(replica, TensorDataset(*data(23, 2)), batch_size=4):
        correct += int((model(inputs).argmax(1) == labels).sum())
        total += len(labels)
    scraped = urllib.request.urlopen(f"http://{metrics.address}/metrics", timeout=5).read().decode()
    (out / f"rank-{session.rank}.json").write_text(
        json.dumps(
            {
                "resumed": resumed,
                "steps": steps,
                "weights": torch.cat([p.detach().double().flatten() for p in model.parameters()]).tolist(),
                "accuracy": session.mean({"accuracy": (correct, total)})["accuracy"],
                "has_metrics": f'rank="{session.rank}"' in scraped,
            }
        )
    )
