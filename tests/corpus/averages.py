"""Sums and counts, rates of groups, averages of weights, and optimizers with two modes."""

from __future__ import annotations

from corpus.base import MLP, Case, F, Samples, nn, torch


class TokenMean(Case):
    """a mean over the tokens that are not padding, whose number differs between ranks"""

    def net(self):
        class M(nn.Module):
            def __init__(self):
                super().__init__()
                self.emb = nn.Embedding(20, 8)
                self.up = nn.Linear(8, 16)
                self.out = nn.Linear(16, 20)

            def forward(self, t):
                return self.out(torch.tanh(self.up(self.emb(t))))

        return M()

    def loss(self, model, batch):
        _, t, lengths, _, _ = batch
        is_token = torch.arange(5) < lengths[:, None]
        targets = torch.where(is_token, t.flip(1), -100)
        total = F.cross_entropy(model(t).flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
        return total, is_token.sum()


class WeightedSamples(Case):
    """a mean with weights of samples, such as of classes"""

    def net(self):
        return MLP()

    def loss(self, model, batch):
        x, t, _, y, _ = batch
        weights = torch.tensor([1.0, 0.5, 2.0, 0.1], dtype=x.dtype)
        total = F.cross_entropy(model(x, t), y, weight=weights, reduction="sum")
        return total, weights[y].sum()


class KeptSamples(Case):
    """a collate that leaves out samples"""

    def net(self):
        return MLP()

    def train_data(self):
        class Kept(Samples):
            def collate(self, samples):
                kept = [sample for sample in samples if sample[4] % 3] or samples[:1]
                return torch.utils.data.default_collate(kept), len(kept)

        return Kept(self.num_samples, self.dtype)

    def loss(self, model, batch):
        (x, t, _, y, _), num = batch
        return F.cross_entropy(model(x, t), y, reduction="sum"), num


class GroupRates(Case):
    """parameter groups with their own learning rates, one of them zero"""

    def net(self):
        return MLP()

    def param_groups(self, model):
        named = {name.removeprefix("module."): p for name, p in model.named_parameters()}
        of = {
            part: [p for name, p in named.items() if name.startswith(part)]
            for part in ("inp", "up", "down", "out")
        }
        return [
            {"params": of["inp"], "lr": 0.0},
            {"params": of["up"], "lr": 0.1},
            {"params": of["down"], "lr": 0.02, "lr_scale": 0.5},
            {"params": of["out"]},
        ]


class Ema(Case):
    job = {"ema": {"decay": 0.7}}

    def net(self):
        return MLP()


class AfterUpdate(Case):
    """the task clips weights after each update (WGAN), and keeps an average of its own in a buffer"""

    def net(self):
        class M(MLP):
            def __init__(self):
                super().__init__()
                self.register_buffer("average", torch.zeros(4))

        return M()

    def after_update(self, model):
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.3, 0.3)
            if not hasattr(model.out.bias, "to_local") and model.out.bias.numel() == 4:
                model.average.lerp_(model.out.bias, 0.1)


class ScheduleFree(Case):
    """evaluates and exports other weights than it trains"""

    optimizer = ("pytorch_optimizer:ScheduleFreeAdamW", {"weight_decay": 0.1})

    def net(self):
        return MLP()


class StableAdamW(Case):
    """clips by the root mean square of a whole tensor, sometimes"""

    optimizer = ("pytorch_optimizer:StableAdamW", {})

    def net(self):
        return MLP()
