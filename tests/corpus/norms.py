"""Normalization over the joint batch: `train.sync_batch_norm`, and PyTorch's and Horovod's own layers."""

from __future__ import annotations

from corpus.base import Case, F, nn, torch

SYNC = {"train": {"sync_batch_norm": True}}


class ConvBnNet(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, padding=1)
        self.bn1 = norm(4)
        self.conv2 = nn.Conv2d(4, 6, (2, 3))
        self.bn2 = nn.BatchNorm1d(6, affine=False)
        self.out = nn.Linear(6, 4)

    def forward(self, x, t):
        h = torch.relu(self.bn1(self.conv1(x.view(-1, 1, 2, 3))))
        return self.out(self.bn2(self.conv2(h).flatten(1)))


class ConvBn(Case):
    job = SYNC
    num_samples = 31
    settings = ("easy",)

    def net(self):
        return ConvBnNet(nn.BatchNorm2d)


class PytorchSyncBn(Case):
    """the task brings PyTorch's SyncBatchNorm"""

    job = SYNC
    num_samples = 31
    settings = ("easy",)

    def net(self):
        return ConvBnNet(nn.SyncBatchNorm)

    def plain(self, model):
        return ConvBnNet(nn.BatchNorm2d).to(self.dtype)


class BnNoStats(Case):
    """no running statistics: those of the batch in evaluation, too"""

    job = SYNC
    num_samples = 31
    settings = ("easy",)

    def net(self):
        class M(nn.Module):
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(6, 8)
                self.bn = nn.BatchNorm1d(8, track_running_stats=False)
                self.b = nn.Linear(8, 4)

            def forward(self, x, t):
                return self.b(torch.relu(self.bn(self.a(x))))

        return M()


class BnCumulative(Case):
    """a cumulative average of statistics, and a batch normalization that is used twice"""

    job = SYNC
    num_samples = 31
    settings = ("easy",)

    def net(self):
        class M(nn.Module):
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(6, 8)
                self.bn = nn.BatchNorm1d(8, momentum=None)
                self.b = nn.Linear(8, 8)
                self.out = nn.Linear(8, 4)

            def forward(self, x, t):
                h = torch.relu(self.bn(self.a(x)))
                return self.out(torch.relu(self.bn(self.b(h))))

        return M()


class OwnBatchStatistic(Case):
    """a running mean of one's own, in a buffer that the output uses, averaged over ranks"""

    stateful = True
    job = {"train": {"average_buffers": ["norm.mean"]}}

    def net(self):
        class Norm(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("mean", torch.zeros(8))

            def forward(self, h):
                out = h - self.mean
                if self.training:
                    with torch.no_grad():
                        self.mean.lerp_(h.mean(0), 0.1)
                return out

        class M(nn.Module):
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(6, 8)
                self.norm = Norm()
                self.b = nn.Linear(8, 4)

            def forward(self, x, t):
                return self.b(torch.tanh(self.norm(self.a(x))))

        return M()


class OwnBatchStatisticForgotten(OwnBatchStatistic):
    """Own Batch Statistic without `train.average_buffers`: refused where replicas differ"""

    is_refused = True

    job = {}


class InstanceNorm(Case):
    """statistics of each sample, and running ones of all"""

    stateful = True

    def net(self):
        class M(nn.Module):
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(6, 8)
                self.norm = nn.InstanceNorm1d(2, affine=True)
                self.b = nn.Linear(8, 4)

            def forward(self, x, t):
                return self.b(torch.tanh(self.norm(self.a(x).view(-1, 2, 4)).flatten(1)))

        return M()


class RmsNorm(Case):
    def net(self):
        class M(nn.Module):
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(6, 8)
                self.norm = nn.RMSNorm(8)
                self.b = nn.Linear(8, 4)

            def forward(self, x, t):
                return self.b(F.silu(self.norm(self.a(x))))

        return M()
