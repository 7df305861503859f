"""DeepSpeed's engine computes by the recipe: what one process computes, but for rounding, and its state is ours."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Final

import pytest
import torch
import toys
import worlds
from component import require_package
from torch import Tensor
from toys import Case, Trace

from lockstep.comm.world import World
from lockstep.core.shard import get_local_tensor
from lockstep.parallel.engine import State
from lockstep.parallel.layouts.base import gather_full_tensors

pytestmark = [pytest.mark.slow("several ranks"), pytest.mark.worlds]
# Relative to a tensor's largest magnitude. Rounding: in fp32 u = 6e-8; sums of 12 samples x 36 places and of 72
# products have a likely error of about 20 u, and five layers, forward and back, in four steps add up some 40 of them:
# 5e-5 at worst. Clipping: DeepSpeed adds 1e-6 to a norm, which is near 1 here.
TOLERANCE: Final = 5e-5


class Steady(toys.Toy):
    """It calls the same layers on every rank: stage 3 gathers a layer's parameters where it is called."""

    def forward(self, images: Tensor) -> Tensor:
        x = self.second(self.frozen(self.first(self.stem(images)).relu())).mean((2, 3))
        return self.head(self.back(self.into(self.dropout(x)).relu()))


PLAIN: Final = Case(model=Steady, strategy="deepspeed", alone="deepspeed")
CASES: Final = {
    "clipped": replace(PLAIN, clip=0.1, ema=True),
    "adamw, six micro-batches": replace(PLAIN, microbatches=6, optimizer="adamw", ema=True),
    "recomputed, channels last": replace(PLAIN, recompute=1, channels_last=True),
    "bf16": replace(PLAIN, precision="bf16"),
    "fp16, skipping": replace(PLAIN, precision="fp16", initial_scale=2.0**20, ema=True, clip=0.5),
    "not finite, skipped": replace(PLAIN, poisoned=1, skip_nonfinite=True, ema=True, clip=0.5),
}
STAGES: Final = {
    "stage 1": (("stage", 1),),
    "stage 2": (("stage", 2),),
    "stage 3": (("stage", 3),),
    "stage 2, offloaded": (("stage", 2), ("offload", "cpu")),
    "stage 3, offloaded": (("stage", 3), ("offload", "cpu")),
}
LONGER: Final = replace(CASES["adamw, six micro-batches"], samples=(12, 7, 3, 12, 12))


@pytest.fixture(autouse=True)
def _installed() -> None:
    require_package("deepspeed")


def under(case: Case, stage: str) -> Case:
    return replace(case, options=STAGES[stage])


def alone(case: Case) -> Case:
    return replace(case, alone="single")


def runs(world: World, cases: Sequence[Case]) -> list[tuple[State, Trace]]:
    return [toys.states(world, case, 0, None) for case in cases]


@cache
def single(name: str) -> tuple[State, Trace]:
    """Return what one process comes to without DeepSpeed."""
    [found] = worlds.run(1, toys.states, alone(CASES[name]), 0, None)
    return found  # type: ignore[no-any-return]


EVERYWHERE: Final = ("stage 1", "stage 3")
ALL: Final = [(name, stage) for name in CASES for stage in STAGES if name == "clipped" or stage in EVERYWHERE]
ONE_EACH: Final = [(name, EVERYWHERE[number % 2]) for number, name in enumerate(CASES)]
OTHERS: Final = [each for each in ALL if each not in ONE_EACH[1:]]  # the first recipe at all stages
BEYOND: Final = pytest.mark.slow("one rank does each recipe above, three its other stage, two resume runs")


@pytest.mark.parametrize(
    ("size", "names"),
    [(1, ONE_EACH), (3, OTHERS), *(pytest.param(size, ALL, marks=BEYOND) for size in (1, 2, 3))],
    ids=["one", "three", "one, at each stage", "two, at each stage", "three, at each stage"],
)
def test_any_recipe_comes_to_what_one_process_does(size: int, names: list[tuple[str, str]]) -> None:
    """Scale, rate, clipping, BatchNorm, averages, dropped steps, uneven micro-batches: nothing depends on the ranks."""
    by_rank = worlds.run(size, runs, [under(CASES[name], stage) for name, stage in names])
    for rank in by_rank:
        for (name, stage), (found, here) in zip(names, rank, strict=True):
            expected, told = single(name)
            assert_close(found, expected, f"{name}, {stage}")
            assert [flags(here, step) for step in range(4)] == [flags(told, step) for step in range(4)], (name, stage)


