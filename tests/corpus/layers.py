"""PyTorch's layers, and how modules are made of others."""

from __future__ import annotations

from torch.nn.utils import parametrizations as P
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from corpus.base import MLP, Case, F, nn, torch


class GruNet(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.emb = nn.Embedding(20, 8, padding_idx=0)
        self.rnn = (nn.GRU if kind == "gru" else nn.LSTM)(
            8, 7, num_layers=2, bidirectional=True, batch_first=True
        )
        self.out = nn.Linear(14, 4)

    def forward(self, t, ln):
        p = pack_padded_sequence(self.emb(t), ln.cpu(), batch_first=True, enforce_sorted=False)
        o, _ = self.rnn(p)
        o, _ = pad_packed_sequence(o, batch_first=True, total_length=5)
        return self.out(o.sum(1))


class Gru(Case):
    kind = "gru"

    def net(self):
        return GruNet(self.kind)

    def loss(self, model, batch):
        x, t, ln, y, i = batch
        return F.cross_entropy(model(t, ln), y)


class Lstm(Gru):
    kind = "lstm"


class ConvNet(nn.Module):
    def __init__(self, spectral):
        super().__init__()
        self.c1 = P.weight_norm(nn.Conv2d(1, 6, 3, padding=1))
        self.gn = nn.GroupNorm(3, 6)
        self.c2 = nn.Conv2d(6, 4, (2, 3))
        self.out = P.weight_norm(nn.Linear(4, 4))
        if spectral:
            P.spectral_norm(self.c2)

    def forward(self, x, t):
        h = F.relu(self.gn(self.c1(x.view(-1, 1, 2, 3))))
        return self.out(self.c2(h).flatten(1))


class WeightNorm(Case):
    def net(self):
        return ConvNet(False)


class Spectral(Case):
    stateful = True

    def net(self):
        return ConvNet(True)


class TransNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(20, 8)
        self.enc = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
        )
        self.dec = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2
        )
        self.out = nn.Linear(8, 4)

    def forward(self, t, mask=None):
        h = self.enc(self.emb(t))
        return self.out(self.dec(self.emb(t.flip(1)), h).mean(1))


class Trans(Case):
    plan = "own"

    def net(self):
        return TransNet()

    def loss(self, model, batch):
        x, t, ln, y, i = batch
        return F.cross_entropy(model(t), y)


class InPlaceNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.out = nn.Linear(6, 4)

    def forward(self, x, t):
        h = x
        for l in self.l:
            h = l(h)
            h.add_(1.0)
            h.relu_()
        return self.out(h)


class InPlace(Case):
    def net(self):
        return InPlaceNet()


class BnEval(Case):
    """BatchNorm with frozen statistics: module.eval() in train() override"""

    def net(self):
        class M(nn.Module):
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(6, 8)
                self.bn = nn.BatchNorm1d(8)
                self.b = nn.Linear(8, 4)

            def train(self, mode=True):
                super().train(mode)
                self.bn.eval()
                return self

            def forward(self, x, t):
                return self.b(torch.relu(self.bn(self.a(x))))

        return M()


class FullBatch(Case):
    def net(self):
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))

    def loss(self, model, batch):
        x, t, ln, y, i = batch
        return F.cross_entropy(model(x), y)


class BnNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.block = nn.Sequential(nn.BatchNorm1d(8), nn.ReLU())
        self.b = nn.Linear(8, 4)

    def forward(self, x, t):
        return self.b(self.block(self.a(x)))


class Bn(Case):
    job = {"train": {"sync_batch_norm": True}}
    num_samples = 31
    settings = ("easy",)

    def net(self):
        return BnNet()


class CountBlock(Case):
    """a block that counts its calls in a buffer the output depends on"""

    stateful = True

    def net(self):
        class B(nn.Module):
            def __init__(self):
                super().__init__()
                self.l = nn.Linear(8, 8)
                self.register_buffer("k", torch.zeros(()))

            def forward(self, h):
                if self.training:
                    self.k += 1
                return self.l(h) / (1 + self.k)

        class M(nn.Module):
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(6, 8)
                self.block = B()
                self.b = nn.Linear(8, 4)

            def forward(self, x, t):
                return self.b(torch.tanh(self.block(torch.tanh(self.a(x)))))

        return M()


class NestedSeq(Case):
    def net(self):
        return nn.Sequential(
            nn.Sequential(nn.Linear(6, 8), nn.Tanh()),
            nn.Sequential(nn.Linear(8, 8), nn.Tanh()),
            nn.Linear(8, 4),
        )

    def loss(self, model, batch):
        x, t, ln, y, i = batch
        return F.cross_entropy(model(x), y)


class SubSeqNet(nn.Sequential):
    def forward(self, x):
        return super().forward(x * 2) + x[:, :4]


class SubSeq(FullBatch):
    """a subclass of Sequential with a forward of its own"""

    def net(self):
        return SubSeqNet(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


class EvalMode(Case):
    """the task puts a part of the model into eval mode in the loss"""

    def net(self):
        m = MLP()
        m.dr = nn.Dropout(0.9)

        class M(MLP):
            def __init__(self):
                super().__init__()
                self.dr = nn.Dropout(0.9)

            def forward(self, x, t):
                h = torch.tanh(self.inp(x))
                h = self.dr(h)
                h = h + self.down(torch.tanh(self.up(h)))
                return self.out(h)

        return M()

    def loss(self, model, batch):
        m = getattr(model, "module", model)
        m.dr.eval()
        return super().loss(model, batch)


class BnRecomputed(Bn):
    """activation checkpointing of a block with statistics"""

    job = {"train": {"sync_batch_norm": True, "activation_checkpointing": ["block"]}}


class SpectralRecomputed(Spectral):
    job = {"train": {"activation_checkpointing": ["c2"]}}


class CountBlockRecomputed(CountBlock):
    job = {"train": {"activation_checkpointing": ["block"]}}
