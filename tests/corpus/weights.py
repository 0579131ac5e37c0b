"""Kinds, types and shapes of weights."""

from __future__ import annotations

from corpus.base import MLP, Case, F, nn, torch


class ComplexNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(6, 8)
        self.f = nn.Parameter(torch.randn(8, dtype=torch.complex128))
        self.out = nn.Linear(8, 4)

    def forward(self, x, t):
        return self.out(torch.fft.ifft(torch.fft.fft(self.inp(x)) * self.f).real)


class Complex(Case):
    """a complex64 weight among those of float32"""

    tolerance = 2e-6

    def __init__(self, *, double=True):
        super().__init__(double=False)

    def model(self):
        with torch.random.fork_rng([]):
            torch.manual_seed(1234)
            m = ComplexNet()
        m.f = nn.Parameter(m.f.data.to(torch.complex64))
        return m


class Complex128(Case):
    """a complex128 weight, which no checkpoint can hold: refused"""

    is_refused = True

    def model(self):
        with torch.random.fork_rng([]):
            torch.manual_seed(1234)
            made = ComplexNet()
        for layer in (made.inp, made.out):  # `made.to(float64)` would discard the imaginary parts
            layer.to(self.dtype)
        return made


class SparseNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(20, 8, sparse=True)
        self.bag = nn.EmbeddingBag(20, 8, mode="sum", sparse=True)
        self.out = nn.Linear(8, 4)

    def forward(self, x, t):
        return self.out(self.emb(t).mean(1) + self.bag(t))


class Sparse(Case):
    def net(self):
        return SparseNet()


class SparseOnly(Case):
    """for SparseAdam"""

    def net(self):
        class M(nn.Module):
            def __init__(self):
                super().__init__()
                self.emb = nn.Embedding(20, 4, sparse=True)

            def forward(self, x, t):
                return self.emb(t).mean(1)

        return M()


class ShapesNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.shift = nn.Parameter(torch.tensor(0.2))
        self.empty = nn.Parameter(torch.zeros(0))
        self.empty2 = nn.Parameter(torch.zeros(3, 0, 5))
        self.one = nn.Parameter(torch.ones(1))
        self.one4 = nn.Parameter(torch.ones(1, 1, 1, 1))
        self.a = nn.Linear(6, 101)
        self.b = nn.Linear(101, 7)
        self.prime = nn.Parameter(torch.randn(7, 1, 13) * 0.1)
        self.out = nn.Linear(13, 4)

    def forward(self, x, t):
        h = torch.tanh(self.b(torch.tanh(self.a(x)))) * self.scale + self.shift
        h = torch.einsum("bi,ijk->bk", h, self.prime) + self.empty.sum() + self.empty2.sum()
        return self.out(h * self.one * self.one4.reshape(1))


class Shapes(Case):
    def net(self):
        return ShapesNet()


class ShapesNoEmpty(Case):
    def net(self):
        m = ShapesNet()
        m.empty = None
        m.empty2 = None
        m.register_parameter("empty", nn.Parameter(torch.zeros(2)))
        m.register_parameter("empty2", nn.Parameter(torch.zeros(3, 1, 5)))
        return m


class NonContigNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 6).t() * 0.3)  # 6x8, strides (1, 6)
        self.conv = nn.Conv2d(2, 4, 2, padding=1).to(memory_format=torch.channels_last)
        self.e = nn.Parameter(torch.randn(8)[::2].clone())
        self.s = nn.Parameter((torch.randn(16) * 0.3)[::2])  # stride 2
        self.x3 = nn.Parameter(torch.randn(2, 3, 4).permute(2, 0, 1) * 0.1)  # 4x2x3
        self.out = nn.Linear(8, 4)

    def forward(self, x, t):
        h = torch.tanh(x @ self.w + self.s)
        c = self.conv(h.view(-1, 2, 2, 2)).mean((2, 3)) + self.e
        return self.out(h) + c + torch.einsum("bij,kij->bk", x.view(-1, 2, 3), self.x3)


class NonContig(Case):
    def net(self):
        return NonContigNet()


class Frozen(Case):
    def net(self):
        m = MLP()
        m.inp.requires_grad_(False)
        m.down.bias.requires_grad_(False)
        m.register_parameter("ints", nn.Parameter(torch.arange(5), requires_grad=False))
        return m


class Unfreeze(Case):
    """a layer is frozen until step 3 (the task counts the calls of its loss; no accumulation)"""

    stateful = True

    def __init__(self, *, double=True):
        super().__init__(double=double)
        self.k = 0

    def net(self):
        m = MLP()
        m.inp.requires_grad_(False)
        return m

    def param_groups(self, model):
        return [{"params": list(model.parameters())}]

    def loss(self, model, batch):
        self.k += 1
        if self.k == 3:
            (model.module if hasattr(model, "module") else model).inp.requires_grad_(True)
        return super().loss(model, batch)


class FreezeAt(Unfreeze):
    def net(self):
        return MLP()

    def loss(self, model, batch):
        self.k += 1
        if self.k == 3:
            (model.module if hasattr(model, "module") else model).inp.requires_grad_(False)
        return Case.loss(self, model, batch)


class Lora(nn.Module):
    def __init__(self, base, r=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(r, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(base.out_features, r))

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.a), self.b) * 2


