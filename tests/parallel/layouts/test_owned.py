"""An optimizer that needs whole tensors gives the same bits under strategies that shard tensors in rows."""

import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import loops
import pytest
import torch
import worlds
from loop_ends import ended
from torch import Tensor, nn
from whole_updates import MAKERS

from lockstep.comm.world import World
from lockstep.core.shard import Shard
from lockstep.parallel.layouts.base import OptimizerStateLayout, RowSpan, gather_full_tensors
from lockstep.parallel.layouts.owned import OwnedLayout

pytestmark = pytest.mark.worlds


def trained(run: Any, name: str) -> None:
    model = loops.net()
    model, _ = run.place(model, MAKERS[name](model))
    for step in loops.computed(run, model, epochs=2):
        step.update(clip=0.5)


def fingerprint(world: World, strategy: str, name: str) -> str:
    return ended(world, strategy, partial(trained, name=name))


PLACEMENTS = [("zero1", 2), ("zero2", 3), ("zero3", 2), ("zero3", 3), ("hsdp", 4)]


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    "placements",
    [
        pytest.param(PLACEMENTS[:1], id="zero1"),
        pytest.param(PLACEMENTS[3:4], id="zero3"),
        pytest.param(PLACEMENTS, id="all", marks=pytest.mark.slow("quick tests have zero1 and zero3")),
    ],
)
def test_an_optimizer_that_needs_whole_tensors_has_the_bits_of_one_process(
    name: str, placements: list[tuple[str, int]]
) -> None:
    [alone] = worlds.run(1, fingerprint, "single", name)
    assert len(alone) == 64, alone
    for strategy, size in placements:
        assert {*worlds.run(size, fingerprint, strategy, name)} == {alone}, (strategy, size)


class Rows:
    """A layout in rows without a model: rank r of 3 has row r of `weight`, and the whole of `scale`."""

    def __init__(self, world: World) -> None:
        self.world = world
        row = torch.arange(12.0).reshape(3, 4)[world.rank : world.rank + 1]
        self.trained = [("weight", nn.Parameter(row.clone())), ("scale", nn.Parameter(torch.ones(())))]
        self.published = 0

    def as_shard(self, name: str, tensor: Tensor) -> Any:
        return Shard(tensor, self.world.rank, torch.Size((3, 4))) if name == "weight" else tensor

    def spans(self, _name: str, shape: torch.Size) -> list[RowSpan]:
        return [RowSpan(rank, rank, 1, True) for rank in range(3)] if shape else []

    def collect(self) -> None:
        weight, scale = (parameter for _, parameter in self.trained)
        weight.grad = torch.full_like(weight, float(self.world.rank + 1))
        scale.grad = torch.full_like(scale, 5.0)  # of a tensor that every rank has, all ranks have the same sum

    def publish(self) -> None:
        self.published += 1

    def reload(self) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {name: self.as_shard(name, parameter.detach()) for name, parameter in self.trained}


def one_step(world: World) -> dict[str, Any]:
    rows = Rows(world)
    owned = OwnedLayout(rows, world, {"weight": (4, 1), "scale": ()})  # type: ignore[arg-type]
    weight, scale = (parameter for _, parameter in owned.trained)
    owned.collect()
    seen = {
        "shape": tuple(weight.shape),
        "weight": weight.detach().clone(),
        "gradient": None if weight.grad is None else weight.grad.clone(),
        "rows": owned.norms.compute_row_norms([weight.grad, scale.grad]),  # type: ignore[list-item]
        "unowned": [*owned.placeholders] == ([] if world.rank == 0 else [weight]),
    }
    optimizer = torch.optim.SGD([weight, scale], lr=1.0, momentum=0.9)
    for each in owned.placeholders:
        each.grad = None
    optimizer.step()
    owned.publish()
    slots = OptimizerStateLayout(owned.trained, owned.as_shard)
    state, scalars = owned.get_optimizer_state(slots, optimizer)
    fresh = torch.optim.SGD([weight, scale], lr=1.0, momentum=0.9)
    owned.load_optimizer_state(slots, fresh, gather_full_tensors(world, state), scalars)
    loaded = {name: fresh.state[parameter].get("momentum_buffer") for name, parameter in owned.trained}
    whole = gather_full_tensors(world, state)
    return {**seen, "row": rows.trained[0][1].detach(), "state": whole, "loaded": loaded, "published": rows.published}


def test_the_owner_gets_the_rows_of_all_ranks_and_sends_them_back_updated() -> None:
    found: list[Mapping[str, Any]] = worlds.run(3, one_step)
    weight = torch.arange(12.0).reshape(3, 4)
    gradient = torch.tensor([[1.0], [2.0], [3.0]]).expand(3, 4)
    assert [each["shape"] for each in found] == [(3, 4), (0, 4), (0, 4)]
    assert torch.equal(found[0]["weight"], weight)
    assert torch.equal(found[0]["gradient"], gradient)
    for rank, each in enumerate(found):
        assert each["unowned"]
        assert each["published"] == 1
        assert torch.equal(each["rows"][:3], torch.tensor([2.0, 4.0, 6.0], dtype=torch.float64))
        assert torch.equal(each["row"], (weight - gradient)[rank : rank + 1])
        assert torch.equal(each["state"]["weight/momentum_buffer"], gradient)
        assert (each["loaded"]["weight"] is None) == (rank != 0)  # a stand-in has no state
        assert float(each["loaded"]["scale"]) == 5.0


SCRIPT = """
import sys

sys.path.insert(0, {shared!r})
import loops
import whole_updates

import lockstep

strategy, last = sys.argv[1], int(sys.argv[2])
run = lockstep.join(seed=3, dir="runs/own")
model = loops.net()
model, _ = run.place(model, whole_updates.MAKERS[{name!r}](model), strategy=strategy)
for step in loops.computed(run, model, epochs=2):
    step.update(clip=0.5)
    if step.number == last:
        run.save()
        sys.exit()
print("weights", run.fingerprint())
"""


def runs(folder: Path, name: str, *placements: tuple[str, int, int]) -> str:
    """Return the weights after runs of a script that each stop after a step, and resume elsewhere."""
    folder.mkdir()
    shared = str(Path(loops.__file__).parent)
    (folder / "train.py").write_text(SCRIPT.format(shared=shared, name=name), encoding="utf-8")
    for strategy, size, last in placements:
        command = [
            sys.executable,
            "-m",
            "lockstep",
            "launch",
            f"--processes-per-node={size}",
            "--",
            "python",
            "train.py",
        ]
        ended = subprocess.run(
            [*command, strategy, str(last)], cwd=folder, capture_output=True, text=True, check=False, timeout=300
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
    return next(line for line in ended.stdout.splitlines() if line.startswith("weights"))


@pytest.mark.slow("five runs of a script")
@pytest.mark.parametrize("name", MAKERS)
def test_a_run_resumes_with_the_state_of_its_owners_under_another_placement(name: str, tmp_path: Path) -> None:
    whole = runs(tmp_path / "whole", name, ("single", 1, 0))
    parts = ("zero3", 3, 2), ("single", 1, 3), ("zero1", 2, 4), ("zero2", 2, 0)
    assert runs(tmp_path / "parts", name, *parts) == whole
