"""Hooks of tensors, parameters and modules."""

from __future__ import annotations

from corpus.base import MLP, Case, nn, torch


class Hooks(Case):
    """a user's hooks: a tensor hook halves, a backward hook doubles a gradient; a forward hook"""

    def net(self):
        m = MLP()
        m.up.weight.register_hook(lambda g: g * 0.5)
        m.down.register_full_backward_hook(lambda mod, gi, go: tuple(q * 2 for q in gi))
        m.inp.register_forward_hook(lambda mod, a, o: o * 1.5)
        return m


class RootHook(Case):
    """a forward hook of the whole model"""

    def net(self):
        m = MLP()
        m.register_forward_hook(lambda mod, a, o: o * 3.0)
        return m


class RootPreHook(Case):
    def net(self):
        m = MLP()
        m.register_forward_pre_hook(lambda mod, a: (a[0] * 2.0, *a[1:]))
        return m


class ClampHook(Case):
    """a hook that clips a gradient by value, as is usual for recurrent networks"""

    def net(self):
        m = MLP()
        for p in m.parameters():
            p.register_hook(lambda g: g.clamp(-0.01, 0.01))
        return m


class ClampAfterAccumulation(Case):
    """a hook after accumulation that clips a gradient by value"""

    def net(self):
        m = MLP()
        for p in m.parameters():
            p.register_post_accumulate_grad_hook(clamp)
        return m


def clamp(p):
    p.grad.clamp_(-0.01, 0.01)


def halve(p):
    p.grad.mul_(0.5)


class PostHook(Case):
    """a user's hook after accumulation: once for each step"""

    def net(self):
        m = MLP()
        for p in m.parameters():
            p.register_post_accumulate_grad_hook(halve)
        return m


class BlockBwdHook(Case):
    """a full backward hook of a user's block (gradient reversal by a hook)"""

    def net(self):
        class B(nn.Module):
            def __init__(self):
                super().__init__()
                self.l = nn.Linear(8, 8)

            def forward(self, x):
                return torch.tanh(self.l(x))

        class M(nn.Module):
            def __init__(self):
                super().__init__()
                self.inp = nn.Linear(6, 8)
                self.b = B()
                self.out = nn.Linear(8, 4)

            def forward(self, x, t):
                return self.out(self.b(self.inp(x)))

        m = M()
        m.b.register_full_backward_hook(lambda mod, gi, go: tuple(g * -1 for g in gi))
        return m


class ActHook(Case):
    """a hook on an activation: h.register_hook in forward (gradient reversal)"""

    def net(self):
        class M(MLP):
            def forward(self, x, t):
                h = torch.tanh(self.inp(x))
                if h.requires_grad:
                    h.register_hook(lambda g: -g)
                return self.out(h + self.down(torch.tanh(self.up(h))))

        return M()
