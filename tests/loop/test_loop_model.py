"""Parts of a placed model that a loop calls by themselves, and weights that it uses, if these are in rows."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import loops
import pytest
import torch
import worlds
from loop_ends import ended
from torch import Tensor, nn
from torch.nn import functional as F

pytestmark = pytest.mark.worlds


class Net(nn.Module):
    """Its head is in no block, and its block has a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 8)), nn.TransformerEncoderLayer(8, 2, 8, 0.0)])
        self.head = nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return self.head(inputs)


def training(run: Any, penalty: Callable[[nn.Module, Tensor], Tensor]) -> None:
    model = Net()
    model, _ = run.place(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in run.steps(loops.data(), batch=16, microbatches=4, epochs=1):
        for x, y in step:
            loss = F.cross_entropy(model(x), y)
            step.backward(mean=loss + penalty(model, x))
        step.update()


def of_the_head(model: Any, inputs: Tensor) -> Tensor:
    return model.head(inputs[:, :1].expand(-1, 8)).square().mean()


def of_a_layer(model: Any, inputs: Tensor) -> Tensor:
    return model.blocks[1].linear1(inputs[:, :1].expand(-1, 8)).square().mean()


def of_a_weight(model: Any, inputs: Tensor) -> Tensor:
    return F.linear(inputs[:, :1].expand(-1, 8), model.head.weight).square().mean()


def of_all_weights(model: Any, _: Tensor) -> Tensor:
    return sum(parameter.square().mean() for parameter in model.parameters())


ALONE = r"is called on its own, but its weights are sharded by rows, .*test_loop_model.py:\d+\); call the whole model"
USED = r"the code computes with sharded weights: RuntimeError: .*test_loop_model.py:\d+\); this strategy shards"


@pytest.mark.parametrize(
    ("penalty", "text"),
    [(of_the_head, f"^head {ALONE}"), (of_a_layer, f"^blocks.1.linear1 {ALONE}"), (of_a_weight, f"^{USED}")],
)
def test_what_computes_with_rows_is_refused_with_its_line(penalty: Any, text: str) -> None:
    for found in worlds.run(2, ended, "zero3", partial(training, penalty=penalty)):
        assert re.search(text, found)
    assert len({*worlds.run(2, ended, "ddp", partial(training, penalty=penalty))}) == 1


@pytest.mark.parametrize("size", [2, 3])
def test_a_penalty_on_weights_that_are_kept_gathered_in_16_bits_has_the_bits_of_one_process(size: int) -> None:
    """The gradient of the penalty reaches a weight before the backward of the weight's unit begins."""
    penalized = partial(training, penalty=of_all_weights)
    [expected] = worlds.run(1, partial(ended, precision="bf16-compute"), "single", penalized)
    assert {*worlds.run(size, partial(ended, precision="bf16-compute"), "zero2", penalized)} == {expected}
