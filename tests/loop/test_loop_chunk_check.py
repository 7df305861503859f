"""A plan around code that mixes features is refused when the placed model is first called, with the layer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_joined import joined
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep

PLAN = {"*.up": "colwise", "*.down": "rowwise"}


def glu(h: Tensor) -> Tensor:
    one, other = h.chunk(2, -1)
    return torch.cat([one * other.sigmoid(), one], -1)


def unbind(h: Tensor) -> Tensor:
    one, other = h.unflatten(-1, (2, -1)).unbind(-2)
    return torch.cat([other, one], -1)


def four_heads(h: Tensor) -> Tensor:
    heads = h.unflatten(-1, (4, -1))
    return F.scaled_dot_product_attention(heads, heads, heads).flatten(-2)


MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda h: h.softmax(-1),
    "mean": lambda h: h - h.mean(-1, keepdim=True),
    "flip": lambda h: h.flip(-1),
    "glu": glu,
    "unbind": unbind,
    "four heads": four_heads,
}


class Block(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 32), nn.Linear(32, 6)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(self.between(self.up(x)))
        return found


class Net(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor], zero: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.head = Block(F.gelu), Block(between), nn.Linear(6, 3)
        if zero:
            nn.init.zeros_(self.second.down.weight)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        x = x + self.first(x)
        found: Tensor = self.head(x + self.second(x)) * scale
        return found


def train(run: Any, model: nn.Module, chunks: int = 4, **named: Any) -> list[int]:
    inputs = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, torch.arange(16) % 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _ = run.place(model, optimizer, chunks=chunks, plan=PLAN)
    done = []
    for step in run.steps(data, batch=8, microbatches=2, epochs=1):
        for x, y in step:
            step.backward(sum=F.cross_entropy(model(x, **named), y, reduction="sum"))
        step.update()
        done.append(step.number)
    return done


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("name", MIXING)
def test_code_that_mixes_features_is_refused_in_the_first_step(name: str, zero: bool) -> None:
    text = r"run.place: plan: second computes different outputs in 4 chunks than .*test_loop_chunk_check.py:\d+\); "
    with pytest.raises(lockstep.UsageError, match=text), joined() as run:
        train(run, Net(MIXING[name], zero))
    assert run.step == 0


def test_code_that_treats_each_feature_by_itself_trains_as_before() -> None:
    with joined() as run:
        assert train(run, Net(F.gelu), scale=2.0) == [1, 2]
        checked = run.fingerprint()
    with joined() as run, pytest.MonkeyPatch.context() as patch:
        patch.setattr("lockstep.loop.distributed_model.FirstCallCheck", lambda *_: None)
        train(run, Net(F.gelu), scale=2.0)
        assert run.fingerprint() == checked


def test_each_model_of_a_container_is_compared_at_its_first_call() -> None:
    nets = nn.ModuleDict({"right": Net(F.gelu), "wrong": Net(MIXING["flip"])})
    refused = pytest.raises(lockstep.UsageError, match=r"wrong\.second computes different outputs in 4 chunks")
    with refused, joined() as run:
        nets, _ = run.place(nets, torch.optim.SGD(nets.parameters(), lr=0.1), chunks=4, plan=PLAN)
        data = TensorDataset(torch.randn(8, 6), torch.arange(8) % 3)
        for step in run.steps(data, batch=8, microbatches=2, epochs=1):
            for x, y in step:
                outputs = nets["right"](x) + nets["wrong"](x)
                step.backward(sum=F.cross_entropy(outputs, y, reduction="sum"))


class NeverTwice(Net):
    """A model that no copy can be made of."""

    def __deepcopy__(self, _: Any) -> Any:
        raise TypeError("one is enough")


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (NeverTwice, "copy.deepcopy failed: one is enough; make"),
        (Net, "this would copy its 865 parameters twice; check"),
    ],
)
def test_a_model_that_is_not_compared_is_warned_of(
    model: type[Net], reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if model is Net:
        monkeypatch.setattr("lockstep.loop.chunk_check.MAX_COMPARED_PARAMETERS", 100)
    with joined() as run:
        assert train(run, model(F.gelu)) == [1, 2]
    assert f"warning: run.place: the chunked model was not compared with the whole model, because {reason}" in (
        capsys.readouterr().err
    )
