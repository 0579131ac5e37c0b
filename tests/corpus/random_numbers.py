"""Dropout and noise. Each rank draws its own: nothing to compare with but the plain model in the first
steps."""

from __future__ import annotations

from corpus.base import MLP, Case, F, nn, torch


class Dropout(Case):
    """dropout modules in blocks, and dropout in the loss's input"""

    is_random = True

    def net(self):
        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.up = nn.Linear(8, 16)
                self.drop = nn.Dropout(0.3)
                self.down = nn.Linear(16, 8)

            def forward(self, h):
                return h + self.down(self.drop(torch.tanh(self.up(h))))

        class M(nn.Module):
            def __init__(self):
                super().__init__()
                self.inp = nn.Linear(6, 8)
                self.drop = nn.Dropout(0.2)
                self.blocks = nn.ModuleList(Block() for _ in range(4))
                self.out = nn.Linear(8, 4)

            def forward(self, x, t):
                h = self.drop(self.inp(x))
                for block in self.blocks:
                    h = block(h)
                return self.out(h)

        return M()


class NoisyLoss(Case):
    """random numbers in the task's loss, before and after the model is called, and in the model"""

    is_random = True

    def net(self):
        class M(MLP):
            def __init__(self):
                super().__init__()
                self.drop = nn.Dropout(0.2)

            def forward(self, x, t):
                h = torch.tanh(self.inp(x))
                h = h + self.down(self.drop(torch.tanh(self.up(h))))
                return self.out(h)

        return M()

    def loss(self, model, batch):
        x, t, _, y, _ = batch
        scores = model(x + 0.1 * torch.randn_like(x), t)
        return F.cross_entropy(scores + 0.1 * torch.randn_like(scores), y)
