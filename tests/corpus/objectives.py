"""Losses over several calls, several heads, and the samples of a batch together."""

from __future__ import annotations

import copy

from corpus.base import MLP, Case, F, nn, torch


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


class Contrastive(Case):
    """other samples of the micro-batch are the negatives"""

    splits = True

    def net(self):
        return Encoder()

    def loss(self, model, batch):
        x = batch[0]
        first, second = F.normalize(model(x), dim=1), F.normalize(model(x.flip(1)), dim=1)
        return F.cross_entropy(first @ second.T / 0.5, torch.arange(len(x)))


class GatheredMean(Case):
    """a term over the scores of all ranks, by `self.all_gather(scores, sync_grads=True)` of Lightning"""

    only = ("lightning",)
    num_samples = 24  # each rank gathers equally many rows
    settings = ("easy",)  # a gather contains one micro-batch of each rank

    def net(self):
        return MLP()

    def gather(self, scores):
        return scores

    def loss(self, model, batch):
        x, t, _, y, _ = batch
        scores = model(x, t)
        return F.cross_entropy(scores, y) + self.gather(scores).mean(0).exp().sum()


class Triplet(Case):
    """the model is called three times in a loss"""

    def net(self):
        net = Encoder()
        net.b.register_parameter("bias", None)  # distances cancel it: AdamW would amplify rounding errors
        return net

    def loss(self, model, batch):
        x = batch[0]
        return F.triplet_margin_loss(model(x), model(x * 1.1), model(-x))


class Siamese(Case):
    """two inputs in one call, by concatenation"""

    def net(self):
        return Encoder()

    def loss(self, model, batch):
        x, _, _, y, _ = batch
        first, second = model(torch.cat([x, x.roll(1, 1)])).chunk(2)
        return F.cosine_embedding_loss(first, second, (y % 2) * 2 - 1)


class Heads(Case):
    """three heads in a dictionary, each with a loss of its own"""

    def net(self):
        class M(nn.Module):
            def __init__(self):
                super().__init__()
                self.body = nn.Linear(6, 8)
                self.heads = nn.ModuleDict(
                    {"kind": nn.Linear(8, 4), "size": nn.Linear(8, 1), "parity": nn.Linear(8, 2)}
                )

            def forward(self, x):
                h = torch.relu(self.body(x))
                return {name: head(h) for name, head in self.heads.items()}

        return M()

    def loss(self, model, batch):
        x, _, lengths, y, _ = batch
        found = model(x)
        return (
            F.cross_entropy(found["kind"], y)
            + 0.1 * F.mse_loss(found["size"][:, 0], lengths.to(x.dtype))
            + 0.5 * F.cross_entropy(found["parity"], y % 2)
        )


class Uncertainty(Case):
    """tasks are weighed by parameters of the model, which the loss uses"""

    def net(self):
        class M(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 1)
                self.log_variance = nn.Parameter(torch.zeros(2))

            def forward(self, x):
                h = torch.relu(self.body(x))
                return self.first(h), self.second(h), self.log_variance.clone()

        return M()

    def loss(self, model, batch):
        x, _, lengths, y, _ = batch
        first, second, log_variance = model(x)
        losses = torch.stack([F.cross_entropy(first, y), F.mse_loss(second[:, 0], lengths.to(x.dtype))])
        return (losses * torch.exp(-log_variance) + log_variance).sum()


class Distillation(Case):
    """a frozen teacher is a part of the model"""

    def net(self):
        class M(nn.Module):
            def __init__(self):
                super().__init__()
                self.teacher, self.student = Encoder().requires_grad_(False), Encoder()

            def forward(self, x):
                return self.teacher(x), self.student(x)

        return M()

    def loss(self, model, batch):
        teacher, student = model(batch[0])
        return F.kl_div(student.log_softmax(1), teacher.softmax(1), reduction="batchmean")


class TeacherOutside(Case):
    """a frozen teacher belongs to the task"""

    def __init__(self, **settings):
        super().__init__(**settings)
        with torch.random.fork_rng([]):
            torch.manual_seed(3)
            self.teacher = Encoder().to(self.dtype).requires_grad_(False)

    def net(self):
        return Encoder()

    def loss(self, model, batch):
        with torch.no_grad():
            target = self.teacher(batch[0])
        return F.mse_loss(model(batch[0]), target)


class Autoencoder(Case):
    """noise computed from the sample's number, so that it is the same on any rank"""

    def net(self):
        return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 6))

    def loss(self, model, batch):
        x, i = batch[0], batch[4]
        noise = torch.sin(i[:, None] * torch.arange(1, 7)).to(x.dtype)
        return F.mse_loss(model(x + 0.1 * noise), x)


class Variational(Case):
    """mean and variance of a code, and a divergence"""

    def net(self):
        class M(nn.Module):
            def __init__(self):
                super().__init__()
                self.encoder, self.decoder = nn.Linear(6, 8), nn.Linear(4, 6)

            def forward(self, x, noise):
                mean, log_variance = self.encoder(x).chunk(2, 1)
                return self.decoder(mean + noise * (log_variance / 2).exp()), mean, log_variance

        return M()

    def loss(self, model, batch):
        x, i = batch[0], batch[4]
        found, mean, log_variance = model(x, torch.cos(i[:, None] * torch.arange(1, 5)).to(x.dtype))
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(1) / 2
        return (F.mse_loss(found, x, reduction="none").sum(1) + 0.1 * divergence).mean()


