"""State that passes change: buffers, weights, and what is kept in Python."""

from __future__ import annotations

import copy
import random

from corpus.base import MLP, Case, nn, torch


class BuffersNet(MLP):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("flag", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("u8", torch.arange(5, dtype=torch.uint8))
        self.register_buffer("f64", torch.full((2,), 1 / 3, dtype=torch.float64))
        self.register_buffer("tmp", torch.ones(2), persistent=False)
        self.register_buffer("none", None)
        self.register_buffer("f16", torch.ones(2, dtype=torch.float16))
        self.register_buffer("c", torch.ones(2, dtype=torch.complex64))

    def forward(self, x, t):
        if self.training:
            self.calls += 1
            self.flag[1] = True
            self.f64 *= 1.5
        return super().forward(x, t) * self.tmp[0]


class Buffers(Case):
    stateful = True

    def model(self):
        with torch.random.fork_rng([]):
            torch.manual_seed(1234)
            m = BuffersNet()
        for p in m.parameters():
            p.data = p.data.to(self.dtype)
        return m


class MaxNormNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(20, 8, max_norm=1.0)
        self.out = nn.Linear(8, 4)

    def forward(self, x, t):
        return self.out(self.emb(t).mean(1))


class MaxNorm(Case):
    """Embedding(max_norm): the forward changes weights in place, those in the batch"""

    is_refused = True

    def net(self):
        return MaxNormNet()


class ClampW(Case):
    """WGAN: weights are clamped in the loss, before the model is called"""

    def net(self):
        return MLP()

    def loss(self, model, batch):
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.2, 0.2)
        return super().loss(model, batch)


class ExtraState(Case):
    is_refused = True

    def net(self):
        class M(MLP):
            def __init__(self):
                super().__init__()
                self.extra = {"a": 1}

            def get_extra_state(self):
                return self.extra

            def set_extra_state(self, e):
                self.extra = e

        return M()


class EmaTask(Case):
    """the task keeps EMA weights, as a deepcopy of the model, inside the model's buffers"""

    stateful = True

    def net(self):
        return MLP()

    def loss(self, model, batch):
        if not hasattr(self, "ema"):
            self.ema = copy.deepcopy(model).requires_grad_(False)
        with torch.no_grad():
            for e, p in zip(self.ema.parameters(), model.parameters(), strict=True):
                e.lerp_(p, 0.1)
        return super().loss(model, batch)


class DataSwap(Case):
    """p.data = new tensor in the loss (e.g. pruning): storage is replaced"""

    stateful = True

    def net(self):
        return MLP()

    def loss(self, model, batch):
        if not hasattr(self, "d"):
            self.d = 1
            m = getattr(model, "module", model)
            m.up.weight.data = m.up.weight.data.clone() * 1.0
        return super().loss(model, batch)


class Anneal(Case):
    """the task anneals an attribute of the model (temperature)"""

    stateful = True

    def net(self):
        class M(MLP):
            tau = 1.0

            def forward(self, x, t):
                return super().forward(x, t) / self.tau

        return M()

    def loss(self, model, batch):
        m = getattr(model, "module", model)
        m.tau = m.tau * 1.3
        return super().loss(model, batch)


class BufCounter(Case):
    """a tensor buffer counts forwards, and the output depends on it"""

    stateful = True

    def net(self):
        class M(MLP):
            def __init__(self):
                super().__init__()
                self.register_buffer("k", torch.zeros(()))

            def forward(self, x, t):
                if self.training:
                    self.k += 1
                return super().forward(x, t) / (1 + self.k)

        return M()


class NoiseConst(Case):
    """noise with a seed of its own: torch.randn with a generator that the model keeps"""

    stateful = True

    def net(self):
        class M(MLP):
            def __init__(self):
                super().__init__()
                self.g = torch.Generator().manual_seed(5)

            def forward(self, x, t):
                noise = torch.randn(6, generator=self.g, dtype=torch.float64).to(x.dtype)
                return super().forward(x + 0.5 * noise, t)

        return M()


class PyRandom(Case):
    """stochastic depth by a generator of the model's own: same on each rank"""

    stateful = True

    def net(self):

        class M(MLP):
            def __init__(self):
                super().__init__()
                self.r = random.Random(3)

            def forward(self, x, t):
                h = torch.tanh(self.inp(x))
                if not self.training or self.r.random() < 0.5:
                    h = h + self.down(torch.tanh(self.up(h)))
                return self.out(h)

        return M()
