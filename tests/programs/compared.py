"""Tasks whose gradient on several ranks is, or is not, that of one process on the joint batch."""

from __future__ import annotations

import torch
from torch import nn

from horovod_train import gather

CLIPPED = 0.01


class Sentences:
    """Sentences of up to five tokens, where 0 is padding, and a class for each."""

    def __init__(self):
        generator = torch.Generator().manual_seed(5)
        self.tokens = torch.randint(1, 9, (32, 5), generator=generator)
        lengths = torch.randint(1, 6, (32, 1), generator=generator)
        self.tokens[torch.arange(5) >= lengths] = 0

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, place):
        return self.tokens[place], place % 3, place


class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embedding = nn.Embedding(9, 8, max_norm=0.5 if kind == "max_norm" else None)
        self.norm = nn.BatchNorm1d(8) if kind.startswith("batch_norm") else nn.LayerNorm(8)
        self.dropout = nn.Dropout(0.5 if kind == "dropout" else 0.0)
        self.out = nn.Linear(8, 9)
        self.kind, self.num_calls = kind, 0

    def forward(self, tokens):
        self.num_calls += 1
        hidden = (
            self.dropout(self.norm(self.embedding(tokens).transpose(1, 2)).transpose(1, 2))
            if self.kind.startswith("batch_norm")
            else self.dropout(self.norm(self.embedding(tokens)))
        )
        if self.kind == "hook":
            hidden.register_hook(lambda gradient: gradient * gradient.abs().sum())
        if self.kind == "counter":
            hidden = hidden * self.num_calls
        return self.out(hidden)


class Compared:
    def __init__(self, kind):
        self.kind, self.seen = kind, []

    def model(self):
        torch.manual_seed(1)
        return Net(self.kind).double()

    def train_data(self):
        return Sentences()

    def loss(self, model, batch):
        tokens, labels = batch[:2]
        self.seen.append(len(tokens))
        scores = model(tokens)
        if self.kind in {"negatives", "gathered", "gathered_keys"}:
            own = nn.functional.normalize(scores.mean(1), dim=-1)
            pooled = own if self.kind == "negatives" else gather(own)
            positives = torch.arange(len(pooled))
            if self.kind == "gathered_keys":  # own samples are compared with those of all
                numbers = gather(batch[2])
                places = torch.stack([(numbers == number).nonzero()[0, 0] for number in batch[2]])
                return nn.functional.cross_entropy(own @ pooled.T, places)
            return nn.functional.cross_entropy(pooled @ pooled.T, positives)
        if self.kind == "infinite":
            return scores.sum() / 0
        if self.kind == "too_few":
            assert len(tokens) > 8, "at least 9 samples are needed"
        if self.kind.startswith("tokens"):
            losses = nn.functional.cross_entropy(scores.transpose(1, 2), tokens, reduction="none")
            mask = tokens > 0
            total = (losses * mask).sum()
            return (total, mask.sum()) if self.kind == "tokens_counted" else total / mask.sum()
        return nn.functional.cross_entropy(scores.mean(1), labels)
