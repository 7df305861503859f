"""BoTNet-50: a ResNet-50 with global self-attention instead of the 3x3 convolutions in its last stage.

Srinivas et al. 2021, "Bottleneck Transformers for Visual Recognition", arXiv 2101.11605, section 3, figure 4. The
letters in shapes are N for images, K for heads, P for positions of the feature map (row by row), and D for channels of
one head.
"""

from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.errors import UsageError

_CHANNELS = 512  # number of channels in the bottlenecks of the last stage of ResNet-50


def botnet50(
    num_classes: int = 1000,
    image_size: int = 224,
    heads: int = 4,
    last_stride: int = 1,
    zero_init_residual: bool = True,
) -> nn.Module:
    """Return BoTNet-50 for images of shape [n, 3, image_size, image_size]. The model doesn't support other image sizes.

    `last_stride` is the stride of the last stage. With stride 1, this is the S1 variant of the paper (20,859,176
    parameters with 1000 classes and 224 pixels). With stride 2, it is the plain variant (20,852,008 parameters), whose
    first block computes attention at full size and then applies 2x2 average pooling. Raises UsageError if `image_size`
    or `heads` isn't supported.
    """
    from torchvision.models import resnet50

    size = _compute_size_before_last_stage(image_size, heads, last_stride)
    network: nn.Module = resnet50(
        num_classes=num_classes,
        zero_init_residual=zero_init_residual,
        # In torchvision, a stride of 1 requires dilation. All dilated convolutions are replaced below.
        replace_stride_with_dilation=[False, False, last_stride == 1],
    )
    first_block, *later_blocks = network.get_submodule("layer4").children()
    _replace_convolution(first_block, size, heads, last_stride)
    for block in later_blocks:
        _replace_convolution(block, size // last_stride, heads, stride=1)
    return network


def _compute_size_before_last_stage(image_size: int, heads: int, last_stride: int) -> int:
    if last_stride not in (1, 2):
        raise UsageError(f"model botnet50: last_stride must be 1 or 2, got {last_stride}")
    if heads < 1 or _CHANNELS % heads:
        raise UsageError(f"model botnet50: {heads} heads do not divide {_CHANNELS} channels; use a power of two")
    divisor = 16 * last_stride
    if image_size < divisor or image_size % divisor:
        nearest = max(divisor, round(image_size / divisor) * divisor)
        raise UsageError(f"model botnet50: image_size {image_size} is not a multiple of {divisor}; use {nearest}")
    return image_size // 16


def _replace_convolution(block: nn.Module, size: int, heads: int, stride: int) -> None:
    """Replace the 3x3 convolution of a bottleneck block with attention, followed by average pooling if stride is 2."""
    attention: nn.Module = Attention(_CHANNELS, heads, size, size)
    if stride == 2:
        attention = nn.Sequential(attention, nn.AvgPool2d(2))
    block.add_module("conv2", attention)


@final
class Attention(nn.Module):
    """Multi-head self-attention over the positions of a feature map, with 2-D relative position encodings.

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
        # Don't use a fused kernel, because not every fused kernel has a deterministic backward pass for a learned bias.
        logits = queries @ keys.transpose(-2, -1) + self.position(queries)
        output: Tensor = logits.softmax(dim=-1) @ values
        return output.transpose(-2, -1).reshape(n, channels, height, width)


@final
class RelativePosition(nn.Module):
    """Relative position logits from learned vectors for each row difference and each column difference.

    A difference is the key position minus the query position. `rows[i]` is the vector for the row difference
    i - (height - 1), and `columns[i]` is the vector for the column difference i - (width - 1).
    """

    def __init__(self, channels: int, height: int, width: int) -> None:
        super().__init__()
        self.height, self.width = height, width
        scale = channels**-0.5
        self.rows = nn.Parameter(torch.randn(2 * height - 1, channels) * scale)
        self.columns = nn.Parameter(torch.randn(2 * width - 1, channels) * scale)

    def forward(self, queries: Tensor) -> Tensor:
        """Return the bias of the attention logits, with shape [N, K, P queries, P keys], for queries [N, K, P, D]."""
        q = queries.view(*queries.shape[:2], self.height, self.width, -1)
        # The shapes are [N, K, height, width, height of the key] and [N, K, height, width, width of the key].
        rows = _align_to_keys(q.transpose(2, 3) @ self.rows.T).transpose(2, 3)
        columns = _align_to_keys(q @ self.columns.T)
        logits = rows.unsqueeze(-1) + columns.unsqueeze(-2)
        return logits.flatten(4).flatten(2, 3)


def _align_to_keys(logits: Tensor) -> Tensor:
    """Convert logits from [..., L queries, 2L - 1 differences] to [..., L queries, L keys].

    The difference between key k and query q has index k - q + L - 1. To avoid a gather, a zero is appended to each row,
    so that its length is 2L. Then the rows are flattened and split into rows of length 2L - 1. This shifts each row by
    one position relative to the row above, so that each key is in a single column (Huang et al. 2018, "Music
    Transformer", section 3.4.1).
    """
    *outer, length, differences = logits.shape
    flat = F.pad(logits, (0, 1)).flatten(-2)
    shifted = F.pad(flat, (0, length - 1)).view(*outer, length + 1, differences)
    return shifted[..., :length, length - 1 :]
