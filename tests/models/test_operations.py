"""What has no exact kernel on CUDA is found without a card, with the module that uses it."""

from collections.abc import Callable

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.models.operations import Refusal, refused_operations
from lockstep.runtime.kernels import REFUSED, RNN_DROPOUT

Function = Callable[[Tensor], Tensor]


class Layer(nn.Module):
    """A layer whose forward is a function."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, inputs: Tensor) -> Tensor:
        return self.function(inputs)


class Ends(nn.Module):
    """The middle of a model, between a convolution and a mean."""

    def __init__(self, middle: nn.Module, dims: int = 2) -> None:
        super().__init__()
        convolution = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]
        self.first = convolution(3, 4, 3, padding=1)
        self.middle = middle

    def forward(self, inputs: Tensor) -> Tensor:
        return self.middle(self.first(inputs)).flatten(1).mean(1)


def looked(model: Callable[[], nn.Module], *shape: int) -> list[Refusal]:
    inputs, targets = torch.rand(2, 3, *(shape or (12, 12))), torch.zeros(2, dtype=torch.int64)
    return refused_operations(model, inputs, targets, lambda outputs, _: outputs.float().sum())


def names(model: Callable[[], nn.Module], *shape: int) -> set[str]:
    return {each.kernel.named for each in looked(model, *shape)}


def interpolated(mode: str, antialias: bool = False) -> Function:
    return lambda inputs: F.interpolate(inputs, scale_factor=1.5, mode=mode, antialias=antialias)


def grid(inputs: Tensor) -> Tensor:
    size = [inputs.shape[0], *([4] * (inputs.ndim - 2)), inputs.ndim - 2]
    return F.grid_sample(inputs, torch.zeros(size, device=inputs.device), align_corners=False)


def of_pixels(inputs: Tensor) -> Tensor:
    targets = torch.zeros(inputs.shape[0], *inputs.shape[2:], dtype=torch.int64, device=inputs.device)
    return F.cross_entropy(inputs, targets, reduction="sum").expand(1, 1)


def ctc(inputs: Tensor) -> Tensor:
    scores = inputs.flatten(2).permute(2, 0, 1).log_softmax(-1)
    lengths = torch.full((2,), len(scores)), torch.full((2,), 3)
    return F.ctc_loss(scores, torch.ones(2, 3, dtype=torch.int64, device=inputs.device), *lengths).expand(1, 1)


def bagged(inputs: Tensor) -> Tensor:
    rows = torch.zeros(2, 5, dtype=torch.int64, device=inputs.device)
    return F.embedding_bag(rows, inputs.flatten(1), mode="max")


def scattered(inputs: Tensor) -> Tensor:
    index = torch.zeros_like(inputs, dtype=torch.int64)
    return torch.zeros_like(inputs).scatter_reduce(1, index, inputs, "prod")


def multiplied(inputs: Tensor) -> Tensor:
    return (
        torch.ones_like(inputs).scatter(
            1, torch.zeros_like(inputs, dtype=torch.int64), inputs.detach(), reduce="multiply"
        )
        * inputs
    )


def put(inputs: Tensor) -> Tensor:
    index = torch.zeros(5, dtype=torch.int64, device=inputs.device)
    return inputs.put(index, inputs.flatten()[:5])


def reduced(inputs: Tensor) -> Tensor:
    index = torch.zeros(4, dtype=torch.int64, device=inputs.device)
    return torch.ones_like(inputs).index_reduce(1, index, inputs, "prod")


def unpooled(inputs: Tensor) -> Tensor:
    pool, unpool = {
        3: (F.max_pool1d, F.max_unpool1d),
        4: (F.max_pool2d, F.max_unpool2d),
        5: (F.max_pool3d, F.max_unpool3d),
    }[inputs.ndim]
    values, indices = pool(inputs, 2, return_indices=True)
    return unpool(values, indices, 2)


def deformed(inputs: Tensor) -> Tensor:
    weight = torch.ones(4, 4, 3, 3, device=inputs.device, requires_grad=True)
    return torchvision.ops.deform_conv2d(inputs, inputs.new_zeros(2, 18, 10, 10), weight)


def boxes(inputs: Tensor) -> Tensor:
    return inputs.new_zeros(2, 5)


# For each operation that is refused: a function that uses it, and how many dims its inputs have beside samples and
# channels.
USES: dict[str, tuple[Function, int]] = {
    "aten::_adaptive_avg_pool2d_backward": (lambda inputs: F.adaptive_avg_pool2d(inputs, 5), 2),
    "aten::_adaptive_avg_pool3d_backward": (lambda inputs: F.adaptive_avg_pool3d(inputs, 3), 3),
    "aten::adaptive_max_pool2d_backward": (lambda inputs: F.adaptive_max_pool2d(inputs, 5), 2),
    "aten::adaptive_max_pool3d_backward": (lambda inputs: F.adaptive_max_pool3d(inputs, 4), 3),
    "aten::avg_pool3d_backward": (lambda inputs: F.avg_pool3d(inputs, 2), 3),
    "aten::fractional_max_pool2d_backward": (lambda inputs: F.fractional_max_pool2d(inputs, 2, 5), 2),
    "aten::fractional_max_pool3d_backward": (lambda inputs: F.fractional_max_pool3d(inputs, 2, 3), 3),
    "aten::max_unpool2d": (unpooled, 2),
    "aten::max_unpool3d": (unpooled, 3),
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
    "aten::nll_loss2d_forward": (of_pixels, 2),
    "aten::_ctc_loss_backward": (ctc, 2),
    "aten::_embedding_bag_backward": (bagged, 2),
    "aten::put": (put, 2),
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
    "aten::grid_sampler_2d_backward": (grid, 2),
    "aten::grid_sampler_3d_backward": (grid, 3),
    "aten::scatter_reduce": (scattered, 2),
    "aten::scatter": (multiplied, 2),
    "aten::index_reduce": (reduced, 2),
    "aten::cumprod": (lambda inputs: inputs.flatten().cumprod(0).view_as(inputs), 2),
    "aten::logcumsumexp": (lambda inputs: inputs.flatten().logcumsumexp(0).view_as(inputs), 2),
    "torchvision::_deform_conv2d_backward": (deformed, 2),
    "torchvision::_roi_align_backward": (
        lambda inputs: torch.ops.torchvision.roi_align(inputs, boxes(inputs), 1.0, 3, 3, 2, False),
        2,
    ),
    "torchvision::_roi_pool_backward": (lambda inputs: torchvision.ops.roi_pool(inputs, boxes(inputs), 3), 2),
    "torchvision::_ps_roi_align_backward": (lambda inputs: torchvision.ops.ps_roi_align(inputs, boxes(inputs), 2), 2),
    "torchvision::_ps_roi_pool_backward": (lambda inputs: torchvision.ops.ps_roi_pool(inputs, boxes(inputs), 2), 2),
}


def test_every_refused_operation_has_a_use_here() -> None:
    # cudnn_grid_sampler is chosen on a card alone, for shapes that the others take too.
    assert {each.named for each in REFUSED} == USES.keys() | {"aten::cudnn_grid_sampler_backward"}


@pytest.mark.parametrize("operation", USES)
def test_it_is_found_with_its_module(operation: str) -> None:
    function, dims = USES[operation]
    found = looked(lambda: Ends(Layer(function), dims), *(6,) * dims)
    assert [each.kernel.named for each in found] == [operation]
    assert found[0].module == "middle (Layer)"


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_interpolation_goes_another_way_on_cuda(mode: str) -> None:
    assert not looked(lambda: Ends(Layer(interpolated(mode))))


@pytest.mark.parametrize(
    "function",
    [
        lambda inputs: F.pad(inputs, (1,) * 4, mode="replicate"),
        lambda inputs: F.pad(inputs, (1,) * 4, mode="reflect"),
        lambda inputs: F.adaptive_avg_pool2d(inputs, 1),
        lambda inputs: F.max_pool2d(inputs, 2),
        lambda inputs: inputs.cumprod(1),
        lambda inputs: inputs.cumsum(0).flatten().cumsum(0),
        lambda inputs: inputs.median().expand(1, 1),
        lambda inputs: inputs.sort(-1).values,
        lambda inputs: F.scaled_dot_product_attention(inputs, inputs, inputs, is_causal=True),
        lambda inputs: inputs[:, torch.zeros(9, dtype=torch.int64, device=inputs.device)],
        lambda inputs: torch.zeros_like(inputs).index_add(
            1, torch.zeros(4, dtype=torch.int64, device=inputs.device), inputs
        ),
    ],
)
def test_what_is_exact_is_not_refused(function: Function) -> None:
    assert not looked(lambda: Ends(Layer(function)))


def test_a_model_that_reads_values_is_looked_at_on_the_cpu() -> None:
    def read(then: Function) -> Function:
        return lambda inputs: then(inputs * max(1.0, inputs.sum().item()))

    assert names(lambda: Ends(Layer(read(lambda inputs: F.adaptive_avg_pool2d(inputs, 5))))) == {
        "aten::_adaptive_avg_pool2d_backward"
    }
    # The CPU has only the operation that torch.nn.functional avoids on CUDA.
    assert not looked(lambda: Ends(Layer(read(interpolated("bilinear")))))


def test_dropout_in_a_recurrent_layer_is_refused() -> None:
    class Recurrent(nn.Module):
        def __init__(self, dropout: float) -> None:
            super().__init__()
            self.lstm = nn.LSTM(12, 8, num_layers=2, dropout=dropout, batch_first=True)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.lstm(inputs.flatten(1, 2))[0].mean((1, 2))

    assert looked(lambda: Recurrent(0.5)) == [Refusal(RNN_DROPOUT, "lstm (LSTM)")]
    assert not looked(lambda: Recurrent(0.0))


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224"])
def test_usual_models_are_exact(name: str) -> None:
    size = 224 if name.startswith("vit") else 64
    assert not looked(lambda: timm.create_model(name), size, size)


def test_a_segmentation_head_is_named() -> None:
    """DeepLab pools to 1 x 1 and scales up bilinearly, both exact; PSPNet's pyramid of pools is not."""

    def deeplab() -> nn.Module:
        head = torchvision.models.segmentation.deeplabv3.DeepLabHead(4, 2)
        return nn.Sequential(head, Layer(interpolated("bilinear")))

    assert not looked(lambda: Ends(deeplab()))
    assert names(lambda: Ends(nn.Sequential(deeplab(), nn.AdaptiveAvgPool2d(6)))) == {
        "aten::_adaptive_avg_pool2d_backward"
    }


def test_settings_are_left_as_they_were() -> None:
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cuda.cudnn_sdp_enabled()
    looked(lambda: Ends(nn.Identity()))
    assert (torch.are_deterministic_algorithms_enabled(), torch.backends.cuda.cudnn_sdp_enabled()) == before
    assert not torch.cuda.is_initialized()
