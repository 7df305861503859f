"""What a model computes for a sample, against formulas and against torch's own counter."""

from collections.abc import Callable

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from lockstep.models.check import check_model
from lockstep.models.flops import FlopCounter, count_backward_flops


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


def counted(model: nn.Module, *shape: int, grad: bool = True) -> int | None:
    counter = FlopCounter()
    with counter:
        outputs = model.to("meta")(torch.empty(*shape, device="meta", requires_grad=grad))
    return count_backward_flops(counter, outputs)


@pytest.mark.parametrize(
    ("model", "shape", "forward"),
    [
        (nn.Linear(7, 5), (3, 7), 2 * 3 * 7 * 5),
        (nn.Linear(7, 5, bias=False), (3, 11, 7), 2 * 3 * 11 * 7 * 5),
        (nn.Conv2d(4, 6, 3, padding=1), (2, 4, 9, 10), 2 * 2 * 9 * 10 * 6 * 4 * 9),
        (nn.Conv2d(4, 6, 3, stride=2, dilation=2), (2, 4, 9, 10), 2 * 2 * 3 * 3 * 6 * 4 * 9),
        (nn.Conv2d(4, 8, 3, groups=2), (2, 4, 9, 10), 2 * 2 * 7 * 8 * 8 * 2 * 9),
        (nn.Conv1d(4, 4, 5, groups=4), (2, 4, 9), 2 * 2 * 5 * 4 * 1 * 5),
        (nn.ConvTranspose2d(4, 6, 3, stride=2), (2, 4, 9, 10), 2 * 2 * 9 * 10 * 4 * 6 * 9),
        # Queries times keys, and weights times values, for each of 3 heads.
        (Attention(), (2, 3, 8, 16), 2 * (2 * 2 * 3 * 8 * 8 * 16)),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, nn.Module) else None,
)
def test_backward_takes_twice_the_forward(model: nn.Module, shape: tuple[int, ...], forward: int) -> None:
    assert counted(model, *shape) == 3 * forward


def test_no_gradient_is_counted_that_nobody_wants() -> None:
    """The first layer's inputs are data."""
    assert counted(nn.Linear(7, 5), 3, 7, grad=False) == 2 * (2 * 3 * 7 * 5)


def test_what_is_element_by_element_does_not_count() -> None:
    assert counted(nn.Sequential(nn.ReLU(), nn.BatchNorm1d(7), nn.Dropout(0.1)), 3, 7) == 0


@pytest.mark.parametrize(
    ("build", "gigaflops"), [(torchvision.models.resnet50, 24.299), (torchvision.models.vit_b_16, 105.152)]
)
def test_known_models_have_what_torch_counts(build: Callable[[], nn.Module], gigaflops: float) -> None:
    """Three times the published 4.09 and 17.56 billion multiply-adds of the forward, but for the first layer."""
    with torch.device("meta"):
        model, inputs = build(), torch.empty(2, 3, 224, 224)
    torchs = FlopCounterMode(display=False)
    with torchs:
        model(inputs).sum().backward()
    assert counted(model, 2, 3, 224, 224, grad=False) == torchs.get_total_flops()
    assert torchs.get_total_flops() / 2 / 1e9 == pytest.approx(gigaflops, rel=1e-4)


def checked(build: Callable[[], nn.Module], *, samples: int) -> int | None:
    some = {"evaluation": (torch.zeros(2, 7),), "training": (torch.zeros(samples, 7),)}
    return check_model(build, name="mine", **some, check=lambda outputs, count: None).flops


def test_a_sample_costs_the_same_whatever_the_microbatch() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 5))

    assert {checked(build, samples=samples) for samples in (1, 2, 5)} == {2 * (2 * 7 * 9 + 3 * 9 * 5)}


class ReadsValues(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(x.sum() >= 0)


class NeedsValuesBackward(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        outputs = super().forward(x)
        if outputs.requires_grad:
            outputs.register_hook(lambda gradient: gradient * float(gradient.sum() > 0))
        return outputs


@pytest.mark.parametrize("kind", [ReadsValues, NeedsValuesBackward])
def test_a_model_that_needs_values_is_checked_and_not_counted(kind: type[nn.Linear]) -> None:
    assert checked(lambda: kind(7, 5), samples=2) is None
