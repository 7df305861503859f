"""LARS and LAMB follow timm's, to rounding, and do to rows what they do to whole tensors, to the bit."""

from collections.abc import Mapping
from typing import Any

import pytest
import timm.optim
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lockstep.parallel.layerwise import Lamb, Lars, compute_full_norms

SHAPES = ((6, 5), (7,), (4, 3, 2, 2), (1,))

LARS = [
    {"momentum": 0.9, "weight_decay": 0.01},
    {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
    {"momentum": 0.5, "dampening": 0.3, "weight_decay": 0.1, "trust_clip": True},
    {"always_adapt": True, "trust_coeff": 0.1},
    {"momentum": 0.9},  # without decay it is plain
]
LAMB = [
    {"weight_decay": 0.01},
    {"weight_decay": 0.1, "trust_clip": True},
    {"weight_decay": 0.0, "always_adapt": True},
    {"weight_decay": 0.0},
    {"weight_decay": 0.05, "bias_correction": False, "grad_averaging": False, "betas": (0.8, 0.9), "eps": 1e-3},
]


def parameters(empty: bool = True) -> list[Parameter]:
    generator = torch.Generator().manual_seed(1)
    made = [Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    return [*made, Parameter(torch.zeros(3))] if empty else made


def step(optimizer: Optimizer, trained: list[Parameter], number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for parameter in trained:
        parameter.grad = torch.randn(parameter.shape, generator=generator) * 10.0 ** (number - 3)
    optimizer.step()


@pytest.mark.parametrize("options", LARS)
def test_lars_is_timms(options: dict[str, Any]) -> None:
    ours, theirs = parameters(), parameters()
    agree(ours, Lars(ours, lr=0.1, **options), theirs, timm.optim.Lars(theirs, lr=0.1, **options))


@pytest.mark.parametrize("options", LAMB)
def test_lamb_is_timms(options: dict[str, Any]) -> None:
    ours, theirs = parameters(), parameters()
    reference = timm.optim.Lamb(theirs, lr=0.1, max_grad_norm=None, **options)
    agree(ours, Lamb(ours, lr=0.1, **options), theirs, reference)


def agree(ours: list[Parameter], own: Optimizer, theirs: list[Parameter], reference: Optimizer) -> None:
    before = [parameter.detach().clone() for parameter in ours]
    for number in range(5):
        step(own, ours, number)
        step(reference, theirs, number)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert not any(torch.equal(one, other) for one, other in zip(before, ours, strict=True))


@pytest.mark.parametrize(("kind", "options"), [(Lars, LARS[0]), (Lars, LARS[2]), (Lamb, LAMB[0]), (Lamb, LAMB[2])])
def test_rows_move_as_in_the_whole(kind: type[Any], options: dict[str, Any]) -> None:
    whole = parameters(empty=False)
    cuts = [[Parameter(part.detach().clone()) for part in parameter.tensor_split(2)] for parameter in whole]
    parts = [part for pair in cuts for part in pair]

    def norms(tensors: Mapping[Tensor, Tensor]) -> Tensor:
        """Work out norms of whole tensors from their two parts, each of which is told that of the whole."""
        values = list(tensors.values())
        together = {
            torch.empty(0): torch.cat([one, other]) for one, other in zip(values[::2], values[1::2], strict=True)
        }
        return compute_full_norms(together).repeat_interleave(2)

    one, other = kind(whole, lr=0.1, **options), kind(parts, lr=0.1, norms=norms, **options)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        for parameter, pair in zip(whole, cuts, strict=True):
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            for part, gradient in zip(pair, parameter.grad.tensor_split(2), strict=True):
                part.grad = gradient.clone()
        one.step()
        other.step()
    for parameter, pair in zip(whole, cuts, strict=True):
        assert torch.equal(torch.cat([part.detach() for part in pair]), parameter.detach())


def test_the_memory_format_changes_no_bit() -> None:
    weights = torch.randn(8, 6, 3, 3, generator=torch.Generator().manual_seed(0))
    moved = []
    for layout in (torch.contiguous_format, torch.channels_last):
        parameter = Parameter(weights.clone(memory_format=layout))
        parameter.grad = weights.flip(0).contiguous(memory_format=layout)
        Lamb([parameter], lr=0.1).step()
        moved.append(parameter.detach().contiguous())
    assert torch.equal(*moved)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (Lars, {"lr": -1.0}, "lr must not be negative, got -1.0"),
        (Lars, {"nesterov": True}, "nesterov requires momentum > 0 and dampening 0"),
        (Lamb, {"betas": (1.0, 0.9)}, r"betas must be in \[0, 1\), got \(1.0, 0.9\)"),
        (Lamb, {"weight_decay": -0.1}, "weight_decay must not be negative, got -0.1"),
    ],
)
def test_refuses(kind: type[Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(parameters(), **options)


def test_without_a_gradient_lars_decays_at_the_plain_rate() -> None:
    """The local rate divides by the gradient's norm, and so says nothing there."""
    parameter = Parameter(torch.full((4,), 2.0))
    parameter.grad = torch.zeros(4)
    Lars([parameter], lr=0.5, weight_decay=0.1).step()
    assert parameter.tolist() == pytest.approx([2.0 - 0.5 * 0.1 * 2.0] * 4)
