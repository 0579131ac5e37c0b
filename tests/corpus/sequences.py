"""Recurrent networks and kinds of attention: t is a sequence of five tokens."""

from __future__ import annotations

import math

from corpus.base import Case, F, case_of, nn, torch


@case_of
class BiLstm(nn.Module):
    """two directions and two layers; the last states are joined"""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(20, 6)
        self.rnn = nn.LSTM(6, 5, 2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(10, 4)

    def forward(self, x, t):
        _, (h, _) = self.rnn(self.emb(t))
        return self.out(torch.cat([h[-2], h[-1]], 1))


@case_of
class GruCell(nn.Module):
    """a cell that a loop calls for each token"""

    def __init__(self):
        super().__init__()
        self.emb, self.cell, self.out = nn.Embedding(20, 6), nn.GRUCell(6, 8), nn.Linear(8, 4)
        self.first = nn.Parameter(torch.randn(8))

    def forward(self, x, t):
        h = self.first.expand(len(t), -1)
        for token in self.emb(t).unbind(1):
            h = self.cell(token, h)
        return self.out(h)


class Packed(Case):
    """sequences of different lengths, packed"""

    def net(self):
        class M(nn.Module):
            def __init__(self):
                super().__init__()
                self.emb, self.rnn = nn.Embedding(20, 6), nn.GRU(6, 8, batch_first=True)
                self.out = nn.Linear(8, 4)

            def forward(self, t, lengths):
                packed = nn.utils.rnn.pack_padded_sequence(
                    self.emb(t), lengths.cpu(), batch_first=True, enforce_sorted=False
                )
                return self.out(self.rnn(packed)[1][-1])

        return M()

    def loss(self, model, batch):
        _, t, lengths, y, _ = batch
        return F.cross_entropy(model(t, lengths), y)


class CausalAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.register_buffer("mask", torch.ones(5, 5, dtype=torch.bool).tril(), persistent=False)

    def forward(self, h):
        b, n, w = h.shape
        q, k, v = self.qkv(self.norm(h)).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2) / math.sqrt(w // self.heads)).masked_fill(~self.mask, -torch.inf)
        return h + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, w))


class CausalLm(Case):
    """a decoder that predicts each next token; its mask is a buffer that is not saved"""

    def net(self):
        class M(nn.Module):
            def __init__(self):
                super().__init__()
                self.emb, self.pos = nn.Embedding(20, 8), nn.Embedding(5, 8)
                self.layers = nn.ModuleList([CausalAttention(8, 2) for _ in range(3)])
                self.head = nn.Linear(8, 20)

            def forward(self, t):
                h = self.emb(t) + self.pos(torch.arange(t.shape[1], device=t.device))
                for layer in self.layers:
                    h = layer(h)
                return self.head(h)

        return M()

    def loss(self, model, batch):
        t = batch[1]
        return F.cross_entropy(model(t)[:, :-1].flatten(0, 1), t[:, 1:].flatten())


@case_of
class Sdpa(nn.Module):
    """PyTorch's scaled dot-product attention, with grouped queries"""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(20, 8)
        self.q, self.kv = nn.Linear(8, 8), nn.Linear(8, 8)
        self.out = nn.Linear(8, 4)

    def forward(self, x, t):
        h = self.emb(t)
        q = self.q(h).view(len(t), 5, 4, 2).transpose(1, 2)
        k, v = self.kv(h).view(len(t), 5, 2, 2, 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2).mean(1))


@case_of
class Rotary(nn.Module):
    """rotary positions from a table that is computed in forward"""

    def __init__(self):
        super().__init__()
        self.emb, self.q, self.k = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.out = nn.Linear(8, 4)

    def turned(self, h):
        angles = torch.outer(torch.arange(5, dtype=h.dtype), 10 ** -torch.arange(4, dtype=h.dtype))
        even, odd = h[..., ::2], h[..., 1::2]
        return torch.cat(
            [even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()], -1
        )

    def forward(self, x, t):
        h = self.emb(t)
        weights = (self.turned(self.q(h)) @ self.turned(self.k(h)).transpose(1, 2)).softmax(-1)
        return self.out((weights @ h).mean(1))


