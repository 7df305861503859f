"""What has no exact kernel on CUDA is found without a card, with the module that uses it."""

from collections.abc import Callable

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.gpu_uses import REFUSED as USES
from benchmarks.gpu_uses import Function, interpolated
from lockstep.device.kernels import NONDETERMINISTIC_OPERATIONS, RNN_DROPOUT
from lockstep.models.operations import NondeterministicCall, find_nondeterministic_calls


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


def looked(model: Callable[[], nn.Module], *shape: int) -> list[NondeterministicCall]:
    inputs, targets = torch.rand(2, 3, *(shape or (12, 12))), torch.zeros(2, dtype=torch.int64)
    return find_nondeterministic_calls(model, (inputs,), targets, lambda outputs, _: outputs.float().sum())


def names(model: Callable[[], nn.Module], *shape: int) -> set[str]:
    return {each.kernel.name for each in looked(model, *shape)}


def test_every_refused_operation_has_a_use_here() -> None:
    # cudnn_grid_sampler is chosen on a card alone, for shapes that the others take too.
    assert {each.name for each in NONDETERMINISTIC_OPERATIONS} == USES.keys() | {"aten::cudnn_grid_sampler_backward"}


@pytest.mark.parametrize("operation", USES)
def test_it_is_found_with_its_module(operation: str) -> None:
    function, dims = USES[operation]
    # An older torch may add what computes the operation's inputs, which a newer one computes in another way.
    found = [
        each
        for each in looked(lambda: Ends(Layer(function), dims), *(6,) * dims)
        if each.kernel.name == operation or each.kernel.has_deterministic_alternative() == each.kernel.has_alternative
    ]
    assert [each.kernel.name for each in found] == [operation]
    assert found[0].module == "middle (Layer)"


AVOIDED = {
    "aten::upsample_bilinear2d_backward": (interpolated("bilinear"), 2),
    "aten::upsample_bicubic2d_backward": (interpolated("bicubic"), 2),
    "aten::upsample_trilinear3d_backward": (interpolated("trilinear"), 3),
    "aten::replication_pad1d_backward": (lambda inputs: F.pad(inputs, (1, 1), mode="replicate"), 1),
    "aten::replication_pad2d_backward": (lambda inputs: F.pad(inputs, (1,) * 4, mode="replicate"), 2),
    "aten::replication_pad3d_backward": (lambda inputs: F.pad(inputs, (1,) * 6, mode="replicate"), 3),
    "aten::max_pool3d_with_indices_backward": (lambda inputs: F.max_pool3d(inputs, 2, return_indices=True)[0], 3),
}


def test_every_avoided_operation_has_its_function_here() -> None:
    # That of roi_align is chosen where Triton is, which is where a card is.
    assert {each.name for each in NONDETERMINISTIC_OPERATIONS if each.has_alternative} == AVOIDED.keys() | {
        "torchvision::_roi_align_backward"
    }


@pytest.mark.parametrize("operation", AVOIDED)
def test_functions_go_another_way_on_cuda_where_this_torch_has_one(operation: str) -> None:
    function, dims = AVOIDED[operation]
    [entry] = [each for each in NONDETERMINISTIC_OPERATIONS if each.name == operation]
    found = looked(lambda: Ends(Layer(function), dims), *(6,) * dims)
    assert [each.kernel.name for each in found] == ([] if entry.has_deterministic_alternative() else [operation])


@pytest.mark.parametrize(
    "function",
    [
        interpolated("nearest"),
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

    assert looked(lambda: Recurrent(0.5)) == [NondeterministicCall(RNN_DROPOUT, "lstm (LSTM)")]
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
