"""Slicing by torch, which ours is measured beside, does the same work; and every figure is there."""

import json

import pytest
import torch
import worlds
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from benchmarks import tensor
from benchmarks.report import as_json
from benchmarks.tensor_learners import HEADS, Work, sliced_by_torch
from lockstep.comm.world import World

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


@pytest.mark.worlds
def test_all_figures_are_measured() -> None:
    found = list(tensor.results(quick=True))
    assert [each.name for each in found] == [
        "tensor-price-forward-and-backward-32",
        "tensor-price-a-whole-step-32",
        "tensor-where-32",
        "tensor-time-2-32",
        "tensor-memory-2-32",
        "tensor-rows-time-2",
        "tensor-rows-memory-2",
    ]
    figures = json.loads(json.dumps(as_json(found, load_before=0.0, quick=True)))["results"]
    medians = [{row["name"]: row["median"] for row in each["rows"]} for each in figures]
    assert [list(each) for each in medians[:2]] == [["1 chunk", "8 chunks"]] * 2
    assert all(figure > 0 for each in (*medians[:2], *medians[3:]) for figure in each.values())
    assert list(medians[3]) == ["torch's parallelize_module", *(f"lockstep tensor, {each} chunks" for each in (2, 8))]
    assert list(medians[4]) == [*medians[3], "lockstep ddp"]
    assert [list(each) for each in medians[5:]] == [["table and head whole", "table and head in chunks"]] * 2
    assert [len(each["verdicts"]) for each in figures] == [1, 1, 0, 2, 2, 1, 1]
    # What a step consists of adds up to it, in each turn.
    turns = {row["name"]: row["turns"] for row in figures[2]["rows"]}
    for cut in ("1 chunk", "8 chunks"):
        whole, *parts = [of for name, of in turns.items() if name.startswith(f"{cut}: ")]
        assert len(parts) == 4
        assert [sum(each) for each in zip(*parts, strict=True)] == pytest.approx(whole)
