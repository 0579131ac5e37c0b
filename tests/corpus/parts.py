"""Ways to make a layer: parametrizations, adapters, generated weights, shared blocks, graphs."""

from __future__ import annotations

from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from corpus.base import MLP, Case, F, case_of, nn, torch


@case_of
class Orthogonal(nn.Module):
    """an orthogonal parametrization"""

    def __init__(self):
        super().__init__()
        self.a = parametrizations.orthogonal(nn.Linear(6, 6), orthogonal_map="cayley")
        self.b = nn.Linear(6, 4)

    def forward(self, x, t):
        return self.b(torch.relu(self.a(x)))


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).transpose(-1, -2)


@case_of
class Parametrized(nn.Module):
    """a parametrization of one's own"""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 6)
        parametrize.register_parametrization(self.a, "weight", Symmetric())
        self.b = nn.Linear(6, 4)

    def forward(self, x, t):
        return self.b(torch.tanh(self.a(x)))


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return (x / scale).round().clamp(-8, 7) * scale

    @staticmethod
    def backward(ctx, gradient):
        x, scale = ctx.saved_tensors
        is_inside = (x / scale).abs() < 7
        return gradient * is_inside, (gradient * ((x / scale).round() - x / scale) * is_inside).sum()


class Quantized(nn.Linear):
    def __init__(self, num_in, num_out):
        super().__init__(num_in, num_out)
        self.scale = nn.Parameter(torch.tensor([0.1]))

    def forward(self, x):
        return F.linear(x, Rounded.apply(self.weight, self.scale[0]), self.bias)


@case_of
class QuantizationAware(nn.Module):
    """weights are rounded in forward, with learned scales and a gradient of one's own"""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Quantized(6, 8), Quantized(8, 4)])

    def forward(self, x, t):
        return self.layers[1](torch.relu(self.layers[0](x)))


@case_of
class HyperNetwork(nn.Module):
    """one layer computes the weights of another for each sample"""

    def __init__(self):
        super().__init__()
        self.emb, self.maker, self.out = nn.Embedding(20, 4), nn.Linear(4, 36), nn.Linear(6, 4)

    def forward(self, x, t):
        weights = self.maker(self.emb(t).mean(1)).view(-1, 6, 6)
        return self.out(torch.tanh(torch.bmm(weights, x[..., None])[..., 0]))


@case_of
class Film(nn.Module):
    """features are scaled and shifted by what another input says"""

    def __init__(self):
        super().__init__()
        self.emb, self.condition = nn.Embedding(20, 4), nn.Linear(4, 16)
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x, t):
        scale, shift = self.condition(self.emb(t).sum(1)).chunk(2, 1)
        return self.b(torch.relu(self.a(x) * (1 + scale) + shift))


@case_of
class Recurrent(nn.Module):
    """one block is applied five times"""

    def __init__(self):
        super().__init__()
        self.first, self.block, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x, t):
        h = self.first(x)
        for _ in range(5):
            h = h + 0.2 * torch.tanh(self.block(h))
        return self.last(h)


@case_of
class Highway(nn.Module):
    """gates choose between a layer and its input"""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 12) for _ in range(3)])
        self.out = nn.Linear(6, 4)

    def forward(self, x, t):
        for layer in self.layers:
            h, gate = layer(x).chunk(2, 1)
            gate = torch.sigmoid(gate)
            x = gate * torch.relu(h) + (1 - gate) * x
        return self.out(x)


@case_of
class Adapters(nn.Module):
    """small trained layers between frozen ones"""

    def __init__(self):
        super().__init__()
        self.body = nn.ModuleList([nn.Linear(6, 6).requires_grad_(False) for _ in range(3)])
        self.adapters = nn.ModuleList(
            [nn.Sequential(nn.Linear(6, 2), nn.ReLU(), nn.Linear(2, 6)) for _ in range(3)]
        )
        self.out = nn.Linear(6, 4)

    def forward(self, x, t):
        for frozen, adapter in zip(self.body, self.adapters, strict=True):
            x = torch.tanh(frozen(x))
            x = x + adapter(x)
        return self.out(x)


@case_of
class Prompt(nn.Module):
    """a frozen transformer behind trained prompts"""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(20, 8).requires_grad_(False)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).requires_grad_(False)
        self.prompt = nn.Parameter(torch.randn(1, 3, 8))
        self.out = nn.Linear(8, 4)

    def forward(self, x, t):
        return self.out(self.body(torch.cat([self.prompt.expand(len(t), -1, -1), self.emb(t)], 1)).mean(1))


@case_of
class Cosine(nn.Module):
    """a head of normalized weights and features, with a learned temperature"""

    def __init__(self):
        super().__init__()
        self.a, self.weight = nn.Linear(6, 8), nn.Parameter(torch.randn(4, 8))
        self.temperature = nn.Parameter(torch.tensor([2.0]))

    def forward(self, x, t):
        return self.temperature * F.linear(F.normalize(self.a(x), dim=1), F.normalize(self.weight, dim=1))


