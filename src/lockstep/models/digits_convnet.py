"""A small residual network for 8x8 images of digits, which trains quickly on a single CPU core.

The network has BatchNorm and dropout on purpose: their results depend on how a batch is split into micro-batches, but
must not depend on which rank computes a micro-batch.
"""

from typing import final

from torch import Tensor, nn


def digits_convnet(num_classes: int = 10, in_channels: int = 1, width: int = 32, dropout: float = 0.1) -> nn.Module:
    """Return a network for images of shape [n, in_channels, height, width], with 8x8 pixels or slightly more.

    `width` is the number of channels at full resolution. The blocks at half resolution have twice as many channels.
    """
    return nn.Sequential(
        nn.Conv2d(in_channels, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        _Block(width, width, stride=1),
        _Block(width, 2 * width, stride=2),
        _Block(2 * width, 2 * width, stride=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(2 * width, num_classes),
    )


@final
class _Block(nn.Module):
    """A residual block with two 3x3 convolutions and a shortcut (He et al. 2015, figure 2)."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
        )
        self.shortcut = _make_shortcut(in_channels, out_channels, stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.relu(self.convolutions(x) + self.shortcut(x))
        return output


def _make_shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    if in_channels == out_channels and stride == 1:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels))
