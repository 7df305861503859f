"""Training on a pretended card: the CPU's bits, all tensors on one device, no wait between reports, no race."""

from __future__ import annotations

import pytest
import torch
from card import DEVICE, Card
from torch import Tensor
from worlds import run

from lockstep.comm.world import World
from lockstep.common.rank import RankInfo
from lockstep.config.load import load
from lockstep.core.shard import local_tensor
from lockstep.run.build import setup
from lockstep.run.engine import start_engine
from lockstep.run.resolved import resolve
from lockstep.training.evaluate import evaluate

STEPS = 3
BASE = [
    "recipe.microbatches=4",
    "recipe.ema.decay=0.9",
    "recipe.clip_norm=0.5",
    "recipe.data.augment.crop_padding=1",
    "recipe.data.augment.flip=true",
]
PLAIN = ["recipe.optimizer.nesterov=null", "recipe.optimizer.momentum=null"]


def _trained(
    world: World, strategy: str, overrides: list[str], card: Card | None
) -> tuple[dict[str, Tensor], list[str]]:
    """Train some steps; return all tensors of the state and what waited in all steps but the first."""
    loaded = load("digits", [*BASE, *overrides, f"placement.strategy={strategy}"])
    ready = setup(loaded.config.recipe)
    engine, loader = start_engine(ready, resolve(loaded, world.size), world)
    steps = loader.training(0)
    for number in range(STEPS):
        step, microbatches = next(steps)
        engine.forward_backward(microbatches, step)
        engine.update(0.1, loaded.config.recipe.clip_norm)
        if card is not None and number == 0:
            card.waits.clear()  # constants are made in the first
    waits = list(card.waits) if card is not None else []
    figures = evaluate(engine, world, ready.task, loader.validation(16), loader.validation_batches(16))
    state = engine.state()
    names = ("loss", "weight", "samples", "counted", "correct1")
    tensors = {"figures": torch.stack([figures.sums[name].double() for name in names])}
    for kind, held in (("model", state.model), ("optimizer", state.optimizer), ("ema", state.ema or {})):
        tensors |= {f"{kind} {name}": local_tensor(each).detach().cpu().clone() for name, each in held.items()}
    engine.load(state)
    engine.close()
    return tensors, waits


def on_cpu(world: World, strategy: str, overrides: list[str]) -> dict[str, Tensor]:
    return _trained(world, strategy, overrides, None)[0]


def on_card(world: World, strategy: str, overrides: list[str]) -> tuple[dict[str, Tensor], list[str], list[str]]:
    info = RankInfo(world.rank, world.size, world.local_rank, world.local_size, "test")
    with Card() as card:
        tensors, waits = _trained(World(info, DEVICE, world._groups, world._timeout), strategy, overrides, card)
    return tensors, waits, card.races


@pytest.mark.parametrize(
    "overrides",
    [
        ["recipe.mix.mixup=0.2", "recipe.mix.cutmix=1.0"],
        ["recipe.optimizer.name=lars"],
        [*PLAIN, "recipe.optimizer.name=adamw", "recipe.memory_format=channels_last"],
        [*PLAIN, "recipe.optimizer.name=lamb"],
    ],
)
def test_one_process(overrides: list[str]) -> None:
    world = World(RankInfo(0, 1, 0, 1, "test"), torch.device("cpu"))
    _check(on_cpu(world, "single", overrides), *on_card(world, "single", overrides))


def test_skipping_steps_waits_once_in_each() -> None:
    world = World(RankInfo(0, 1, 0, 1, "test"), torch.device("cpu"))
    _, waits, races = on_card(world, "single", ["recipe.nonfinite=skip"])
    assert [each.split(" (")[1] for each in waits] == ["_finite)"] * (STEPS - 1)
    assert not races


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_no_step_waits_for_a_real_card() -> None:
    loaded = load("digits", [*BASE, "placement.strategy=single"])
    ready = setup(loaded.config.recipe)
    world = World(RankInfo(0, 1, 0, 1, "test"), DEVICE)
    engine, loader = start_engine(ready, resolve(loaded, world.size), world)
    steps = loader.training(0)
    try:
        for number in range(STEPS + 1):
            step, microbatches = next(steps)
            engine.forward_backward(microbatches, step)
            engine.update(0.1, loaded.config.recipe.clip_norm)
            if number == 0:  # constants are made in the first
                torch.cuda.set_sync_debug_mode("error")
    finally:
        torch.cuda.set_sync_debug_mode("default")
        engine.close()


@pytest.mark.worlds
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_two_processes(strategy: str) -> None:
    small = ["placement.strategy.bucket_mib=0.01"]  # so that some travel while backward makes others
    for cpu, card in zip(run(2, on_cpu, strategy, small), run(2, on_card, strategy, small), strict=True):
        _check(cpu, *card)


def _check(expected: dict[str, Tensor], found: dict[str, Tensor], waits: list[str], races: list[str]) -> None:
    assert not waits
    assert not races
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    assert expected.keys() == found.keys()