class Adversarial(Case):
    """generator and discriminator in one model, trained against each other by a reversed gradient"""

    def net(self):
        class Reversed(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.view_as(x)

            @staticmethod
            def backward(ctx, gradient):
                return -gradient

        class M(nn.Module):
            def __init__(self):
                super().__init__()
                self.generator, self.judge = (
                    nn.Linear(3, 6),
                    nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)),
                )

            def forward(self, x):
                made = Reversed.apply(torch.tanh(self.generator(x[:, :3])))
                return self.judge(x), self.judge(made)

        return M()

    def loss(self, model, batch):
        real, made = model(batch[0])
        return F.softplus(-real).mean() + F.softplus(made).mean()


class TwoPasses(Case):
    """two calls with different inputs, of which the second uses the first one's detached output"""

    def net(self):
        class M(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 4)

            def forward(self, x):
                h = x + torch.tanh(self.a(x))
                return h, self.b(h)

        return M()

    def loss(self, model, batch):
        x, y = batch[0], batch[3]
        h, first = model(x)
        _, second = model(h.detach())
        return F.cross_entropy(first, y) + F.cross_entropy(second, y)


class SimSiam(Case):
    """gradients stop in one branch"""

    def net(self):
        class M(nn.Module):
            def __init__(self):
                super().__init__()
                self.encoder, self.predictor = Encoder(), nn.Linear(5, 5)

            def forward(self, x):
                z = self.encoder(x)
                return z, self.predictor(z)

        return M()

    def loss(self, model, batch):
        x = batch[0]
        (z1, p1), (z2, p2) = model(x), model(x.flip(1))
        return -(F.cosine_similarity(p1, z2.detach()) + F.cosine_similarity(p2, z1.detach())).mean() / 2


class Byol(Case):
    """a target network follows the trained one, in after_update"""

    def net(self):
        class M(nn.Module):
            def __init__(self):
                super().__init__()
                self.online = Encoder()
                self.target = copy.deepcopy(self.online).requires_grad_(False)

            def forward(self, x):
                return self.online(x), self.target(x.flip(1))

        return M()

    def loss(self, model, batch):
        online, target = model(batch[0])
        return F.mse_loss(online, target.detach())

    def after_update(self, model):
        with torch.no_grad():
            for mean, trained in zip(model.target.parameters(), model.online.parameters(), strict=True):
                mean.lerp_(trained, 0.1)


class MixUp(Case):
    """pairs of samples of the same micro-batch are mixed"""

    splits = True

    def net(self):
        return MLP()

    def loss(self, model, batch):
        x, t, _, y, _ = batch
        found = model(0.7 * x + 0.3 * x.flip(0), t)
        return 0.7 * F.cross_entropy(found, y) + 0.3 * F.cross_entropy(found, y.flip(0))


class DeepSupervision(Case):
    """each layer has a head, and the loss looks at all of them"""

    def net(self):
        class M(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
                self.heads = nn.ModuleList([nn.Linear(6, 4) for _ in range(3)])

            def forward(self, x):
                found = []
                for layer, head in zip(self.layers, self.heads, strict=True):
                    x = x + torch.tanh(layer(x))
                    found.append(head(x))
                return torch.stack(found)

        return M()

    def loss(self, model, batch):
        return sum(F.cross_entropy(each, batch[3]) for each in model(batch[0]))


class LabelSmoothing(Case):
    """a loss with smoothed labels, and a penalty of large logits"""

    def net(self):
        return MLP()

    def loss(self, model, batch):
        x, t, _, y, _ = batch
        logits = model(x, t)
        return F.cross_entropy(logits, y, label_smoothing=0.1) + 1e-2 * logits.logsumexp(1).square().mean()


class Ranking(Case):
    """a loss over all pairs of a sample's scores"""

    def net(self):
        return MLP()

    def loss(self, model, batch):
        x, t, _, y, _ = batch
        scores = model(x, t)
        right = scores.gather(1, y[:, None])
        return F.relu(1 - right + scores).mean()


class Reinforce(Case):
    """actions and rewards come with the samples; their log probabilities are weighed"""

    def net(self):
        return MLP()

    def loss(self, model, batch):
        x, t, lengths, y, _ = batch
        policy = torch.distributions.Categorical(logits=model(x, t))
        return -(policy.log_prob(y) * (lengths - 3) + 0.01 * policy.entropy()).mean()


class Huber(Case):
    """a smooth L1 loss, with a weight for each sample from the data"""

    def net(self):
        class M(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 1)

            def forward(self, x):
                return self.b(F.elu(self.a(x)))[:, 0]

        return M()

    def loss(self, model, batch):
        x, _, lengths, y, _ = batch
        return (F.smooth_l1_loss(model(x), y.to(x.dtype), reduction="none") * lengths).mean()
