"""Slicing by torch, which ours is measured beside, does the same work."""

import pytest
import torch
import worlds
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from benchmarks.tensor_learners import HEADS, Work, sliced_by_torch
from lockstep.comm.world import World

pytestmark = pytest.mark.slow("it is of torch's slicing, which ours is measured beside")
WORK = Work(32, layers=2, sequences=2, tokens=8)


def by_torch(world: World) -> tuple[float, dict[str, Tensor], int]:
    model = sliced_by_torch(WORK.build(), init_device_mesh("cpu", (world.size,)))
    sliced = sum(isinstance(each, DTensor) for each in model.parameters())
    return *_trained(model), sliced


def _trained(model: torch.nn.Module) -> tuple[float, dict[str, Tensor]]:
    loss = WORK.loss(model)
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return loss.item(), {
        name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in gradients.items()
    }


@pytest.mark.worlds
@pytest.mark.parametrize("size", [2, 4])
def test_what_torch_slices_computes_the_gradients_of_the_whole(size: int) -> None:
    loss, gradients = _trained(WORK.build())
    for of_rank, found, sliced in worlds.run(size, by_torch):
        assert sliced == 4 * WORK.layers
        assert of_rank == pytest.approx(loss, rel=1e-5)
        assert found.keys() == gradients.keys()
        for name, each in gradients.items():
            ours = each
            if "queries_keys_values" in name:  # whose rows torch has in the order of ranks
                ours = each.view(3, size, -1, WORK.width).transpose(0, 1).reshape(each.shape)
            assert torch.allclose(found[name], ours, rtol=1e-3, atol=1e-6), name


def test_chunks_compute_the_gradients_of_the_whole() -> None:
    loss, gradients = _trained(WORK.build())
    cut_loss, cut = _trained(Work(32, layers=2, sequences=2, tokens=8, chunks=HEADS).build())
    assert cut_loss == pytest.approx(loss, rel=1e-5)
    for name, each in gradients.items():
        assert cut[name].norm().item() == pytest.approx(each.norm().item(), rel=1e-3), name
