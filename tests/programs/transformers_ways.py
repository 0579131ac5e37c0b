"""On every rank: a small language model with HorovodTrainer, in several ways. usage: OUT_FOLDER."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from language import EPOCHS, GLOBAL_BATCH, LR, Texts, model, tensors
from transformers import TrainerCallback, TrainingArguments

from horovod_train.plugins.transformers import HorovodTrainer, init

out = Path(sys.argv[1])
torch.set_num_threads(1)
ranks = init()


class Stop(TrainerCallback):
    """Ends training after so many steps."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = control.should_training_stop or state.global_step == self.step


def train(*, accumulation=1, stop_at=0, resume=False, save_steps=0, folder="unused"):
    seen: list[list[int]] = []

    def collate(samples):
        seen.append([int(sample["number"]) for sample in samples])
        return tensors(samples)

    args = TrainingArguments(
        output_dir=str(out / folder),
        per_device_train_batch_size=GLOBAL_BATCH // ranks.size,
        gradient_accumulation_steps=accumulation,
        learning_rate=LR,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        num_train_epochs=EPOCHS,
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
        report_to=[],
        logging_strategy="epoch",
        save_strategy="steps" if save_steps else "no",
        save_steps=save_steps or 500,
    )
    own = model()
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.add_(ranks.rank)  # a model that draws its weights on each rank
    trainer = HorovodTrainer(
        model=own,
        args=args,
        train_dataset=Texts(),
        data_collator=collate,
        callbacks=[Stop(stop_at)] if stop_at else [],
    )
    trainer.train(resume_from_checkpoint=resume or None)
    return {
        "weights": [p.detach().double().flatten().tolist() for p in trainer.model.parameters()],
        "seen": seen,
        "logged": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "should_save": args.should_save,
        "steps": trainer.state.global_step,
    }


found = {"plain": train(), "accumulation": train(accumulation=2)}
if ranks.size > 1:
    train(stop_at=9, save_steps=4, folder="shared")
    found["resumed"] = train(resume=True, folder="shared")
    train(stop_at=4, save_steps=4, folder=f"saved by {ranks.rank}")
(out / f"rank-{ranks.rank}.json").write_text(json.dumps(found))
ranks.close()