@case_of
class Graph(nn.Module):
    """messages along the edges of a graph, summed by index_add"""

    def __init__(self):
        super().__init__()
        self.emb, self.message, self.update = nn.Embedding(20, 6), nn.Linear(12, 6), nn.Linear(12, 6)
        self.out = nn.Linear(6, 4)
        self.register_buffer("edges", torch.tensor([[0, 1, 2, 3, 4, 0], [1, 2, 3, 4, 0, 2]]))

    def forward(self, x, t):
        h = self.emb(t)
        for _ in range(2):
            source, target = h[:, self.edges[0]], h[:, self.edges[1]]
            messages = torch.relu(self.message(torch.cat([source, target], -1)))
            summed = torch.zeros_like(h).index_add(1, self.edges[1], messages)
            h = torch.tanh(self.update(torch.cat([h, summed], -1)))
        return self.out(h.sum(1))


@case_of
class DeepSets(nn.Module):
    """a function of a set: the largest of each feature"""

    def __init__(self):
        super().__init__()
        self.each = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 8), nn.ReLU())
        self.all = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x, t):
        return self.all(self.each(t).amax(1))


@case_of
class Bags(nn.Module):
    """an embedding bag with weights of samples, and offsets"""

    def __init__(self):
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(20, 8, mode="sum"), nn.Linear(8, 4)

    def forward(self, x, t):
        offsets = torch.arange(0, t.numel(), t.shape[1])
        return self.out(self.bag(t.flatten(), offsets, per_sample_weights=x[:, :5].flatten()))


@case_of
class Activations(nn.Module):
    """activations with parameters, and a bilinear layer"""

    def __init__(self):
        super().__init__()
        self.a, self.act = nn.Linear(6, 8), nn.PReLU(8)
        self.b, self.slope = nn.Bilinear(8, 6, 8), nn.Parameter(torch.ones(1))
        self.out = nn.Linear(8, 4)

    def forward(self, x, t):
        h = self.b(self.act(self.a(x)), x)
        return self.out(h * torch.sigmoid(self.slope * h))


@case_of
class Splines(nn.Module):
    """learned functions on the edges between neurons"""

    def __init__(self):
        super().__init__()
        self.coefficients = nn.Parameter(torch.randn(6, 4, 7) * 0.3)
        self.register_buffer("grid", torch.linspace(-2, 2, 7))

    def forward(self, x, t):
        basis = torch.exp(-((x[..., None] - self.grid) ** 2))
        return torch.einsum("big,iog->bo", basis, self.coefficients)


@case_of
class Mixture(nn.Module):
    """all experts are computed, and weighed by a gate"""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(6, 3)
        self.up, self.down = nn.Parameter(torch.randn(3, 6, 8)), nn.Parameter(torch.randn(3, 8, 4))

    def forward(self, x, t):
        h = torch.relu(torch.einsum("bi,eih->beh", x, self.up))
        return torch.einsum("be,beh,eho->bo", self.gate(x).softmax(-1), h, self.down)


@case_of
class TopExpert(nn.Module):
    """only the best expert counts for each sample, by a mask; all experts have a gradient"""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 3), nn.ModuleList([nn.Linear(6, 4) for _ in range(3)])

    def forward(self, x, t):
        scores = self.gate(x).softmax(-1)
        mask = F.one_hot(scores.argmax(-1), 3).to(x.dtype)
        return sum((mask * scores)[:, [at]] * expert(x) for at, expert in enumerate(self.experts))


@case_of
class OwnCheckpoint(nn.Module):
    """the model recomputes a block itself"""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.block = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, x, t):
        h = self.first(x)
        return self.last(h + checkpoint(self.block, h, use_reentrant=False))


class Compiled(Case):
    """a part of the model is compiled"""

    settings = ("easy",)

    def net(self):
        model = MLP()
        model.up = torch.compile(model.up, backend="eager")
        return model


@case_of
class Vmapped(nn.Module):
    """a function of one sample, over the batch by vmap"""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x, t):
        return self.b(torch.vmap(torch.tanh)(self.a(x)))


@case_of
class Dequantized(nn.Module):
    """a large frozen buffer of bytes, with trained scales"""

    def __init__(self):
        super().__init__()
        self.register_buffer("bytes", torch.randint(-8, 8, (8, 6), dtype=torch.int8))
        self.scale, self.out = nn.Parameter(torch.full((8, 1), 0.1)), nn.Linear(8, 4)

    def forward(self, x, t):
        return self.out(torch.relu(x @ (self.bytes.to(x.dtype) * self.scale).T))


@case_of
class Slots(nn.Module):
    """parameters in lists and dictionaries, of several shapes"""

    def __init__(self):
        super().__init__()
        self.matrices = nn.ParameterList([nn.Parameter(torch.randn(6, 6) * 0.3) for _ in range(3)])
        self.vectors = nn.ParameterDict(
            {"bias": nn.Parameter(torch.zeros(6)), "gain": nn.Parameter(torch.ones(6))}
        )
        self.out = nn.Linear(6, 4)

    def forward(self, x, t):
        for matrix in self.matrices:
            x = torch.tanh(x @ matrix * self.vectors["gain"] + self.vectors["bias"])
        return self.out(x)


@case_of
class Wide(nn.Module):
    """one weight that is much larger than all others, and one of one row"""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 300), nn.Linear(300, 1), nn.Linear(1, 4)

    def forward(self, x, t):
        return self.c(self.b(torch.relu(self.a(x))))


@case_of
class Newton(nn.Module):
    """a layer that solves a linear system"""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 9), nn.Linear(3, 4)

    def forward(self, x, t):
        matrix = self.a(x).view(-1, 3, 3)
        system = matrix @ matrix.transpose(1, 2) + torch.eye(3, dtype=x.dtype)
        return self.b(torch.linalg.solve(system, x[:, :3]))
