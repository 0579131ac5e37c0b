"""Stock models of Transformers that accept num_items_in_batch, and ignore it."""

from __future__ import annotations

import numpy as np
import transformers


class Texts:
    def __init__(self, kind):
        self.kind = kind
        numbers = np.random.RandomState(5)
        self.tokens = numbers.randint(0, 20, (29, 6))
        self.labels = numbers.randint(0, 3, (29, 6))
        self.lengths = numbers.randint(1, 7, 29)

    def __len__(self):
        return 29

    def __getitem__(self, index):
        labels = np.where(np.arange(6) < self.lengths[index], self.labels[index], -100)
        found = self.labels[index, 0] if self.kind == "sequences" else labels
        return {"input_ids": self.tokens[index], "labels": found}


class Bert:
    def __init__(self, kind):
        self.kind = kind

    def model(self):
        transformers.set_seed(3)
        config = transformers.BertConfig(
            vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
            max_position_embeddings=8, num_labels=3, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        kinds = {
            "sequences": transformers.BertForSequenceClassification,
            "tokens": transformers.BertForTokenClassification,
        }
        return kinds[self.kind](config)

    def train_data(self):
        return Texts(self.kind)
