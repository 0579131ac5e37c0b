"""Models that many people train on several ranks, each as its authors write it and with the remedy that a
message names, if it has to be changed.
"""

from __future__ import annotations

from typing import Any, ClassVar

from corpus.base import MLP, Case, F, nn, torch
from horovod_train import gather

SHARES_UP_AND_DOWN = {"up": "colwise", "down": "rowwise"}


class Known(Case):
    """A case of this file.

    Attributes:
        told: What the job says of it; empty: nothing.
    """

    told = ""
    num_samples = 61


class MeanOfRank:
    """The mean over what a rank counts, in place of a sum and a count."""

    told = "return a sum and a count"
    is_refused = True

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        total, count = super().loss(model, batch)  # type: ignore[misc]
        return total / count


class SimCLROwn(Known):
    """SimCLR whose negatives are those of a rank: another training, of which the job warns"""

    told = "horovod_train.gather"
    splits = True
    plan: ClassVar[Any] = SHARES_UP_AND_DOWN

    def net(self) -> nn.Module:
        return MLP()

    def embedded(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, t, *_ = batch
        views = model(x, t), model(0.9 * x + 0.2 * x.flip(1), t)
        return F.normalize(views[0], dim=-1), F.normalize(views[1], dim=-1)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return nt_xent(*self.embedded(model, batch))


class SimCLR(SimCLROwn):
    """SimCLR with the negatives of all ranks"""

    told = ""
    splits = False

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        first, second = self.embedded(model, batch)
        return nt_xent(gather(first), gather(second))


def nt_xent(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Normalized temperature-scaled cross-entropy of two views, shape [N, D] each."""
    both = torch.cat([first, second])
    scores = (both @ both.T / 0.5).masked_fill(torch.eye(len(both), dtype=torch.bool), -1e9)
    return F.cross_entropy(scores, torch.arange(len(both)).roll(len(first)))


class CLIP(Known):
    """two towers and a learned temperature; a rank compares its own images with all texts and vice versa"""

    def net(self) -> nn.Module:
        class M(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.image, self.text = nn.Linear(6, 8), nn.Embedding(20, 8)
                self.logit_scale = nn.Parameter(torch.tensor(1.0))

            def forward(self, x: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, ...]:
                own = self.image(x), self.text(t).mean(1)
                return (*(F.normalize(each, dim=-1) for each in own), self.logit_scale.exp())

        return M()

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, t, _, _, i = batch
        image, text, scale = model(x, t)
        numbers = gather(i)
        place = (numbers == i[:, None]).nonzero()[:, 1]
        of_images = F.cross_entropy(scale * image @ gather(text).T, place)
        return (of_images + F.cross_entropy(scale * text @ gather(image).T, place)) / 2


class ReinforceOwn(Known):
    """REINFORCE whose baseline, a number of Python, follows the rewards of a rank"""

    told = "differ"
    stateful = True
    plan: ClassVar[Any] = SHARES_UP_AND_DOWN

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.baseline = 0.0

    def net(self) -> nn.Module:
        return MLP()

    def rewards_of_all(self, rewards: torch.Tensor) -> torch.Tensor:
        return rewards

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, t, _, y, i = batch
        actions = i % 4
        rewards = (actions == y).to(x.dtype)
        chosen = model(x, t).log_softmax(-1).gather(1, actions[:, None])[:, 0]
        loss = -(chosen * (rewards - self.baseline)).mean()
        self.baseline = 0.9 * self.baseline + 0.1 * float(self.rewards_of_all(rewards).mean())
        return loss


class Reinforce(ReinforceOwn):
    """REINFORCE whose baseline follows the rewards of all ranks"""

    told = ""

    def rewards_of_all(self, rewards: torch.Tensor) -> torch.Tensor:
        return gather(rewards)


class ClippedRNN(Known):
    """an RNN with hooks that clamp gradients"""

    def net(self) -> nn.Module:
        class M(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.emb, self.rnn, self.out = (
                    nn.Embedding(20, 6),
                    nn.GRU(6, 8, batch_first=True),
                    nn.Linear(8, 4),
                )
                for parameter in self.rnn.parameters():
                    parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))

            def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
                return self.out(self.rnn(self.emb(t))[0][:, -1])

        return M()


class GAN(Known):
    """generator and discriminator in turn; the discriminator is not trained in the generator's steps"""

    stateful = True

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.num_losses = 0

    def net(self) -> nn.Module:
        class M(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.g = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6))
                self.d = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

        return M()

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, t, *_ = batch
        self.num_losses += 1
        is_of_d = self.num_losses % 2 == 1
        model.d.requires_grad_(is_of_d)
        made = model.g(t.to(x.dtype) / 10)
        if is_of_d:
            return F.softplus(-model.d(x)).mean() + F.softplus(model.d(made.detach())).mean()
        return F.softplus(-model.d(made)).mean()


class Bert(Known):
    """masked tokens, label -100 elsewhere: the sum over them, and their count"""

    plan: ClassVar[Any] = {"mix": "colwise_gather"}

    def net(self) -> nn.Module:
        class M(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.emb, self.mix, self.out = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 20)

            def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
                h = self.emb(t)
                return self.out(torch.tanh(self.mix(h)) + h.mean(1, keepdim=True))

        return M()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, t, lengths, _, _ = batch
        labels = t.masked_fill(torch.arange(5) >= lengths[:, None], -100).flatten()
        scores = model(x, t).flatten(0, 1)
        return F.cross_entropy(scores, labels, reduction="sum"), (labels >= 0).sum()


class BertMean(MeanOfRank, Bert):
    """the mean over the masked tokens of a rank, as in Transformers' models"""


class EEGNetInForward(Known):
    """a layer that limits the norm of its weights in forward, by the samples of a rank as by those of all"""

    def net(self) -> nn.Module:
        class Constrained(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if self.training:
                    self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.5)
                return super().forward(x)

        model = MLP()
        model.up = Constrained(8, 16)
        return model


class EEGNet(Known):
    """the norm of weights is limited after each update"""

    def net(self) -> nn.Module:
        return MLP()

    def after_update(self, model: nn.Module) -> None:
        with torch.no_grad():
            model.up.weight.copy_(torch.renorm(model.up.weight, p=2, dim=0, maxnorm=0.5))


class DETR(Known):
    """errors of boxes, and the number of boxes"""

    plan: ClassVar[Any] = {"body": "colwise", "boxes": "rowwise"}

    def net(self) -> nn.Module:
        class M(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.body, self.boxes = nn.Linear(6, 8), nn.Linear(8, 20)

            def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
                return self.boxes(torch.tanh(self.body(x))).unflatten(1, (5, 4))

        return M()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, t, lengths, _, _ = batch
        is_box = torch.arange(5) < lengths[:, None]
        targets = torch.stack([t, t + 1, t + 2, t + 3], -1).to(x.dtype) / 20
        return ((model(x, t) - targets).abs().sum(-1) * is_box).sum(), is_box.sum()


class DETRMean(MeanOfRank, DETR):
    """errors of boxes, divided by the number of boxes of a rank"""


class Mamba(Known):
    """parameters with attributes, by which they are grouped"""

    optimizer = ("AdamW", {"eps": 1e-4})

    def net(self) -> nn.Module:
        class M(MLP):
            def __init__(self) -> None:
                super().__init__()
                self.A_log = nn.Parameter(torch.ones(8))
                self.A_log._no_weight_decay = True
                self.up.weight._no_weight_decay = True

            def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
                h = torch.tanh(self.inp(x)) * torch.exp(-self.A_log)
                return self.out(h + self.down(torch.tanh(self.up(h))))

        return M()

    def param_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        with_decay, without = [], []
        for parameter in model.parameters():
            (without if hasattr(parameter, "_no_weight_decay") else with_decay).append(parameter)
        return [{"params": with_decay, "weight_decay": 0.3}, {"params": without, "weight_decay": 0.0}]
