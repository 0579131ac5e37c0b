"""A Transformers Trainer on any number of ranks.  usage: transformers_trainer.py [BATCH_SIZE_PER_RANK]."""

import sys

import torch
from sklearn.datasets import load_digits
from transformers import TrainingArguments, ViTConfig, ViTForImageClassification, set_seed

from horovod_train.plugins.transformers import HorovodTrainer, init

ranks = init()  # before TrainingArguments
batch_size = int(sys.argv[1]) if len(sys.argv) > 1 else 32
images, labels = load_digits(return_X_y=True)
pixels = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8)
data = [{"pixel_values": p, "labels": int(label)} for p, label in zip(pixels, labels, strict=True)]
set_seed(0)
model = ViTForImageClassification(
    ViTConfig(
        image_size=8, patch_size=2, num_channels=1, num_labels=10, hidden_size=64, num_hidden_layers=2,
        num_attention_heads=4, intermediate_size=96, hidden_dropout_prob=0.0,
    )
)  # fmt: skip
args = TrainingArguments(
    output_dir=sys.argv[2] if len(sys.argv) > 2 else "vit-digits",
    per_device_train_batch_size=batch_size,
    learning_rate=3e-5 * batch_size * ranks.size,
    warmup_steps=30,
    num_train_epochs=12,
    use_cpu=True,
    disable_tqdm=True,
    report_to=[],
)
trainer = HorovodTrainer(
    model=model, args=args, train_dataset=data[:1500], eval_dataset=data[1500:],
    compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(1) == p.label_ids).mean())},
)  # fmt: skip
trainer.train()
print(f"rank {ranks.rank} of {ranks.size}: accuracy {trainer.evaluate()['eval_accuracy']:.3f}", flush=True)
print(f"weights {sum(float(p.abs().sum()) for p in model.parameters()):.4f}", flush=True)
