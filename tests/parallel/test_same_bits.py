"""Every strategy that cuts the model gives the bits of one process: losses, norms, weights, state, average."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import toys
import worlds
import zoo
from toys import Case

from lockstep.parallel.groups import ParameterGroup

STRATEGIES: dict[str, dict[int, tuple[tuple[str, int], ...]]] = {
    "zero1": {2: (), 3: (), 4: ()},
    "zero2": {2: (), 3: (), 4: ()},
    "zero3": {2: (), 3: (), 4: ()},
    "hsdp": {4: (("replicate", 2),), 6: (("replicate", 3),)},
    "parameter_server": {3: ()},
}

OFFLOADED = [("zero1", 3, (("offload", 1),)), ("zero2", 2, (("offload", 1),)), ("zero3", 3, (("offload", 1),))]

GROUPS = (ParameterGroup(("head.*",), 2.0, {"weight_decay": 0.0}), ParameterGroup(("*.bias", "sometimes.*"), 0.25))

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


@pytest.mark.worlds
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_bits_are_those_of_one_process(strategy: str, name: str) -> None:
    case = CASES[name]
    [alone] = worlds.run(1, toys.whole_trace, case)
    for size, options in STRATEGIES[strategy].items():
        if size > case.microbatches:
            continue
        cut = replace(case, strategy=strategy, options=options)
        for rank, trace in enumerate(worlds.run(size, toys.whole_trace, cut)):
            differing = [key for key in alone if trace.get(key) != alone[key]]
            assert not differing, f"rank {rank} of {size}"
            assert trace.keys() == alone.keys()


@pytest.mark.worlds
@pytest.mark.parametrize("placed", OFFLOADED)
@pytest.mark.parametrize("name", ["six micro-batches, clipped, averaged", "fp16, skipping", "lamb", "bf16-compute"])
def test_offloading_changes_no_bit(name: str, placed: tuple[str, int, Any]) -> None:
    strategy, size, options = placed
    [alone] = worlds.run(1, toys.whole_trace, CASES[name])
    for trace in worlds.run(size, toys.whole_trace, replace(CASES[name], strategy=strategy, options=options)):
        assert trace == alone


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
PLACED = [("ddp", 3, ()), ("zero2", 3, ()), ("zero3", 2, ())]


@pytest.mark.worlds
@pytest.mark.parametrize("model", ZOO)
def test_real_models_keep_their_bits(model: str) -> None:
    [alone] = worlds.run(1, toys.whole_trace, ZOO[model])
    for strategy, size, options in PLACED:
        placed = replace(ZOO[model], strategy=strategy, options=options)
        for trace in worlds.run(size, toys.whole_trace, placed, timeout=60.0):
            assert [key for key in alone if trace[key] != alone[key]] == [], (strategy, size)


@pytest.mark.worlds
@pytest.mark.parametrize(
    "ways",
    [
        [("zero3", 2, ()), ("zero1", 3, ())],
        [("single", 1, ()), ("zero2", 4, ())],
        [("hsdp", 4, (("replicate", 2),)), ("ddp", 2, ())],
        [("zero1", 4, ()), ("zero3", 3, ())],
        [("zero3", 3, (("offload", 1),)), ("zero1", 2, (("offload", 1),))],
    ],
)
@pytest.mark.parametrize(
    "name",
    [
        "lamb",
        "fp16, skipping",
        "six micro-batches, clipped, averaged",
        "bf16-compute",
        "fp16-compute, skipping",
        "fp16-true",
    ],
)
def test_going_on_under_another_strategy_gives_the_same_bits(name: str, ways: list[Any]) -> None:
    whole = replace(CASES[name], samples=(12, 12, 7, 3, 12, 12))
    half = replace(whole, samples=whole.samples[:3])
    [(_, uninterrupted)] = worlds.run(1, toys.states, whole, 0, None)
    (first, size, options), (second, other_size, other_options) = ways
    state, trace = worlds.run(size, toys.states, replace(half, strategy=first, options=options), 0, None)[0]
    going_on = replace(whole, strategy=second, options=other_options)
    for _, rest in worlds.run(other_size, toys.states, going_on, 3, state):
        assert {**trace, **rest} == uninterrupted
