"""Losses that do more than call the model once."""

from __future__ import annotations

import dataclasses

from corpus.base import MLP, Case, F, nn, torch


@dataclasses.dataclass
class Out:
    logits: torch.Tensor
    extra: torch.Tensor


class OutNet(MLP):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x, t):
        o = super().forward(x, t)
        e = o.pow(2).mean()
        if self.kind == "dict":
            return {"logits": o, "extra": e, "n": 3, "name": "a"}
        if self.kind == "tuple":
            return o, (e, None)
        return Out(o, e)


class OutDict(Case):
    kind = "dict"

    def net(self):
        return OutNet(self.kind)

    def loss(self, model, batch):
        x, t, ln, y, i = batch
        o = model(x, t)
        l, e = (
            (o["logits"], o["extra"])
            if self.kind == "dict"
            else (o[0], o[1][0])
            if self.kind == "tuple"
            else (o.logits, o.extra)
        )
        return F.cross_entropy(l, y) + 0.1 * e


class OutTuple(OutDict):
    kind = "tuple"


class AuxWeights(Case):
    """the loss has a term of weights"""

    def net(self):
        return MLP()

    def loss(self, model, batch):
        return super().loss(model, batch) + 0.05 * sum(p.pow(2).sum() for p in model.parameters())


class Penalty(Case):
    """gradient penalty on inputs: double backward"""

    def net(self):
        return MLP()

    def loss(self, model, batch):
        x, t, ln, y, i = batch
        x = x.clone().requires_grad_(True)
        l = F.cross_entropy(model(x, t), y, reduction="none")
        (g,) = torch.autograd.grad(l.sum(), x, create_graph=True)
        return l.mean() + 0.1 * g.pow(2).sum(1).mean()


class SelfGrad(Case):
    """autograd.grad of the loss w.r.t. weights inside the loss, detached, as a scale
    scale)"""

    def net(self):
        return MLP()

    def loss(self, model, batch):
        l = super().loss(model, batch)
        torch.autograd.grad(l, [p for p in model.parameters() if p.requires_grad], retain_graph=True)
        return l


class Meth(Case):
    """loss calls parts of the model, not the model"""

    def net(self):
        return MLP()

    def loss(self, model, batch):
        x, t, ln, y, i = batch
        m = getattr(model, "module", model)
        h = torch.tanh(m.inp(x))
        h = h + m.down(torch.tanh(m.up(h)))
        return F.cross_entropy(m.out(h), y)


class Functional(Case):
    """torch.func.functional_call with changed weights (MAML-like, one inner step on weights)"""

    def net(self):
        return MLP()

    def loss(self, model, batch):
        x, t, ln, y, i = batch
        m = getattr(model, "module", model)
        ws = {k: v * 1.1 for k, v in m.named_parameters()}
        return F.cross_entropy(torch.func.functional_call(m, ws, (x, t)), y)


class SumLoss1(Case):
    """a loss of shape [1]"""

    def net(self):
        return MLP()

    def loss(self, model, batch):
        return super().loss(model, batch).reshape(1)


class GradInLoss(Case):
    """the loss calls backward itself for an auxiliary term, and returns the rest"""

    is_refused = True

    def net(self):
        return MLP()

    def loss(self, model, batch):
        x, t, ln, y, i = batch
        o = model(x, t)
        (0.0 * o.sum()).backward(retain_graph=True)
        return F.cross_entropy(o, y)


class ParamScale(Case):
    """a loss that uses a parameter of the model after the call (learned temperature)"""

    def net(self):
        m = MLP()
        m.log_t = nn.Parameter(torch.zeros(()))
        return m

    def loss(self, model, batch):
        x, t, ln, y, i = batch
        m = getattr(model, "module", model)
        return F.cross_entropy(model(x, t) * m.log_t.exp(), y)
