"""Every strategy that cuts the model gives the bits of one process: losses, norms, weights, state, average."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import toys
import zoo
from pairs import pairs
from same_bits import Placed, assert_resumed_bits, assert_same_bits
from toys import Case

from lockstep.parallel.groups import GroupSettings

STRATEGIES: dict[str, dict[int, tuple[tuple[str, int], ...]]] = {
    "zero1": {2: (), 3: (), 4: ()},
    "zero2": {2: (), 3: (), 4: ()},
    "zero3": {2: (), 3: (), 4: ()},
    "hsdp": {4: (("replicate", 2),), 6: (("replicate", 3),)},
    "parameter_server": {3: ()},
}

OFFLOADED = [("zero1", 3, (("offload", 1),)), ("zero2", 2, (("offload", 1),)), ("zero3", 3, (("offload", 1),))]

GROUPS = (GroupSettings(("head.*",), 2.0, {"weight_decay": 0.0}), GroupSettings(("*.bias", "sometimes.*"), 0.25))

CASES = {
    "sgd": Case(),
    "three micro-batches": Case(3),
    "six micro-batches, clipped, averaged": Case(6, clip=0.1, ema=True),
    "adamw, clipped": Case(8, optimizer="adamw", clip=0.1),
    "lamb": Case(5, optimizer="lamb", clip=1.0, ema=True),
    "lars": Case(optimizer="lars"),
    "bf16": Case(precision="bf16", clip=0.5),
    "bf16-compute": Case(precision="bf16-compute", clip=0.5, ema=True),
    "fp16, skipping": Case(precision="fp16", initial_scale=2.0**20, optimizer="adamw"),
    "fp16-compute, skipping": Case(precision="fp16-compute", initial_scale=2.0**20, optimizer="adamw", clip=0.5),
    "fp16-true": Case(precision="fp16-true", static_scale=1.0, clip=0.5, ema=True),
    "not finite, skipped": Case(poisoned=1, skip_nonfinite=True, clip=1.0, ema=True),
    "channels last": Case(channels_last=True, clip=0.5),
    "groups by name": Case(optimizer="adamw", clip=0.5, groups=GROUPS),
    "groups by name, lamb": Case(optimizer="lamb", ema=True, groups=GROUPS),
    "frozen in part": Case(freeze=("stem.*", "first.*", "sometimes.weight"), groups=GROUPS[:1], ema=True),
    "all but the head frozen": Case(freeze=("[!h]*",), precision="bf16-compute", clip=0.1),
    "without BatchNorm": Case(4, optimizer="adamw", model=toys.Plain),
}


def check_same(name: str, strategy: str, size: int, options: tuple[tuple[str, Any], ...]) -> None:
    assert_same_bits(CASES[name], (strategy, size, options))


def sizes(strategy: str, name: str) -> list[int]:
    """Return the sizes of a strategy that a case can have, another one first for each case."""
    possible = [size for size in STRATEGIES[strategy] if size <= CASES[name].microbatches]
    turn = [*CASES].index(name) % max(1, len(possible))
    return possible[turn:] + possible[:turn]


PAIRS = [
    (strategy, name, sizes(strategy, name)[0]) for strategy in STRATEGIES for name in CASES if sizes(strategy, name)
]
# Cut by fully_shard, in two dtypes, and not all used by each micro-batch: what releases of torch differ in.
QUICK = ("zero3", "fp16-compute, skipping")


@pytest.mark.worlds
@pytest.mark.parametrize(
    ("strategy", "name", "size"),
    [pytest.param(*pair, marks=() if pair[:2] == QUICK else pytest.mark.slow("several ranks")) for pair in PAIRS],
)
def test_the_bits_are_those_of_one_process(strategy: str, name: str, size: int) -> None:
    check_same(name, strategy, size, STRATEGIES[strategy][size])


def test_each_case_and_size_is_in_a_pair() -> None:
    assert {(strategy, size) for strategy, _, size in PAIRS} == {
        (strategy, size) for strategy, sizes in STRATEGIES.items() for size in sizes
    }
    assert {name for _, name, _ in PAIRS} == set(CASES)


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
@pytest.mark.parametrize(
    ("name", "placed"),
    pairs(["six micro-batches, clipped, averaged", "fp16, skipping", "lamb", "bf16-compute"], OFFLOADED),
)
def test_offloading_changes_no_bit(name: str, placed: tuple[str, int, Any]) -> None:
    check_same(name, *placed)


# Each model with another optimizer, precision and clipping; scripts/prove-bits goes through all of them together.
ZOO = {
    "resnet18": zoo.case("resnet18", clip=0.5),
    "vit_tiny": zoo.case("vit_tiny", optimizer="adamw", precision="bf16"),
    "efficientnet_b0": zoo.case("efficientnet_b0", optimizer="lamb", clip=1.0),
    # Of a sample alone no strides but its own say in which memory format it is.
    "convnext, one sample": zoo.case("convnext", optimizer="adamw", samples=(4, 4)),
    "convnext, one sample, channels last": zoo.case("convnext", samples=(4, 4), channels_last=True),
    "mlp": zoo.case("mlp", optimizer="adamw", precision="bf16", clip=0.1, ema=True),
    "mlp in bf16 itself": zoo.case("mlp", dtype=torch.bfloat16),
}
PLACED: list[Placed] = [("ddp", 3, ()), ("zero2", 3, ()), ("zero3", 2, ())]


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
@pytest.mark.parametrize(("model", "placed"), pairs([*ZOO], PLACED))
def test_real_models_keep_their_bits(model: str, placed: Placed) -> None:
    assert_same_bits(ZOO[model], placed)


WAYS: list[tuple[Placed, Placed]] = [
    (("zero3", 2, ()), ("zero1", 3, ())),
    (("single", 1, ()), ("zero2", 4, ())),
    (("hsdp", 4, (("replicate", 2),)), ("ddp", 2, ())),
    (("zero1", 4, ()), ("zero3", 3, ())),
    (("zero3", 3, (("offload", 1),)), ("zero1", 2, (("offload", 1),))),
]
INTERRUPTED = (
    "lamb",
    "fp16, skipping",
    "six micro-batches, clipped, averaged",
    "bf16-compute",
    "fp16-compute, skipping",
    "fp16-true",
)
# Each case goes on in two ways, and each way is gone by two cases or three; the other pairs do more of it.
FIRST = {(name, (number + more) % len(WAYS)) for number, name in enumerate(INTERRUPTED) for more in (0, 2)}
BEYOND = pytest.mark.slow("this case goes on in two of the other ways, and other cases in this one")


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(name, way, marks=() if (name, way) in FIRST else BEYOND)
        for name in INTERRUPTED
        for way in range(len(WAYS))
    ],
)
def test_going_on_under_another_strategy_gives_the_same_bits(name: str, way: int) -> None:
    first, second = WAYS[way]
    assert_resumed_bits(replace(CASES[name], samples=(12, 12, 7, 3, 12, 12)), first, second, at=3)
