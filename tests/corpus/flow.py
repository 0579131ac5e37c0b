"""Control flow: branches, experts, modes and functions of one's own."""

from __future__ import annotations

from corpus.base import MLP, Case, F, nn, torch


class BranchNet(MLP):
    def __init__(self):
        super().__init__()
        self.rare = nn.Linear(8, 8)
        self.never = nn.Linear(3, 3)
        self.alt = nn.Linear(8, 4)

    def forward(self, x, t, i):
        h = torch.tanh(self.inp(x))
        h = h + self.down(torch.tanh(self.up(h)))
        m = i % 7 == 0
        if bool(m.any()):
            h = h + self.rare(h) * m[:, None].to(h.dtype)
        return self.out(h)


class Branch(Case):
    """some layers are used only by batches that contain a multiple of 7, one layer by none"""

    def net(self):
        return BranchNet()

    def loss(self, model, batch):
        x, t, ln, y, i = batch
        return F.cross_entropy(model(x, t, i), y)


class MoeNet(nn.Module):
    def __init__(self, n=4):
        super().__init__()
        self.inp = nn.Linear(6, 8)
        self.gate = nn.Linear(8, n)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(n)
        )
        self.out = nn.Linear(8, 4)

    def forward(self, x, t):
        h = self.inp(x)
        g = torch.softmax(self.gate(h), -1)
        top = g.argmax(-1)
        o = torch.zeros_like(h)
        for e, ex in enumerate(self.experts):
            at = (top == e).nonzero().flatten()
            if len(at):
                o = o.index_add(0, at, ex(h[at]) * g[at, e : e + 1])
        return self.out(h + o)


class Moe(Case):
    def net(self):
        return MoeNet()


class NoGradSome(Case):
    """a parameter with requires_grad that is used under torch.no_grad only: its gradient is None"""

    def net(self):
        class M(MLP):
            def forward(self, x, t):
                with torch.no_grad():
                    h = torch.tanh(self.inp(x))
                h = h + self.down(torch.tanh(self.up(h)))
                return self.out(h)

        return M()


class Alias(Case):
    """a tensor and a view of it, one changed in place by a later layer"""

    def net(self):
        class M(nn.Module):
            def __init__(self):
                super().__init__()
                self.inp = nn.Linear(6, 8)
                self.a = nn.Linear(8, 8)
                self.b = nn.Linear(4, 8)
                self.c = nn.Linear(8, 8)
                self.out = nn.Linear(8, 4)

            def forward(self, x, t):
                h = self.inp(x)
                v = h.view(-1, 2, 4)
                g = torch.tanh(self.a(torch.cat([x, x[:, :2]], 1)))
                g = self.c(g) + self.b(g[:, :4])
                h.mul_(2.0)
                return self.out(g + v.reshape(-1, 8) + h)

        return M()


class AutocastIn(Case):
    """bfloat16 autocast, enabled in forward around one layer"""

    tolerance = 2e-3

    def net(self):
        class M(MLP):
            def forward(self, x, t):
                with torch.autocast("cpu", torch.bfloat16):
                    h = torch.tanh(self.inp(x.float()))
                h = h.to(x.dtype)
                h = h + self.down(torch.tanh(self.up(h)))
                return self.out(h)

        return M()

    def model(self):
        m = super().model()
        m.inp.float()
        return m


class DetachLayer(Case):
    def net(self):
        class M(MLP):
            def forward(self, x, t):
                h = torch.tanh(self.inp(x))
                g = self.down(torch.tanh(self.up(h))).detach()
                return self.out(h + self.down(torch.tanh(self.up(h))) - 0.5 * g)

        return M()


class EnableGrad(Case):
    """a force model: autograd.grad in forward"""

    def net(self):
        class M(MLP):
            def forward(self, x, t):
                with torch.enable_grad():
                    x = x.requires_grad_(True)
                    e = super().forward(x, t)
                    (f,) = torch.autograd.grad(e.pow(2).sum(), x, create_graph=True)
                return e + self.out(torch.tanh(self.inp(f)))

        return M()


