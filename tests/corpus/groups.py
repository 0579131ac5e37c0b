"""Groups of parameters."""

from __future__ import annotations

from corpus.base import MLP, Case


class Groups(Case):
    def net(self):
        return MLP()

    def param_groups(self, model):
        ps = dict(model.named_parameters())
        strip = lambda n: n.removeprefix("module.")
        b = [p for n, p in ps.items() if strip(n).endswith("bias")]
        h = [p for n, p in ps.items() if strip(n).startswith("out.w")]
        r = [p for n, p in ps.items() if not strip(n).endswith("bias") and not strip(n).startswith("out.w")]
        return [
            {"params": b, "weight_decay": 0.0, "lr_scale": 2.0},
            {"params": h, "lr_scale": 0.1},
            {"params": r},
        ]


class GroupsReversed(Groups):
    def param_groups(self, model):
        g = super().param_groups(model)[::-1]
        g[0]["params"].reverse()
        return g


class GroupsLamb(Case):
    """groups as for LAMB: biases in a first group with a setting that other optimizers ignore"""

    def net(self):
        return MLP()

    def param_groups(self, model):
        ps = dict(model.named_parameters())
        return [
            {"params": [p for n, p in ps.items() if n.endswith("bias")], "adam": True, "weight_decay": 0.0},
            {"params": [p for n, p in ps.items() if not n.endswith("bias")]},
        ]
