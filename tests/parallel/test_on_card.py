"""Training on a pretended card: the CPU's bits, all tensors on one device, no wait between reports, no race."""

from collections.abc import Callable
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import toys
import wayward
from card import DEVICE, Card
from streams import Streams
from torch import Tensor, nn
from worlds import run

from lockstep.comm.fsdp import ShardedModel
from lockstep.comm.world import World
from lockstep.common.rank import RankInfo
from lockstep.config.load import load
from lockstep.core import norm
from lockstep.core.shard import get_local_tensor
from lockstep.parallel.engine import State
from lockstep.parallel.offloaded import OffloadedOptimizer
from lockstep.parallel.optimizer_step import get_gradient
from lockstep.setup.build import build_setup
from lockstep.setup.engine import start_engine
from lockstep.setup.prepare import PreparedRun
from lockstep.setup.resolved import resolve_config
from lockstep.training.evaluate import evaluate

STEPS = 3
BASE = [
    "recipe.microbatches=4",
    "recipe.ema.decay=0.9",
    "recipe.clip_norm=0.5",
    "recipe.data.augment.crop_padding=1",
    "recipe.data.augment.flip=true",
]
BEYOND = pytest.mark.slow("lamb has norms of layers too, and zero3 and a pipeline most streams")
PLAIN = ["recipe.optimizer.nesterov=null", "recipe.optimizer.momentum=null"]


def _trained(
    world: World, strategy: str, overrides: list[str], card: Card | None, sharded: bool = False
) -> tuple[dict[str, Tensor], list[str]]:
    """Train some steps; return all tensors of the state and what waited in all steps but the first."""
    loaded = load("digits", [*BASE, *overrides, f"placement.strategy={strategy}"])
    ready = build_setup(loaded.config.recipe)
    engine, loader = start_engine(PreparedRun(resolve_config(loaded, world.size), ready), world)
    steps = loader.iterate_steps(0)
    for number in range(STEPS):
        step, microbatches = next(steps)
        engine.forward_backward(microbatches, step)
        engine.update(0.1, loaded.config.recipe.clip_norm)
        if card is not None and number == 0:
            card.waits.clear()  # constants are made in the first
    waits = list(card.waits) if card is not None else []
    state = engine.state()
    tensors = _tensors(state)
    if not sharded:  # what is in rows is not loaded as it is
        figures = evaluate(
            engine, world, ready.task, loader.iterate_validation_batches(16), loader.count_validation_batches(16)
        )
        names = ("loss", "weight", "samples", "counted", "correct1")
        tensors["figures"] = torch.stack([figures.sums[name].double() for name in names])
        engine.load(state)
    engine.close()
    return tensors, waits


def _tensors(state: State) -> dict[str, Tensor]:
    held = {"model": state.model, "optimizer": state.optimizer, "ema": state.ema or {}}
    return {
        f"{kind} {name}": get_local_tensor(each).detach().cpu().clone()
        for kind, tensors in held.items()
        for name, each in tensors.items()
    }


def on_cpu(world: World, strategy: str, overrides: list[str]) -> dict[str, Tensor]:
    with mock.patch.object(norm, "_is_folded", return_value=True):  # as on a card
        return _trained(world, strategy, overrides, None)[0]


def on_card(world: World, strategy: str, overrides: list[str]) -> tuple[dict[str, Tensor], list[str], list[str]]:
    info = RankInfo(world.rank, world.size, world.local_rank, world.local_size, "test")
    with Card() as card:
        tensors, waits = _trained(World(info, DEVICE, world._groups), strategy, overrides, card)
    return tensors, waits, card.races


@pytest.mark.parametrize(
    "overrides",
    [
        ["recipe.mix.mixup=0.2", "recipe.mix.cutmix=1.0"],
        pytest.param(["recipe.optimizer.name=lars"], marks=BEYOND),
        pytest.param([*PLAIN, "recipe.optimizer.name=adamw", "recipe.memory_format=channels_last"], marks=BEYOND),
        pytest.param([*PLAIN, "recipe.optimizer.name=lamb"], marks=pytest.mark.slow("another optimizer")),
    ],
)
def test_one_process(overrides: list[str]) -> None:
    world = World(RankInfo(0, 1, 0, 1, "test"), torch.device("cpu"))
    _check(on_cpu(world, "single", overrides), *on_card(world, "single", overrides))


def test_skipping_steps_waits_once_in_each() -> None:
    world = World(RankInfo(0, 1, 0, 1, "test"), torch.device("cpu"))
    _, waits, races = on_card(world, "single", ["recipe.nonfinite=skip"])
    assert [each.split(" (")[1] for each in waits] == ["_are_finite)"] * (STEPS - 1)
    assert not races