class LoraTask(Case):
    def net(self):
        m = MLP()
        m.inp = Lora(m.inp)
        m.up = Lora(m.up)
        m.down = Lora(m.down)
        m.out = Lora(m.out)
        return m


class Metadata(Case):
    """a parameter of the name that safetensors keeps for itself"""

    is_refused = True

    def net(self):
        m = MLP()
        m.register_parameter("__metadata__", nn.Parameter(torch.ones(3)))
        m.register_buffer("weird name/ü\n", torch.ones(2))
        return m


class DictNet(Case):
    def net(self):
        class M(nn.Module):
            def __init__(self):
                super().__init__()
                self.d = nn.ModuleDict(
                    {"kind": nn.Linear(6, 8), "module": nn.Linear(8, 8), "_orig_mod": nn.Linear(8, 8)}
                )
                self.pd = nn.ParameterDict({"a/b": torch.ones(8), "weight": torch.zeros(8)})
                self.pl = nn.ParameterList([torch.ones(8)])
                self.out = nn.Linear(8, 4)

            def forward(self, x, t):
                h = torch.tanh(self.d["kind"](x)) * self.pd["a/b"] + self.pd["weight"]
                h = torch.tanh(self.d["module"](h)) * self.pl[0]
                return self.out(torch.tanh(self.d["_orig_mod"](h)))

        return M()


class LazyTask(Case):
    is_refused = True

    def net(self):
        class M(nn.Module):
            def __init__(self):
                super().__init__()
                self.a = nn.LazyLinear(8)
                self.b = nn.LazyLinear(4)

            def forward(self, x, t):
                return self.b(torch.tanh(self.a(x)))

        return M()


class OneScalar(Case):
    """one 0-d parameter in all"""

    def net(self):
        class M(nn.Module):
            def __init__(self):
                super().__init__()
                self.w = nn.Parameter(torch.tensor(0.5))

            def forward(self, x, t):
                return x[:, :4] * self.w

        return M()


class Mixed(Case):
    """float32 and float64 layers in one model
    equality)"""

    tolerance = 1e-6

    def model(self):
        class M(nn.Module):
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(6, 8)
                self.b = nn.Linear(8, 8).double()
                self.c = nn.Linear(8, 8)
                self.d = nn.Linear(8, 4).double()

            def forward(self, x, t):
                return self.d(torch.tanh(self.c(self.b(self.a(x.float()).double()).float())).double())

        with torch.random.fork_rng([]):
            torch.manual_seed(1234)
            return M()


class HalfBody(Case):
    """all parameters are bf16, the loss is computed in float32 (compared with a tolerance of 0.02)"""

    tolerance = 2e-2
    settings = ("easy",)

    def model(self):
        with torch.random.fork_rng([]):
            torch.manual_seed(1234)
            m = MLP()
        m.up.to(torch.bfloat16)
        m.down.to(torch.bfloat16)
        return m.to(torch.bfloat16)

    def loss(self, model, batch):
        x, t, ln, y, i = batch
        return F.cross_entropy(model(x.bfloat16(), t).float(), y)


class Script(Case):
    """a part is a ScriptModule"""

    def net(self):
        m = MLP()
        m.up = torch.jit.script(nn.Sequential(nn.Linear(8, 16), nn.Tanh()))
        return m


class ParamInt8(Case):
    """frozen int8 weights, quantized by hand"""

    def net(self):
        class M(MLP):
            def __init__(self):
                super().__init__()
                self.q = nn.Parameter(torch.randint(-127, 127, (8, 8), dtype=torch.int8), requires_grad=False)

            def forward(self, x, t):
                h = torch.tanh(self.inp(x))
                h = h + F.linear(h, self.q.to(h.dtype) / 256)
                return self.out(h + self.down(torch.tanh(self.up(h))))

        return M()


class Muon2(Case):
    def net(self):
        class M(nn.Module):
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(6, 16, bias=False)
                self.b = nn.Linear(16, 4, bias=False)

            def forward(self, x, t):
                return self.b(torch.tanh(self.a(x)))

        return M()


class Layers(Case):
    """a list of three layers"""

    def __init__(self, *, double=True, layers=3):
        super().__init__(double=double)
        self.layers = layers

    def net(self):
        k = self.layers

        class M(nn.Module):
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(6, 8)
                self.l = nn.ModuleList(nn.Linear(8, 8) for _ in range(k))
                self.b = nn.Linear(8, 4)

            def forward(self, x, t):
                h = self.a(x)
                for q in self.l:
                    h = torch.tanh(q(h))
                return self.b(h)

        return M()


class MixedUnit(Case):
    """blocks of float32 Linear and float64 norm: two types in one unit"""

    tolerance = 1e-6

    def model(self):
        class B(nn.Module):
            def __init__(self):
                super().__init__()
                self.l = nn.Linear(8, 8)
                self.n = nn.LayerNorm(8).double()

            def forward(self, h):
                return self.n(torch.tanh(self.l(h)).double()).float() + h

        class M(nn.Module):
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(6, 8)
                self.l = nn.ModuleList(B() for _ in range(2))
                self.b = nn.Linear(8, 4)

            def forward(self, x, t):
                h = self.a(x.float())
                for q in self.l:
                    h = q(h)
                return self.b(h)

        with torch.random.fork_rng([]):
            torch.manual_seed(1234)
            return M()
