"""Torch used by hand, on the same network and data, ends with our weights but for rounding."""

from collections.abc import Callable

import ours
import pytest
import torch
import worlds
from small_run import PROCESSES, RECIPES, STEPS, TOLERANCE, Recipe, build, data, furthest, wrong
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from lockstep.comm.world import World

pytestmark = pytest.mark.slow("other programs, or minutes")

Weights = dict[str, Tensor]


def ddp(world: World, recipe: Recipe) -> Weights:
    model = build()
    wrapped = DistributedDataParallel(model)
    steps(world, wrapped, recipe.make(model.parameters()), recipe)
    return weights(model)


def zero_redundancy(world: World, recipe: Recipe) -> Weights:
    model = build()
    wrapped = DistributedDataParallel(model)
    kind = getattr(torch.optim, recipe.optimizer)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), kind, lr=recipe.lr, foreach=True, **recipe.options)
    steps(world, wrapped, optimizer, recipe)
    return weights(model)


def fsdp_kept(world: World, recipe: Recipe) -> Weights:
    return fsdp(world, recipe, reshard_after_forward=False)


def fsdp(world: World, recipe: Recipe, reshard_after_forward: bool = True) -> Weights:
    model = build()
    mesh = init_device_mesh("cpu", (world.size,))
    for block in (*model, model):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward)
    steps(world, model, recipe.make(model.parameters()), recipe)
    return {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}  # type: ignore[operator]


def one_process(_: World, recipe: Recipe) -> Weights:
    model = build()
    optimizer = recipe.make(model.parameters())
    for step in range(STEPS):
        for microbatch in range(PROCESSES):
            inputs, targets = data(step, microbatch)
            (F.cross_entropy(model(inputs), targets) / PROCESSES).backward()
        update(model, optimizer, recipe)
    return weights(model)


def steps(world: World, model: nn.Module, optimizer: torch.optim.Optimizer, recipe: Recipe) -> None:
    for step in range(STEPS):
        inputs, targets = data(step, world.rank)
        F.cross_entropy(model(inputs), targets).backward()
        update(model, optimizer, recipe)


def update(model: nn.Module, optimizer: torch.optim.Optimizer, recipe: Recipe) -> None:
    if recipe.max_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_norm)
    optimizer.step()
    optimizer.zero_grad()


def weights(model: nn.Module) -> Weights:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


REFERENCES: dict[str, tuple[int, Callable[[World, Recipe], Weights]]] = {
    "single": (1, one_process),
    "ddp": (PROCESSES, ddp),
    "zero1": (PROCESSES, zero_redundancy),
    "zero2": (PROCESSES, fsdp_kept),
    "zero3": (PROCESSES, fsdp),
}


@pytest.mark.worlds
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("strategy", REFERENCES)
def test_torch_comes_to_our_weights(strategy: str, name: str) -> None:
    size, reference = REFERENCES[strategy]
    theirs, *_ = worlds.run(size, reference, RECIPES[name])
    mine, *_ = worlds.run(size, ours.trained, strategy, RECIPES[name])
    assert furthest(mine, theirs) < TOLERANCE
    other, *_ = worlds.run(size, reference, wrong(RECIPES[name]))
    assert furthest(other, mine) > 10 * TOLERANCE