def flags(trace: Trace, step: int) -> list[str]:
    """Return whether a step was applied, and its loss scale."""
    return trace[f"step {step}"].split()[2:4]


def assert_close(found: State, expected: State, where: str) -> None:
    assert found.scalars == expected.scalars, where
    pairs = (found.model, expected.model), (found.optimizer, expected.optimizer), (found.ema or {}, expected.ema or {})
    for mine, theirs in pairs:
        assert mine.keys() == theirs.keys(), where
        for name, tensor in theirs.items():
            assert furthest(get_local_tensor(mine[name]), get_local_tensor(tensor)) < TOLERANCE, (where, name)


def furthest(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().max() / other.double().abs().max().clamp(min=1e-30))


def test_a_run_goes_on_under_another_strategy_and_back() -> None:
    [[(expected, _)]] = worlds.run(1, runs, [alone(LONGER)])
    half = replace(LONGER, samples=LONGER.samples[:3])
    [[(state, _)]] = worlds.run(1, runs, [alone(half)])
    for stage in STAGES:
        for found, _ in worlds.run(2, toys.states, under(LONGER, stage), 3, state):
            assert_close(found, expected, f"single, then {stage}")
    for stage, after in (("stage 1", "zero3"), ("stage 3", "single"), ("stage 2, offloaded", "zero1")):
        (state, _), *_ = worlds.run(3, toys.states, under(half, stage), 0, None)
        size = 1 if after == "single" else 2
        (found, _), *_ = worlds.run(size, toys.states, replace(alone(LONGER), strategy=after), 3, state)
        assert_close(found, expected, f"{stage}, then {after}")


def test_a_state_is_taken_over_to_the_bit() -> None:
    half = replace(LONGER, samples=LONGER.samples[:3])
    [[(state, _)]] = worlds.run(1, runs, [alone(half)])
    for told in worlds.run(3, taken_over, [under(LONGER, stage) for stage in STAGES], state):
        assert told == [toys.fingerprint(state)] * len(STAGES)


def taken_over(world: World, cases: Sequence[Case], state: State) -> list[Trace]:
    found = []
    for case in cases:
        engine = toys.engine(world, case)
        engine.load(state)
        found.append(toys.fingerprint(toys.as_from_disk(toys.whole_state(world, engine))))
        engine.close()
    return found


def test_gradients_of_uneven_micro_batches_are_those_of_float64() -> None:
    """And a step of no weight moves nothing."""
    case = replace(PLAIN, samples=(7,), model=toys.Plain)  # BatchNorm keeps statistics of float32
    [[expected]] = worlds.run(1, first_gradients, [replace(alone(case), dtype=torch.float64)])
    for rank in worlds.run(3, first_gradients, [under(case, stage) for stage in STAGES]):
        for found, stage in zip(rank, STAGES, strict=True):
            for name, gradient in expected.items():
                assert furthest(found[name], gradient) < 1e-5, (stage, name)


def first_gradients(world: World, cases: Sequence[Case]) -> list[dict[str, Tensor]]:
    return [_first_gradients(world, case) for case in cases]


def _first_gradients(world: World, case: Case) -> dict[str, Tensor]:
    engine = toys.engine(world, case)
    (step, *_), *_ = toys.steps(case)
    own = toys.share(world, case, step)
    before = toys.fingerprint(toys.as_from_disk(toys.whole_state(world, engine)))
    engine.forward_backward([replace(each, weight=0) for each in own], step._replace(total_weight=0))
    assert not engine.update(0.1, 1.0).applied
    assert toys.fingerprint(toys.as_from_disk(toys.whole_state(world, engine))) == before
    engine.forward_backward(own, step)
    gradients = {name: tensor.clone() for name, tensor in gather_full_tensors(world, engine.gradients()).items()}
    engine.close()
    return gradients