class CustomFn(Case):
    """an own autograd.Function (straight-through)"""

    def net(self):
        class Ste(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.round()

            @staticmethod
            def backward(ctx, g):
                return g * 2

        class M(MLP):
            def forward(self, x, t):
                h = torch.tanh(self.inp(x))
                h = h + self.down(Ste.apply(3 * torch.tanh(self.up(h))))
                return self.out(h)

        return M()


class TwoExpertsNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(6, 8)
        self.experts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.out = nn.Linear(8, 4)

    def forward(self, x, t, i):
        h = torch.tanh(self.inp(x))
        o = torch.zeros_like(h)
        for e, ex in enumerate(self.experts):
            at = ((i % 8) // 4 == e).nonzero().flatten()
            if len(at):
                o = o.index_add(0, at, torch.tanh(ex(h[at])))
        return self.out(h + o)


class TwoExperts(Case):
    """one expert for samples 0-3 of a global batch of 8, one for 4-7: each of two ranks uses one"""

    num_samples = 24

    def net(self):
        return TwoExpertsNet()

    def loss(self, model, batch):
        x, t, ln, y, i = batch
        return F.cross_entropy(model(x, t, i), y)


class Island(Case):
    """a float32 island in a bf16 job: torch.autocast(enabled=False) around a layer"""

    job = {"train": {"precision": "bf16"}}
    settings = ("easy",)
    tolerance = 2e-3

    def __init__(self, *, double=False):
        super().__init__(double=False)

    def net(self):
        class M(MLP):
            def forward(self, x, t):
                with torch.autocast("cpu", enabled=False):
                    h = torch.tanh(self.inp(x))
                return self.out(h + self.down(torch.tanh(self.up(h))))

        return M()


class Flag(Case):
    """a boolean input of the model that changes from batch to batch (teacher forcing, say)"""

    splits = True

    def net(self):
        class M(MLP):
            def forward(self, x, t, flip=False):
                h = torch.tanh(self.inp(x))
                h = h + self.down(torch.tanh(self.up(h)))
                return self.out(-h if flip else h)

        return M()

    def loss(self, model, batch):
        x, t, ln, y, i = batch
        return F.cross_entropy(model(x, t, bool(int(i[0]) // 8 % 2)), y)


class FloatIn(Case):
    """a float input of the model that changes from batch to batch (noise level, temperature)"""

    splits = True

    def net(self):
        class M(MLP):
            def forward(self, x, t, tau=1.0):
                return super().forward(x, t) / tau

        return M()

    def loss(self, model, batch):
        x, t, ln, y, i = batch
        return F.cross_entropy(model(x, t, 1.0 + float(i.float().mean()) / 10), y)


class StrIn(Case):
    """a string input chooses the branch"""

    splits = True

    def net(self):
        class M(MLP):
            def forward(self, x, t, mode="a"):
                o = super().forward(x, t)
                if mode == "b":
                    o = o * 2
                return o

        return M()

    def loss(self, model, batch):
        x, t, ln, y, i = batch
        return F.cross_entropy(model(x, t, "b" if int(i[0]) // 8 % 2 else "a"), y)


class UnusedOutput(Case):
    """a two-output model; on some batches, the loss uses only one output"""

    splits = True

    def net(self):
        class M(MLP):
            def __init__(self):
                super().__init__()
                self.aux = nn.Linear(8, 4)

            def forward(self, x, t):
                h = torch.tanh(self.inp(x))
                return self.out(h + self.down(torch.tanh(self.up(h)))), self.aux(h)

        return M()

    def loss(self, model, batch):
        x, t, ln, y, i = batch
        a, b = model(x, t)
        l = F.cross_entropy(a, y)
        return l + (0.3 * F.cross_entropy(b, y) if int(i[0]) // 8 % 2 else 0)
