"""Convolutions, and what networks for images are made of: x is an image of one channel, 2 x 3."""

from __future__ import annotations

from corpus.base import F, case_of, nn, torch


def image(x):
    """A larger image of x, shape [B, 1, 6, 6], with numbers that differ."""
    return torch.einsum("bi,bj->bij", x, x.roll(1, 1)).unsqueeze(1)


@case_of
class ConvPool(nn.Module):
    """convolutions, pooling and a linear head"""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3)
        self.head = nn.Linear(8, 4)

    def forward(self, x, t):
        h = F.max_pool2d(torch.relu(self.conv1(image(x))), 2)
        return self.head(torch.relu(self.conv2(h)).flatten(1))


@case_of
class Depthwise(nn.Module):
    """depthwise, pointwise and dilated convolutions"""

    def __init__(self):
        super().__init__()
        self.point = nn.Conv2d(1, 6, 1)
        self.depth = nn.Conv2d(6, 6, 3, groups=6, padding=2, dilation=2, bias=False)
        self.head = nn.Linear(6, 4)

    def forward(self, x, t):
        return self.head(F.gelu(self.depth(self.point(image(x)))).mean((2, 3)))


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(2, width), nn.GroupNorm(2, width)
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)

    def forward(self, h):
        h = h + self.conv1(F.silu(self.norm1(h)))
        return h + self.conv2(F.silu(self.norm2(h)))


@case_of
class ResNet(nn.Module):
    """residual blocks with group normalization, in a list"""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.blocks = nn.ModuleList([Residual(4) for _ in range(3)])
        self.head = nn.Linear(4, 4)

    def forward(self, x, t):
        h = self.stem(image(x))
        for block in self.blocks:
            h = block(h)
        return self.head(h.mean((2, 3)))


@case_of
class UNet(nn.Module):
    """outputs of early layers are joined to those of late ones"""

    def __init__(self):
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.out = nn.Conv2d(8, 4, 1)

    def forward(self, x, t):
        first = torch.relu(self.down1(image(x)))
        second = torch.relu(self.down2(first))
        return self.out(torch.cat([first, self.up(second)], 1)).mean((2, 3))


@case_of
class PatchVit(nn.Module):
    """patches, a class token and learned positions before a transformer"""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(1, 8, 3, stride=3)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.positions = nn.Parameter(torch.randn(1, 5, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 4)

    def forward(self, x, t):
        patches = self.patches(image(x)).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), patches], 1) + self.positions
        return self.head(self.layers(tokens)[:, 0])


@case_of
class SqueezeExcite(nn.Module):
    """channels are weighed by what all positions say"""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.gate = nn.Sequential(nn.Linear(8, 2), nn.ReLU(), nn.Linear(2, 8), nn.Sigmoid())
        self.head = nn.Linear(8, 4)

    def forward(self, x, t):
        h = self.conv(image(x))
        return self.head((h * self.gate(h.mean((2, 3)))[:, :, None, None]).amax((2, 3)))


class ConvNextBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.depth = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, h):
        y = self.norm(self.depth(h).permute(0, 2, 3, 1))
        return h + (self.scale * self.down(F.gelu(self.up(y)))).permute(0, 3, 1, 2)


@case_of
class ConvNext(nn.Module):
    """layer normalization over channels, and a learned scale of each branch"""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 6, 2, stride=2)
        self.blocks = nn.Sequential(*[ConvNextBlock(6) for _ in range(3)])
        self.head = nn.Linear(6, 4)

    def forward(self, x, t):
        return self.head(self.blocks(self.stem(image(x))).mean((2, 3)))


@case_of
class PixelShuffle(nn.Module):
    """a convolution whose channels become positions"""

    def __init__(self):
        super().__init__()
        self.conv, self.out = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(2, 4, 3)
        self.shuffle = nn.PixelShuffle(2)

    def forward(self, x, t):
        return self.out(torch.tanh(self.shuffle(self.conv(image(x))))).amax((2, 3))


@case_of
class WeightStandardized(nn.Conv2d):
    """the model itself is a subclass of Conv2d, with standardized weights"""

    def __init__(self):
        super().__init__(1, 4, 3)

    def forward(self, x, t):
        weight = (self.weight - self.weight.mean((1, 2, 3), keepdim=True)) / (
            self.weight.std((1, 2, 3), keepdim=True) + 1e-5
        )
        return self._conv_forward(image(x), weight, self.bias).mean((2, 3))


@case_of
class MaxUnpool(nn.Module):
    """indices of a pooling are used by a later layer"""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 4, 3)
        self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)

    def forward(self, x, t):
        pooled, places = self.pool(torch.tanh(self.conv1(image(x))))
        return self.conv2(self.unpool(pooled, places)).mean((2, 3))


@case_of
class ChannelsLast(nn.Module):
    """weights and activations in channels_last, made so in the model"""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.head = nn.Linear(4, 4)

    def forward(self, x, t):
        h = self.conv(image(x).contiguous(memory_format=torch.channels_last))
        return self.head(torch.relu(h).mean((2, 3)))


@case_of
class SpatialTransformer(nn.Module):
    """an image is sampled on a grid that the model computes"""

    def __init__(self):
        super().__init__()
        self.where = nn.Linear(6, 6)
        self.conv = nn.Conv2d(1, 4, 3)

    def forward(self, x, t):
        theta = torch.eye(2, 3, dtype=x.dtype) + 0.1 * torch.tanh(self.where(x)).view(-1, 2, 3)
        grid = F.affine_grid(theta, [len(x), 1, 6, 6], align_corners=False)
        return self.conv(F.grid_sample(image(x), grid, align_corners=False)).mean((2, 3))
