"""For each operation that has an exact path on CUDA, or none, a computation that uses it.

EXACT gives work to measure: a function makes the tensors, and returns what computes forward and backward with them.
REFUSED gives what torch is to refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.device.kernels import OLDEST_TORCH

Work = Callable[[], Sequence[Tensor]]
Make = Callable[[torch.device, int], Work]  # of a device and how many times larger than the smallest
Function = Callable[[Tensor], Tensor]


class Exact(NamedTuple):
    """Work to measure, what it is, and by which setting it is exact on CUDA, in torch `since`."""

    make: Make
    what: str
    by: str
    since: str = OLDEST_TORCH


def _noise(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the same values on every device and in every process."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()


def _whole(device: torch.device, below: int, *shape: int) -> Tensor:
    """Return indices below a bound, many of them equal."""
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(below)).to(device)


def _step(inputs: Sequence[Tensor], function: Callable[..., Tensor]) -> Work:
    """Return what computes `function` of `inputs`, and the gradients of all of them that have some."""
    wanted = [each for each in inputs if each.requires_grad]
    direction: list[Tensor] = []

    def work() -> Sequence[Tensor]:
        outputs = function(*inputs)
        if not direction:
            direction.append(_noise(outputs.device, *outputs.shape, dtype=outputs.dtype).detach())
        return [outputs.detach(), *torch.autograd.grad(outputs, wanted, direction[0])]

    return work


def _layer(layer: Callable[[], nn.Module], shape: Sequence[int], device: torch.device, times: int) -> Work:
    torch.manual_seed(0)
    module = layer().to(device)
    return _step([_noise(device, times, *shape), *module.parameters()], lambda inputs, *_: module(inputs))


def _of_images(function: Function, device: torch.device, times: int, channels: int = 16, size: int = 28) -> Work:
    return _step([_noise(device, 2 * times, channels, size, size)], function)


def _of_volumes(function: Function, device: torch.device, times: int) -> Work:
    return _step([_noise(device, times, 8, 12, 12, 12)], function)


def _convolution(dtype: torch.dtype, layout: torch.memory_format, device: torch.device, times: int) -> Work:
    torch.manual_seed(0)
    module = nn.Conv2d(32, 64, 3, padding=1).to(device, dtype).to(memory_format=layout)
    images = _noise(device, 2 * times, 32, 28, 28, dtype=dtype).detach().to(memory_format=layout).requires_grad_()
    return _step([images, *module.parameters()], lambda inputs, *_: module(inputs))


def _batch_norm(device: torch.device, times: int) -> Work:
    module = nn.BatchNorm2d(16).to(device)
    images = _noise(device, 2 * times, 16, 28, 28, dtype=torch.bfloat16).detach()
    images = images.to(memory_format=torch.channels_last).requires_grad_()
    return _step([images, *module.parameters()], lambda inputs, *_: module(inputs))


def _product(dtype: torch.dtype, device: torch.device, times: int) -> Work:
    inputs, weight = _noise(device, 64 * times, 256, dtype=dtype), _noise(device, 512, 256, dtype=dtype)
    return _step([inputs, weight], F.linear)


def _batched(device: torch.device, times: int) -> Work:
    left, right = (_noise(device, 4 * times, 64, 64, dtype=torch.bfloat16) for _ in range(2))
    return _step([left, right], torch.bmm)


def _attention(
    device: torch.device,
    times: int,
    dtype: torch.dtype = torch.bfloat16,
    features: int = 64,
    masked: bool = False,
    **options: Any,
) -> Work:
    tokens = 64 * min(times, 16)
    parts = [_noise(device, max(1, times // 8), 4, tokens, features, dtype=dtype) for _ in range(3)]
    mask = _noise(device, tokens, tokens, dtype=dtype).detach() if masked else None

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        torch.manual_seed(0)  # of dropout
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)

    return _step(parts, attend)


def _embedding(device: torch.device, times: int) -> Work:
    rows = _whole(device, 97, 256 * times)
    return _step([_noise(device, 97, 64)], lambda table: F.embedding(rows, table))


def _embedding_bag(device: torch.device, times: int) -> Work:
    rows = _whole(device, 97, 32 * times, 8)
    return _step([_noise(device, 97, 64)], lambda table: F.embedding_bag(rows, table, mode="sum"))


def _indexing(device: torch.device, times: int) -> Work:
    rows = _whole(device, 97, 256 * times)
    return _step([_noise(device, 97, 64)], lambda table: table[rows])


def _index_add(device: torch.device, times: int) -> Work:
    rows = _whole(device, 97, 256 * times)

    def added(table: Tensor, values: Tensor) -> Tensor:
        return table.index_add(0, rows, values).index_select(0, rows)

    return _step([_noise(device, 97, 64), _noise(device, 256 * times, 64)], added)


def _index_put(device: torch.device, times: int) -> Work:
    rows = _whole(device, 97, 256 * times)

    def added(table: Tensor, values: Tensor) -> Tensor:
        return table.index_put((rows,), values, accumulate=True)

    return _step([_noise(device, 97, 64), _noise(device, 256 * times, 64)], added)


def _scatter_add(device: torch.device, times: int) -> Work:
    index = _whole(device, 97, 256 * times, 16)

    def added(table: Tensor, values: Tensor) -> Tensor:
        return table.scatter_add(0, index, values).gather(0, index)

    return _step([_noise(device, 97, 16), _noise(device, 256 * times, 16)], added)


def _cross_entropy(device: torch.device, times: int) -> Work:
    targets = _whole(device, 1000, 64 * times)
    return _step([_noise(device, 64 * times, 1000)], lambda each: F.cross_entropy(each, targets, reduction="sum"))


def _pixels(device: torch.device, times: int) -> Work:
    targets = _whole(device, 16, 2 * times, 28, 28)
    return _of_images(lambda each: F.cross_entropy(each, targets, reduction="none").sum(), device, times)


def _ctc(device: torch.device, times: int) -> Work:
    targets, lengths = _whole(torch.device("cpu"), 19, 4 * 10).int() + 1, torch.full((4,), 10, dtype=torch.int32)
    steps = torch.full((4,), 64, dtype=torch.int32)

    def loss(scores: Tensor) -> Tensor:
        return F.ctc_loss(scores.log_softmax(-1), targets, steps, lengths, reduction="sum")

    return _step([_noise(device, 64, 4, 20)], loss)


def interpolated(mode: str, antialias: bool = False) -> Function:
    """Return what scales the last dims up by a half."""
    return lambda inputs: F.interpolate(inputs, scale_factor=1.5, mode=mode, antialias=antialias)


def _dropout(device: torch.device, times: int) -> Work:
    def dropped(inputs: Tensor) -> Tensor:
        torch.manual_seed(0)
        return F.dropout(inputs, 0.5)

    return _of_images(dropped, device, times)


def _recurrent(device: torch.device, times: int) -> Work:
    torch.manual_seed(0)
    module = nn.LSTM(32, 64, num_layers=2, batch_first=True).to(device)
    sequences = _noise(device, 4 * times, 16, 32)
    return _step([sequences, *module.parameters()], lambda inputs, *_: module(inputs)[0])


def _counting(device: torch.device, times: int) -> Work:
    numbers = _whole(device, 97, 4096 * times)

    def count() -> Sequence[Tensor]:
        counted = [torch.bincount(numbers, minlength=97)]
        return (
            [*counted, torch.histc(numbers, 97, 0, 97)] if numbers.is_cuda else counted
        )  # the CPU counts floats alone

    return count


def _median(device: torch.device, times: int) -> Work:
    numbers = _noise(device, 4096 * times).detach()
    return lambda: [numbers.median()]


def _optimizer(option: str, device: torch.device, times: int) -> Work:
    sizes = [97 * times * (1 + number % 3) for number in range(12)]
    before = [_noise(device, size).detach() for size in sizes]

    def work() -> Sequence[Tensor]:
        parameters = [each.clone().requires_grad_() for each in before]
        optimizer = torch.optim.AdamW(parameters, **{option: True})
        for each in parameters:
            each.grad = each.detach().cos()
        optimizer.step()
        optimizer.step()
        return [each.detach() for each in parameters]

    return work


_ALGORITHMS: Final = "torch.use_deterministic_algorithms"
_ORDER: Final = "its kernel adds in one order by itself"

EXACT: Final = {
    "convolution fp32": Exact(
        partial(_convolution, torch.float32, torch.contiguous_format),
        "convolution, float32",
        "cudnn.deterministic, cudnn.benchmark off, no TF32",
    ),
    "convolution bf16": Exact(
        partial(_convolution, torch.bfloat16, torch.channels_last),
        "convolution, bfloat16, channels_last",
        "cudnn.deterministic, cudnn.benchmark off",
    ),
    "convolution depthwise": Exact(
        partial(_layer, lambda: nn.Conv2d(16, 16, 3, padding=1, groups=16), (16, 28, 28)),
        "depthwise convolution",
        "cudnn.deterministic, cudnn.benchmark off",
    ),
    "convolution transposed": Exact(
        partial(_layer, lambda: nn.ConvTranspose2d(16, 8, 3, stride=2), (16, 28, 28)),
        "transposed convolution",
        "cudnn.deterministic, cudnn.benchmark off",
    ),
    "product fp32": Exact(
        partial(_product, torch.float32), "linear layer, float32", "CUBLAS_WORKSPACE_CONFIG=:4096:8, no TF32"
    ),
    "product bf16": Exact(
        partial(_product, torch.bfloat16), "linear layer, bfloat16", "CUBLAS_WORKSPACE_CONFIG=:4096:8, sums in float32"
    ),
    "product batched": Exact(_batched, "batched product", "CUBLAS_WORKSPACE_CONFIG=:4096:8, sums in float32"),
    "attention flash": Exact(
        partial(_attention, is_causal=True),
        "attention, bfloat16, causal",
        f"flash attention, its backward by {_ALGORITHMS}",
    ),
    "attention flash dropout": Exact(
        partial(_attention, dropout_p=0.1), "attention, bfloat16, with dropout", "flash attention, as above"
    ),
    "attention masked": Exact(
        partial(_attention, masked=True),
        "attention, bfloat16, with a mask",
        "memory-efficient attention, keys not split",
    ),
    "attention fp32": Exact(
        partial(_attention, dtype=torch.float32), "attention, float32", "memory-efficient attention, keys not split"
    ),
    "attention math": Exact(
        partial(_attention, dtype=torch.float32, features=5),
        "attention of a shape that no fused kernel has",
        "products and a softmax",
    ),
    "embedding": Exact(_embedding, "Embedding", f"backward by sorted indices: {_ALGORITHMS}"),
    "embedding bag": Exact(_embedding_bag, "EmbeddingBag, mode sum", f"backward by sorted indices: {_ALGORITHMS}"),
    "indexing": Exact(_indexing, "x[index], backward", f"index_put_ by sorted indices: {_ALGORITHMS}"),
    "index_add": Exact(_index_add, "index_add and index_select, backward", f"by sorted indices: {_ALGORITHMS}"),
    "index_put": Exact(_index_put, "index_put_, accumulate=True", f"by sorted indices: {_ALGORITHMS}"),
    "scatter_add": Exact(_scatter_add, "scatter_add, and gather, backward", f"by sorted indices: {_ALGORITHMS}"),
    "cross entropy": Exact(_cross_entropy, "cross_entropy of samples or tokens", _ORDER),
    "cross entropy of pixels": Exact(_pixels, "cross_entropy of images with reduction none, then sum()", _ORDER),
    "ctc_loss by cuDNN": Exact(
        _ctc, "ctc_loss that cuDNN takes: blank 0, int32 targets on the CPU", "cudnn.deterministic"
    ),
    "interpolate nearest": Exact(partial(_of_images, interpolated("nearest")), "interpolate, mode nearest", _ORDER),
    "interpolate bilinear": Exact(
        partial(_of_images, interpolated("bilinear")), "interpolate, mode bilinear", f"by indexing: {_ALGORITHMS}"
    ),
    "interpolate bicubic": Exact(
        partial(_of_images, interpolated("bicubic")),
        "interpolate, mode bicubic, torch >= 2.15",
        f"by indexing: {_ALGORITHMS}",
        "2.15",
    ),
    "cumsum": Exact(
        partial(_of_images, lambda inputs: inputs.flatten().cumsum(0)),
        "cumsum over all of a tensor",
        f"a scan of two passes: {_ALGORITHMS}",
    ),
    "max pooling": Exact(partial(_of_images, lambda inputs: F.max_pool2d(inputs, 3, 2, 1)), "MaxPool2d", _ORDER),
    "max pooling of volumes": Exact(
        partial(_of_volumes, lambda inputs: F.max_pool3d(inputs, 3, 2, return_indices=True)[0]),
        "MaxPool3d with indices, torch >= 2.13",
        f"by indexing: {_ALGORITHMS}",
        "2.13",
    ),
    "average pooling": Exact(partial(_of_images, lambda inputs: F.avg_pool2d(inputs, 3, 2)), "AvgPool2d", _ORDER),
    "global average pooling": Exact(
        partial(_of_images, lambda inputs: F.adaptive_avg_pool2d(inputs, 1)), "AdaptiveAvgPool2d to 1 x 1", "a mean"
    ),
    "padding by reflection": Exact(
        partial(_of_images, lambda inputs: F.pad(inputs, (1,) * 4, mode="reflect")),
        "ReflectionPad2d",
        f"a kernel of its own: {_ALGORITHMS}",
    ),
    "padding by replication": Exact(
        partial(_of_images, lambda inputs: F.pad(inputs, (1,) * 4, mode="replicate")),
        "ReplicationPad1d, 2d, 3d",
        f"by indexing: {_ALGORITHMS}",
    ),
    "batch norm": Exact(partial(_layer, lambda: nn.BatchNorm2d(16), (16, 28, 28)), "BatchNorm", "cudnn.deterministic"),
    "batch norm bf16": Exact(_batch_norm, "BatchNorm, bfloat16, channels_last", "cudnn.deterministic"),
    "layer norm": Exact(partial(_layer, lambda: nn.LayerNorm(256), (64, 256)), "LayerNorm", _ORDER),
    "group norm": Exact(partial(_layer, lambda: nn.GroupNorm(4, 16), (16, 28, 28)), "GroupNorm", _ORDER),
    "softmax": Exact(partial(_of_images, lambda inputs: inputs.softmax(-1)), "softmax", _ORDER),
    "dropout": Exact(_dropout, "Dropout", "the generator is seeded for each micro-batch"),
    "recurrent": Exact(
        _recurrent, "LSTM, GRU, RNN without dropout between layers", "cuDNN, CUBLAS_WORKSPACE_CONFIG=:4096:8"
    ),
    "sort": Exact(
        partial(_of_images, lambda inputs: inputs.sort(-1).values + inputs.topk(28, -1).values), "sort and topk", _ORDER
    ),
    "counting": Exact(
        _counting, "bincount without weights, histc of whole numbers", "whole numbers add to the same in any order"
    ),
    "median": Exact(_median, "median over all of a tensor", "no index is returned"),
    "sum": Exact(
        partial(_of_images, lambda inputs: inputs.sum()),
        "sum of a large tensor",
        "the last block adds what the others left, in their order",
    ),
    "optimizer foreach": Exact(
        partial(_optimizer, "foreach"), "AdamW, foreach: what Lockstep takes", "element by element"
    ),
    "optimizer fused": Exact(
        partial(_optimizer, "fused"), "AdamW, fused: recipe.optimizer.options", "element by element"
    ),
}


def _grid(inputs: Tensor) -> Tensor:
    size = [inputs.shape[0], *([4] * (inputs.ndim - 2)), inputs.ndim - 2]
    return F.grid_sample(inputs, torch.zeros(size, device=inputs.device), align_corners=False)


def _of_pixels(inputs: Tensor) -> Tensor:
    targets = torch.zeros(inputs.shape[0], *inputs.shape[2:], dtype=torch.int64, device=inputs.device)
    return F.cross_entropy(inputs, targets, reduction="sum").expand(1, 1)


def _ctc_by_torch(inputs: Tensor) -> Tensor:
    scores = inputs.flatten(2).permute(2, 0, 1).log_softmax(-1)
    lengths = torch.full((2,), len(scores)), torch.full((2,), 3)
    return F.ctc_loss(scores, torch.ones(2, 3, dtype=torch.int64, device=inputs.device), *lengths).expand(1, 1)


def _bagged(inputs: Tensor) -> Tensor:
    rows = torch.zeros(2, 5, dtype=torch.int64, device=inputs.device)
    return F.embedding_bag(rows, inputs.flatten(1), mode="max")


def _scattered(inputs: Tensor) -> Tensor:
    index = torch.zeros_like(inputs, dtype=torch.int64)
    return torch.zeros_like(inputs).scatter_reduce(1, index, inputs, "prod")


def _multiplied(inputs: Tensor) -> Tensor:
    return (
        torch.ones_like(inputs).scatter(
            1, torch.zeros_like(inputs, dtype=torch.int64), inputs.detach(), reduce="multiply"
        )
        * inputs
    )


def _put(inputs: Tensor) -> Tensor:
    index = torch.zeros(5, dtype=torch.int64, device=inputs.device)
    return inputs.put(index, inputs.flatten()[:5])


def _reduced(inputs: Tensor) -> Tensor:
    index = torch.zeros(4, dtype=torch.int64, device=inputs.device)
    return torch.ones_like(inputs).index_reduce(1, index, inputs, "prod")


def _unpooled(inputs: Tensor) -> Tensor:
    pool, unpool = {
        3: (F.max_pool1d, F.max_unpool1d),
        4: (F.max_pool2d, F.max_unpool2d),
        5: (F.max_pool3d, F.max_unpool3d),
    }[inputs.ndim]
    values, indices = pool(inputs, 2, return_indices=True)
    return unpool(values, indices, 2)


def _deformed(inputs: Tensor) -> Tensor:
    weight = torch.ones(4, 4, 3, 3, device=inputs.device, requires_grad=True)
    return _vision().deform_conv2d(inputs, inputs.new_zeros(2, 18, 4, 4), weight)


def _vision() -> Any:
    """Return torchvision's operations, which take longer to import than all that is measured here."""
    return import_module("torchvision.ops")


