"""BoTNet-50: a ResNet-50 with self-attention over the whole image instead of 3x3 convolutions in its last stage.

Srinivas et al. 2021, "Bottleneck Transformers for Visual Recognition", arXiv 2101.11605, section 3, figure 4. Shapes: N
images, K heads, P positions of the feature map (row by row), D channels of one head.
"""

from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.errors import UsageError

_CHANNELS = 512  # in the bottlenecks of ResNet-50's last stage


def botnet50(
    num_classes: int = 1000,
    image_size: int = 224,
    heads: int = 4,
    last_stride: int = 1,
    zero_init_residual: bool = True,
) -> nn.Module:
    """Return BoTNet-50 for images of shape [n, 3, image_size, image_size]. Its positions don't support any other size.

    `last_stride` is the stride of the last stage: 1 for the paper's S1 variant (20,859,176 parameters with 1000 classes
    and 224 pixels), or 2 for the plain variant (20,852,008). With 2, the first block computes attention at full size,
    and averages its output over 2x2. Raises UsageError if the sizes don't fit.
    """
    from torchvision.models import resnet50

    size = _size_before_last_stage(image_size, heads, last_stride)
    network: nn.Module = resnet50(
        num_classes=num_classes,
        zero_init_residual=zero_init_residual,
        # torchvision only offers a stride of 1 by dilation. The dilated convolutions are the ones that are replaced.
        replace_stride_with_dilation=[False, False, last_stride == 1],
    )
    first_block, *later_blocks = network.get_submodule("layer4").children()
    _attend(first_block, size, heads, last_stride)
    for block in later_blocks:
        _attend(block, size // last_stride, heads, stride=1)
    return network


def _size_before_last_stage(image_size: int, heads: int, last_stride: int) -> int:
    if last_stride not in (1, 2):
        raise UsageError(f"model botnet50: last_stride must be 1 or 2, got {last_stride}")
    if heads < 1 or _CHANNELS % heads:
        raise UsageError(f"model botnet50: {heads} heads do not divide {_CHANNELS} channels; use a power of two")
    pixels = 16 * last_stride
    if image_size < pixels or image_size % pixels:
        nearest = max(pixels, round(image_size / pixels) * pixels)
        raise UsageError(
            f"model botnet50: image_size {image_size} is not a multiple of {pixels}; use {nearest}, the nearest"
        )
    return image_size // 16


def _attend(block: nn.Module, size: int, heads: int, stride: int) -> None:
    """Replace the 3x3 convolution of a bottleneck with attention, followed by pooling instead of the stride."""
    attention: nn.Module = Attention(_CHANNELS, heads, size, size)
    if stride == 2:
        attention = nn.Sequential(attention, nn.AvgPool2d(2))
    block.add_module("conv2", attention)


@final
class Attention(nn.Module):
    """Multi-head self-attention over the positions of a feature map, with relative positions in 2-D.

    Input and output have shape [N, channels, height, width].
    """

    def __init__(self, channels: int, heads: int, height: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.scale = (channels // heads) ** -0.5
        self.queries_keys_values = nn.Conv2d(channels, 3 * channels, 1, bias=False)
        self.position = RelativePosition(channels // heads, height, width)

    def forward(self, x: Tensor) -> Tensor:
        n, channels, height, width = x.shape
        # Queries, keys and values have shape [N, K, P, D].
        projections = self.queries_keys_values(x).view(n, 3, self.heads, channels // self.heads, height * width)
        queries, keys, values = projections.transpose(-2, -1).unbind(1)
        queries = queries * self.scale
        # Doesn't use a fused kernel, since not every fused kernel has a deterministic backward for a learned bias.
        logits = queries @ keys.transpose(-2, -1) + self.position(queries)
        output: Tensor = logits.softmax(dim=-1) @ values
        return output.transpose(-2, -1).reshape(n, channels, height, width)


@final
class RelativePosition(nn.Module):
    """Relative position logits, from a learned vector for each row difference and for each column difference.

    Row i of `rows` is the vector of the row difference i - (height - 1), which is the key's row minus the query's row.
    The same applies to `columns`.
    """

    def __init__(self, channels: int, height: int, width: int) -> None:
        super().__init__()
        self.height, self.width = height, width
        scale = channels**-0.5
        self.rows = nn.Parameter(torch.randn(2 * height - 1, channels) * scale)
        self.columns = nn.Parameter(torch.randn(2 * width - 1, channels) * scale)

    def forward(self, queries: Tensor) -> Tensor:
        """Return the summand of the logits, [N, K, P queries, P keys], for scaled queries [N, K, P, D]."""
        q = queries.view(*queries.shape[:2], self.height, self.width, -1)
        # [N, K, height, width, height of the key] and [N, K, height, width, width of the key]
        rows = _align_to_keys(q.transpose(2, 3) @ self.rows.T).transpose(2, 3)
        columns = _align_to_keys(q @ self.columns.T)
        logits = rows.unsqueeze(-1) + columns.unsqueeze(-2)
        return logits.flatten(4).flatten(2, 3)


def _align_to_keys(logits: Tensor) -> Tensor:
    """Convert [..., L queries, 2L - 1 differences] to [..., L queries, L keys].

    Key k of query q has the difference k - q + L - 1. With a zero appended, each row has length 2L. If these rows are
    split again into rows of length 2L - 1, each row begins one position earlier than the row above. Each key is then in
    a single column, which works as a gather without an index (Huang et al. 2018, "Music Transformer", section 3.4.1).
    """
    *outer, length, differences = logits.shape
    flat = F.pad(logits, (0, 1)).flatten(-2)
    skewed = F.pad(flat, (0, length - 1)).view(*outer, length + 1, differences)
    return skewed[..., :length, length - 1 :]
