"""A custom loop with split layers outside of any block, on a mesh that also shards their weights."""

from typing import Any

import pytest
import torch
import worlds
from loop_ends import ended
from torch import Tensor, nn
from torch.utils.data import TensorDataset

MESH: Any = {"name": "mesh", "shard": 2, "tensor": 2}


class Pair(nn.Module):
    """Two split layers that are called by the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8, bias=False)
        self.down = nn.Linear(8, 2, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.down(self.up(inputs).tanh())


def train(run: Any) -> None:
    model = Pair()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = run.place(model, optimizer, chunks=2, plan={"up": "colwise", "down": "rowwise"})
    inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    for step in run.steps(TensorDataset(inputs), batch=12, microbatches=2, epochs=2):
        for (batch,) in step:
            step.backward(mean=model(batch).square().mean())
        step.update()


@pytest.mark.slow("four ranks")
@pytest.mark.worlds
def test_split_layers_outside_of_blocks_train_on_a_mesh_that_shards() -> None:
    """The guard did not know the gathered weights of a slice, and rejected the model."""
    assert worlds.run(4, ended, MESH, train) == worlds.run(1, ended, "single", train) * 4
