"""Recomputation frees what lies inside of blocks and changes no bit."""

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import pytest
import timm
import torch
import toys
import zoo
from same_bits import assert_same_bits
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from toys import Case

from lockstep.core.precision import Precision
from lockstep.parallel.blocks import enable_recomputation

# timm's smallest: convolutions in bf16 take a CPU seconds in a ResNet-18.
RESNET = partial(timm.create_model, "test_resnet", num_classes=toys.CLASSES)


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
@pytest.mark.parametrize(
    ("model", "precision"),
    [(RESNET, "bf16"), (RESNET, "bf16-compute"), (zoo.vit, "bf16"), (zoo.Mlp, "bf16")],
)
@pytest.mark.parametrize("placed", [("ddp", 2), ("zero3", 2)])
def test_the_bits_stay(model: Callable[[], nn.Module], precision: Precision, placed: tuple[str, int]) -> None:
    case = Case(4, (12,), side=32, model=model, precision=precision, optimizer="adamw", clip=1.0, bucket_bytes=2**20)
    for every in (1, 2):
        assert_same_bits(case, (*placed, ()), recompute=every)


def blocks(count: int) -> nn.Sequential:
    torch.manual_seed(0)
    inner = partial(nn.Linear, 64, 64)
    return nn.Sequential(*(nn.Sequential(Named(inner()), nn.ReLU()) for _ in range(count)))


class Named(nn.Module):
    """A block that keeps five activations of the size of its input for its backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: Tensor) -> Tensor:
        for _ in range(5):
            inputs = self.inner(inputs).tanh()
        return inputs


def kept_bytes(model: nn.Module) -> int:
    """Return the bytes of activations that wait for the backward once the forward is done."""
    kept: dict[int, int] = {}
    weights = {parameter.data_ptr() for parameter in model.parameters()}

    def note(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in weights:
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = model(torch.ones(32, 64))
    assert math.isfinite(outputs.sum().item())
    return sum(kept.values())


def test_fewer_activations_are_kept() -> None:
    plain, half, full = (
        kept_bytes(model)
        for model in (blocks(4), enable_recomputation(blocks(4), 2), enable_recomputation(blocks(4), 1))
    )
    assert full < half < plain
    assert full <= plain / 3


def test_names_stay() -> None:
    assert [*enable_recomputation(blocks(2), 1).state_dict()] == [*blocks(2).state_dict()]


@dataclass
class Output:
    hidden: Tensor
    depth: int


class Block(nn.Module):
    """As libraries call theirs: by keyword, with what is no tensor among the arguments and in the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, inputs: Output, *, mask: Tensor | None, scale: float, fn: str = "tanh") -> tuple[Output, None]:
        x = self.dropout(getattr(torch, fn)(self.linear(inputs.hidden)) * scale)
        return Output(x if mask is None else x * mask, inputs.depth + 1), None


class ByKeyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        output = Output(x, 0)
        for number, block in enumerate(self.blocks):
            output, _ = block(inputs=output, mask=x.detach() if number else None, scale=0.5, fn="sin")
        return output.hidden * output.depth


@pytest.mark.parametrize("every", [1, 2])
def test_blocks_may_be_called_by_keyword_and_return_what_they_like(every: int) -> None:
    torch.manual_seed(0)
    plain = ByKeyword()
    saving = enable_recomputation(deepcopy(plain), every)
    results = []
    for model in (plain, saving):
        torch.manual_seed(1)
        x = torch.randn(4, 8, requires_grad=True)
        y = model(x)
        y.square().sum().backward()
        results.append([y, x.grad, *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_in_evaluation_nothing_is_done_twice() -> None:
    calls = 0

    class Counting(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return inputs * self.scale

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

    model = enable_recomputation(nn.Sequential(Counting()), 1)
    with torch.no_grad():
        model(torch.ones(2))
    assert calls == 1
    model(torch.ones(2)).sum().backward()
    assert calls == 3
