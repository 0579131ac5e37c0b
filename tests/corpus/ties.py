"""Weights that several modules use."""

from __future__ import annotations

from corpus.base import Case, nn, torch


class Tied3Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(20, 8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.mid = nn.Linear(8, 20, bias=False)
        self.head = nn.Linear(8, 20, bias=False)
        self.mid.weight = self.emb.weight
        self.head.weight = self.emb.weight
        self.out = nn.Linear(20, 4)

    def forward(self, x, t):
        h = self.emb(t).mean(1)
        h = h + self.down(torch.tanh(self.up(h)))
        h = torch.softmax(self.mid(h), -1) @ self.emb.weight + h
        return self.out(self.head(h))


class Tied3(Case):
    plan = {"up": "colwise", "down": "rowwise"}

    def net(self):
        return Tied3Net()


class TiedSplitNet(nn.Module):
    """tied between first and last layer only through modules"""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(20, 8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x, t):
        h = self.emb(t).mean(1)
        h = h + self.down(torch.tanh(self.up(h)))
        return self.head(h)


class TiedSplit(Case):
    plan = {"up": "colwise", "down": "rowwise"}

    def net(self):
        return TiedSplitNet()


class SharedNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(6, 8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 4)

    def block(self, h):
        return self.norm(h + self.down(torch.tanh(self.up(h))))

    def forward(self, x, t):
        h = self.inp(x)
        for _ in range(3):
            h = self.block(h)
        return self.out(h)


class SharedTwice(Case):
    plan = {"up": "colwise", "down": "rowwise"}

    def net(self):
        return SharedNet()


class ViewShare(Case):
    """two Parameters on one storage: decoder.weight = Parameter(encoder.weight.data)"""

    def net(self):
        class M(nn.Module):
            def __init__(self):
                super().__init__()
                self.emb = nn.Embedding(20, 8)
                self.up = nn.Linear(8, 8)
                self.head = nn.Linear(8, 20, bias=False)
                self.head.weight = nn.Parameter(self.emb.weight.data)

            def forward(self, x, t):
                return self.head(torch.tanh(self.up(self.emb(t).mean(1))))

        return M()

    def model(self):
        m = super().model()
        m.head.weight.data = m.emb.weight.data
        return m