def _boxes(inputs: Tensor) -> Tensor:
    return inputs.new_zeros(2, 5)


def _aligned(inputs: Tensor) -> Tensor:
    _vision()  # names the operation
    aligned: Tensor = torch.ops.torchvision.roi_align(inputs, _boxes(inputs), 1.0, 3, 3, 2, False)
    return aligned


# For each operation that is refused: a function that uses it, and how many dims its inputs have beside samples and
# channels.
REFUSED: dict[str, tuple[Function, int]] = {
    "aten::_adaptive_avg_pool2d_backward": (lambda inputs: F.adaptive_avg_pool2d(inputs, 5), 2),
    "aten::_adaptive_avg_pool3d_backward": (lambda inputs: F.adaptive_avg_pool3d(inputs, 3), 3),
    "aten::adaptive_max_pool2d_backward": (lambda inputs: F.adaptive_max_pool2d(inputs, 5), 2),
    "aten::adaptive_max_pool3d_backward": (lambda inputs: F.adaptive_max_pool3d(inputs, 4), 3),
    "aten::avg_pool3d_backward": (lambda inputs: F.avg_pool3d(inputs, 2), 3),
    "aten::fractional_max_pool2d_backward": (lambda inputs: F.fractional_max_pool2d(inputs, 2, 5), 2),
    "aten::fractional_max_pool3d_backward": (lambda inputs: F.fractional_max_pool3d(inputs, 2, 3), 3),
    "aten::max_unpool2d": (_unpooled, 2),
    "aten::max_unpool3d": (_unpooled, 3),
    "aten::reflection_pad1d_backward": (lambda inputs: F.pad(inputs, (1, 1), mode="reflect"), 1),
    "aten::reflection_pad3d_backward": (lambda inputs: F.pad(inputs, (1,) * 6, mode="reflect"), 3),
    "aten::upsample_linear1d_backward": (interpolated("linear"), 1),
    "aten::_upsample_bilinear2d_aa_backward": (interpolated("bilinear", antialias=True), 2),
    "aten::_upsample_bicubic2d_aa_backward": (interpolated("bicubic", antialias=True), 2),
    "aten::upsample_bilinear2d_backward": (lambda inputs: torch._C._nn.upsample_bilinear2d(inputs, (9, 9), False), 2),
    "aten::upsample_bicubic2d_backward": (lambda inputs: torch._C._nn.upsample_bicubic2d(inputs, (9, 9), False), 2),
    "aten::upsample_trilinear3d_backward": (
        lambda inputs: torch._C._nn.upsample_trilinear3d(inputs, (9,) * 3, False),
        3,
    ),
    "aten::replication_pad1d_backward": (lambda inputs: torch._C._nn.replication_pad1d(inputs, (1, 1)), 1),
    "aten::replication_pad2d_backward": (lambda inputs: torch._C._nn.replication_pad2d(inputs, (1,) * 4), 2),
    "aten::replication_pad3d_backward": (lambda inputs: torch._C._nn.replication_pad3d(inputs, (1,) * 6), 3),
    "aten::max_pool3d_with_indices_backward": (lambda inputs: torch.max_pool3d(inputs, 2), 3),
    "aten::nll_loss2d_forward": (_of_pixels, 2),
    "aten::_ctc_loss_backward": (_ctc_by_torch, 2),
    "aten::_embedding_bag_backward": (_bagged, 2),
    "aten::put": (_put, 2),
    "aten::histc": (lambda inputs: inputs * torch.histc(inputs.detach(), 4).sum(), 2),
    "aten::bincount": (
        lambda inputs: (
            inputs
            * torch.bincount(torch.zeros_like(inputs, dtype=torch.int64).flatten(), inputs.detach().flatten(), 4).sum()
        ),
        2,
    ),
    "aten::median": (lambda inputs: inputs.median(-1).values, 2),
    "aten::nanmedian": (lambda inputs: inputs.nanmedian(-1).values, 2),
    "aten::grid_sampler_2d_backward": (_grid, 2),
    "aten::grid_sampler_3d_backward": (_grid, 3),
    "aten::scatter_reduce": (_scattered, 2),
    "aten::scatter": (_multiplied, 2),
    "aten::index_reduce": (_reduced, 2),
    "aten::cumprod": (lambda inputs: inputs.flatten().cumprod(0).view_as(inputs), 2),
    "aten::logcumsumexp": (lambda inputs: inputs.flatten().logcumsumexp(0).view_as(inputs), 2),
    "torchvision::_deform_conv2d_backward": (_deformed, 2),
    "torchvision::_roi_align_backward": (_aligned, 2),
    "torchvision::_roi_pool_backward": (lambda inputs: _vision().roi_pool(inputs, _boxes(inputs), 3), 2),
    "torchvision::_ps_roi_align_backward": (lambda inputs: _vision().ps_roi_align(inputs, _boxes(inputs), 2), 2),
    "torchvision::_ps_roi_pool_backward": (lambda inputs: _vision().ps_roi_pool(inputs, _boxes(inputs), 2), 2),
}