@case_of
class RelativeBias(nn.Module):
    """a learned bias for each distance between tokens"""

    def __init__(self):
        super().__init__()
        self.emb, self.q, self.k = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.bias = nn.Embedding(9, 1)
        self.out = nn.Linear(8, 4)
        places = torch.arange(5)
        self.register_buffer("distances", places[:, None] - places + 4)

    def forward(self, x, t):
        h = self.emb(t)
        scores = self.q(h) @ self.k(h).transpose(1, 2) + self.bias(self.distances).squeeze(-1)
        return self.out((scores.softmax(-1) @ h).mean(1))


@case_of
class Seq2Seq(nn.Module):
    """an encoder and a decoder of PyTorch's transformer, with a mask"""

    def __init__(self):
        super().__init__()
        self.emb, self.start = nn.Embedding(20, 8), nn.Parameter(torch.randn(1, 2, 8))
        self.body = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
        self.out = nn.Linear(8, 4)

    def forward(self, x, t):
        mask = self.body.generate_square_subsequent_mask(2, dtype=x.dtype)
        return self.out(self.body(self.emb(t), self.start.expand(len(t), -1, -1), tgt_mask=mask)[:, -1])


@case_of
class CrossAttention(nn.Module):
    """learned queries look at tokens; the padding is masked"""

    def __init__(self):
        super().__init__()
        self.emb, self.queries = nn.Embedding(20, 8, padding_idx=0), nn.Parameter(torch.randn(2, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(16, 4)

    def forward(self, x, t):
        is_padding = (t == 0) & (torch.arange(5, device=t.device) > 0)
        h = self.emb(t)
        queries = self.queries.expand(len(t), -1, -1)
        return self.out(self.attention(queries, h, h, key_padding_mask=is_padding)[0].flatten(1))


@case_of
class StateSpace(nn.Module):
    """a linear recurrence with learned decay, by a loop over time"""

    def __init__(self):
        super().__init__()
        self.emb, self.into, self.gate = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.decay = nn.Parameter(torch.randn(8))
        self.out = nn.Linear(8, 4)

    def forward(self, x, t):
        h = self.emb(t)
        state = torch.zeros_like(h[:, 0])
        for u, g in zip(self.into(h).unbind(1), torch.sigmoid(self.gate(h)).unbind(1), strict=True):
            state = torch.sigmoid(self.decay) * state + g * u
        return self.out(state)


@case_of
class LongConvolution(nn.Module):
    """a convolution as long as the sequence, by Fourier transforms"""

    def __init__(self):
        super().__init__()
        self.emb, self.filter = nn.Embedding(20, 6), nn.Parameter(torch.randn(6, 5))
        self.out = nn.Linear(6, 4)

    def forward(self, x, t):
        h = self.emb(t).transpose(1, 2)
        spectrum = torch.fft.rfft(h, n=10) * torch.fft.rfft(self.filter, n=10)
        return self.out(torch.fft.irfft(spectrum, n=10)[..., 4])


@case_of
class Temporal(nn.Module):
    """dilated causal convolutions over time"""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(20, 6)
        self.convs = nn.ModuleList([nn.Conv1d(6, 6, 2, dilation=2**i) for i in range(2)])
        self.out = nn.Linear(6, 4)

    def forward(self, x, t):
        h = self.emb(t).transpose(1, 2)
        for i, conv in enumerate(self.convs):
            h = h + torch.relu(conv(F.pad(h, (2**i, 0))))
        return self.out(h[..., -1])


class Ctc(Case):
    """connectionist temporal classification, with lengths of inputs"""

    def net(self):
        class M(nn.Module):
            def __init__(self):
                super().__init__()
                self.emb, self.rnn = nn.Embedding(20, 8), nn.GRU(8, 8, batch_first=True)
                self.out = nn.Linear(8, 5)

            def forward(self, t):
                return self.out(self.rnn(self.emb(t))[0]).log_softmax(-1)

        return M()

    def loss(self, model, batch):
        _, t, lengths, y, _ = batch
        log_probs = model(t).transpose(0, 1)
        return F.ctc_loss(
            log_probs, (y + 1)[:, None], lengths, torch.ones_like(y), reduction="none", zero_infinity=True
        ).mean()


@case_of
class Memory(nn.Module):
    """keys and values that are parameters; a query uses the two best keys"""

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(6, 4)
        self.keys, self.values = nn.Parameter(torch.randn(10, 4)), nn.Parameter(torch.randn(10, 4))

    def forward(self, x, t):
        scores, places = (self.query(x) @ self.keys.T).topk(2)
        return (scores.softmax(-1)[..., None] * self.values[places]).sum(1)
