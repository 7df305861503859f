"""An optimizer that needs whole tensors updates a model in chunks as the model without chunks."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
import worlds
from loop_ends import ended
from one_process import joined
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from whole_updates import MAKERS

import lockstep

MESH: Any = {"name": "mesh", "shard": 2, "tensor": 2}
PLAN = {"first": "whole", "up": "colwise", "down": "rowwise"}


class Pair(nn.Module):
    """Two split layers between others. The weights of `down` are split by columns, so that its rows are rearranged."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.down(self.up(self.first(inputs)).tanh())


def train(run: Any, name: str, chunks: int = 2, strategy: Any = "auto") -> nn.Module:
    model = Pair()
    model, _ = run.place(model, MAKERS[name](model), strategy, chunks=chunks, plan=PLAN if chunks > 1 else None)
    inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    for step in run.steps(TensorDataset(inputs), batch=12, microbatches=4, epochs=2):
        for (batch,) in step:
            step.backward(mean=model(batch).square().mean())
        step.update(clip=0.5)
    return model


@pytest.mark.worlds
@pytest.mark.parametrize("name", ["muon", "adafactor"])
@pytest.mark.parametrize(
    ("strategy", "size"),
    [
        ("tensor", 2),
        ("ddp", 2),
        ("parameter_server", 2),
        pytest.param("zero1", 3, marks=pytest.mark.slow("quick tests have tensor and ddp")),
        pytest.param("zero3", 2, marks=pytest.mark.slow("quick tests have tensor and ddp")),
        pytest.param(MESH, 4, marks=pytest.mark.slow("four ranks")),
        pytest.param({"name": "tensor", "replicate": 2}, 4, marks=pytest.mark.slow("four ranks")),
    ],
    ids=str,
)
def test_a_model_in_chunks_has_the_bits_of_one_process(name: str, strategy: Any, size: int) -> None:
    loop = partial(train, name=name)
    [alone] = worlds.run(1, ended, "single", loop)
    assert len(alone) == 64, alone
    assert {*worlds.run(size, ended, strategy, loop)} == {alone}


@pytest.mark.worlds
@pytest.mark.parametrize("strategy", ["zero1", pytest.param("zero3", marks=pytest.mark.slow("a second strategy"))])
def test_an_audit_finds_nothing_in_a_sound_run(strategy: str) -> None:
    loop = partial(train, name="muon")
    [alone] = worlds.run(1, ended, "single", loop)
    assert {*worlds.run(2, ended, strategy, loop, 1)} == {alone}


def weights(chunks: int) -> Mapping[str, Tensor]:
    with joined() as run:
        train(run, "muon", chunks)
        return {name: tensor.clone() for name, tensor in run._require_placed().gather_weights().items()}


def test_the_owner_updates_the_matrix_of_the_model_without_chunks() -> None:
    """In the order of the chunks, the columns of `down` would be the rows of another matrix."""
    whole, in_chunks = weights(1), weights(2)
    for name, tensor in whole.items():
        torch.testing.assert_close(in_chunks[name], tensor, rtol=1e-3, atol=1e-4)


def verified() -> None:
    with lockstep.join(seed=0) as run:
        train(run, "muon")


@pytest.mark.slow("five runs of a loop")
def test_a_run_resumes_under_another_placement() -> None:
    rows = lockstep.verify(verified, processes=(1, 2), strategies=("tensor", "zero3"))
    assert {row.verdict for row in rows} == {"identical"}, [row.line for row in rows]
    assert any(row.resumed for row in rows)
