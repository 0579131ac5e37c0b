"""A small language model, its sentences, and its training without a Trainer."""

from __future__ import annotations

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

NUM_SAMPLES, GLOBAL_BATCH, LR, NUM_WORDS, LENGTH, EPOCHS = 26, 4, 0.5, 11, 6, 2


class Texts:
    """Sentences of 2 to 6 words; what is behind the end counts for nothing."""

    def __init__(self) -> None:
        random = np.random.default_rng(3)
        self.words = random.integers(0, NUM_WORDS, (NUM_SAMPLES, LENGTH))
        self.lengths = random.integers(2, LENGTH + 1, NUM_SAMPLES)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int):
        return {"number": index, "words": self.words[index], "length": self.lengths[index]}


def model():
    set_seed(1)
    config = LlamaConfig(
        vocab_size=NUM_WORDS,
        max_position_embeddings=LENGTH,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def tensors(samples):
    words = torch.tensor(np.stack([sample["words"] for sample in samples]))
    lengths = torch.tensor([int(sample["length"]) for sample in samples])
    behind = torch.arange(LENGTH)[None] >= lengths[:, None]
    return {"input_ids": words, "labels": words.masked_fill(behind, -100)}


def step_by_step(steps):
    """One process that sees each joint batch at once: weights and loss of each step.

    Args:
        steps: Numbers of the samples of each step.
    """
    net, texts, losses = model(), Texts(), []
    net.train()
    for numbers in steps:
        batch = tensors([texts[number] for number in numbers])
        logits = net(input_ids=batch["input_ids"]).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits.reshape(-1, NUM_WORDS), batch["labels"][:, 1:].reshape(-1), ignore_index=-100
        )
        net.zero_grad()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.sub_(LR * parameter.grad)
    return [p.detach().double().flatten().tolist() for p in net.parameters()], losses