@pytest.mark.slow("needs a card")
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_no_step_waits_for_a_real_card() -> None:
    loaded = load("digits", [*BASE, "placement.strategy=single"])
    ready = build_setup(loaded.config.recipe)
    world = World(RankInfo(0, 1, 0, 1, "test"), DEVICE)
    engine, loader = start_engine(PreparedRun(resolve_config(loaded, world.size), ready), world)
    steps = loader.iterate_steps(0)
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


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_two_processes(strategy: str) -> None:
    small = ["placement.strategy.bucket_mib=0.01"]  # so that some travel while backward makes others
    for cpu, card in zip(run(2, on_cpu, strategy, small), run(2, on_card, strategy, small), strict=True):
        _check(cpu, *card)


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
def test_what_is_offloaded_is_computed_with_on_the_card() -> None:
    more = [*PLAIN, "recipe.optimizer.name=lamb"]
    strategy = "{name: zero1, offload: true}"
    for cpu, (found, waits, races) in zip(
        run(2, on_cpu, "zero1", more), run(2, offloaded, strategy, more), strict=True
    ):
        _check(cpu, found, [], races)
        assert waits  # for what is copied to the memory of the CPU


def offloaded(world: World, strategy: str, overrides: list[str]) -> tuple[dict[str, Tensor], list[str], list[str]]:
    """Train in small pieces, each of which has to be on the card for its update."""
    step_of = OffloadedOptimizer.step

    def step(self: OffloadedOptimizer, own: Callable[[], object]) -> None:
        def checked() -> None:
            [group] = self.optimizer.param_groups
            moved = [each for parameter in group["params"] for each in (parameter, get_gradient(parameter))]
            assert {each.device for each in moved} == {DEVICE}
            own()

        step_of(self, checked)

    def put(parameter: Tensor, data: Tensor) -> None:  # what is pretended to be on a card is of another class
        torch.utils.swap_tensors(parameter, nn.Parameter(data, requires_grad=False))

    with (
        mock.patch.object(OffloadedOptimizer, "step", step),
        mock.patch.multiple("lockstep.parallel.offloaded", _PIECE_BYTES=1 << 12, _set_data=put),
    ):
        return on_card(world, strategy, overrides)


def sharded(world: World, strategy: str) -> dict[str, Tensor]:
    return _trained(world, strategy, [], None, sharded=True)[0]


def on_streams(world: World, strategy: str) -> tuple[dict[str, Tensor], list[str]]:
    with Streams() as streams:
        return sharded(world, strategy), streams.races


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
@pytest.mark.parametrize(
    "strategy",
    [
        *(pytest.param(each, marks=BEYOND) for each in ("ddp", "zero2", "{name: hsdp, replicate: 2}")),
        "zero3",
        "{name: pipeline, schedule: zero_bubble}",
    ],
)
def test_what_streams_do_to_one_memory_is_in_order(strategy: str) -> None:
    size = 4 if "hsdp" in strategy else 2
    for cpu, (found, races) in zip(run(size, sharded, strategy), run(size, on_streams, strategy), strict=True):
        _check(cpu, found, [], races)


class WithoutLastBlock(wayward.LayerDrop):
    """A model that leaves out its last block every second time: its gradients are zeros that no backward hands on."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0

    def through(self, x: Tensor, images: Tensor) -> Tensor:
        self.forwards += 1
        for block in self.blocks[: 3 + self.forwards % 2]:
            x = block(x)
        return x


def blocks_left_out(world: World, case: toys.Case, anywhere: bool) -> list[str]:
    """Return the races of a training; gradients are passed on on whichever stream is current if `anywhere`."""

    def pass_on(self: ShardedModel, unit: int, gradients: Tensor, output: Tensor, may_wait: bool) -> None:
        self.receive(unit, gradients, output, may_wait)

    with (
        mock.patch.object(ShardedModel, "_receive_on_stream", pass_on) if anywhere else nullcontext(),
        Streams() as streams,
    ):
        toys.whole_trace(world, case)
    return streams.races


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
@pytest.mark.parametrize("anywhere", [False, True])
def test_gradients_are_passed_on_on_one_stream_whenever_they_come(anywhere: bool) -> None:
    case = toys.Case(6, model=WithoutLastBlock, strategy="zero3")
    races, _ = run(2, blocks_left_out, case, anywhere)
    assert bool(races) == anywhere, races


def _check(expected: dict[str, Tensor], found: dict[str, Tensor], waits: list[str], races: list[str]) -> None:
    assert not waits
    assert not races
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    assert expected.keys() == found.keys()
