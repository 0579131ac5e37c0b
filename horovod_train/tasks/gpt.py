"""A byte-level language model of configurable size, trained on the sources of Python's standard library."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 256


class Attention(nn.Module):
    """Causal self-attention; the number of heads depends on the shape, so that ranks can shard heads."""

    def __init__(self, width: int, head_width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self._head_width = head_width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the attention output of each position, shape [batch, length, width]."""
        q, k, v = (
            each(x).unflatten(-1, (-1, self._head_width)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        found: torch.Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return found


class Block(nn.Module):
    """Attention and a feed-forward layer, each with a residual connection."""

    def __init__(self, width: int, head_width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, head_width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the activations, shape [batch, length, width]."""
        x = x + self.attention(self.norm1(x))
        found: torch.Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return found


class GptModel(nn.Module):
    """Decoder with the architecture of GPT-2, for bytes."""

    # Sharding over the ranks of a tensor axis, in the notation of Transformers.
    _tp_plan = {  # noqa: RUF012
        **{f"blocks.*.attention.{name}": "colwise" for name in "qkv"},
        "blocks.*.attention.o": "rowwise",
        "blocks.*.up": "colwise",
        "blocks.*.down": "rowwise",
    }

    def __init__(self, layers: int, width: int, head_width: int, length: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, head_width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next byte at each position, shape [batch, length, 256]."""
        x = self.bytes(text) + self.places.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        found: torch.Tensor = self.head(self.norm(x))
        return found


class Gpt:
    """Language modeling of Python source code.

    Args:
        layers: Number of blocks of the model.
        width: Width of activations; a block has about 12 x width^2 parameters.
        head_width: Width of an attention head; must divide ``width``.
        length: Bytes of a sample.
        num_samples: Number of training samples.
    """

    def __init__(
        self,
        layers: int = 4,
        width: int = 128,
        head_width: int = 32,
        length: int = 128,
        num_samples: int = 4096,
    ) -> None:
        self._sizes = layers, width, head_width, length
        self._length = length
        self._num_samples = num_samples

    def model(self) -> GptModel:
        """Return a new model."""
        return GptModel(*self._sizes)

    def train_data(self) -> _Windows:
        """Return the training samples, the first windows of the sources."""
        return _Windows(self._length, 0, self._num_samples)

    def eval_data(self) -> _Windows:
        """Return the evaluation samples, the next windows; an eighth as many."""
        return _Windows(self._length, self._num_samples, max(1, self._num_samples // 8))

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy over bytes, shape []."""
        scores = model(batch[:, :-1])
        return functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())

    def metrics(self, model: nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the mean cross entropy of each sample, shape [batch]."""
        scores = model(batch[:, :-1])
        each = functional.cross_entropy(scores.transpose(1, 2), batch[:, 1:], reduction="none")
        return {"loss": each.mean(1)}


class _Windows:
    """Dataset of consecutive windows of ``length`` + 1 bytes."""

    def __init__(self, length: int, first: int, number: int) -> None:
        begin, end = first * length, (first + number) * length + 1
        self._bytes = torch.frombuffer(bytearray(_source(end)[begin:end]), dtype=torch.uint8)
        self._length = length
        self._number = number

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> Any:
        begin = index * self._length
        return self._bytes[begin : begin + self._length + 1].long()


def _source(num_bytes: int) -> bytes:
    """Return at least this many bytes of the standard library's sources, repeated if there are fewer."""
    text = b""
    for path in sorted(Path(os.__file__).parent.rglob("*.py")):
        if len(text) >= num_bytes:
            return text
        if "site-packages" not in path.parts:
            text += path.read_bytes()
    return text * -(-num_bytes // len(text))
