"""Every strategy that cuts the model gives the bits of one process: losses, norms, weights, state, average."""

from dataclasses import replace

import pytest
import toys
import worlds
from toys import Case, Trace

from lockstep.parallel.engine import State
from lockstep.runtime.world import World

STRATEGIES: dict[str, dict[int, tuple[tuple[str, int], ...]]] = {
    "zero1": {2: (), 3: (), 4: ()},
    "zero2": {2: (), 3: (), 4: ()},
    "zero3": {2: (), 3: (), 4: ()},
    "hsdp": {4: (("replicate", 2),), 6: (("replicate", 2),), 8: (("replicate", 4),)},
}

CASES = {
    "sgd": Case(),
    "three micro-batches": Case(3),
    "six micro-batches, clipped, averaged": Case(6, clip=0.1, ema=True),
    "adamw, clipped": Case(8, optimizer="adamw", clip=0.1),
    "lamb": Case(5, optimizer="lamb", clip=1.0, ema=True),
    "lars": Case(optimizer="lars"),
    "bf16": Case(precision="bf16", clip=0.5),
    "fp16, skipping": Case(precision="fp16", initial_scale=2.0**20, optimizer="adamw"),
    "not finite, skipped": Case(poisoned=1, skip_nonfinite=True, clip=1.0, ema=True),
    "channels last": Case(channels_last=True, clip=0.5),
    "without BatchNorm": Case(4, optimizer="adamw", model=toys.Plain),
}


def placed(case: Case, strategy: str, size: int) -> Case:
    if size not in STRATEGIES[strategy] or size > case.microbatches:
        pytest.skip("the strategy does not take so many processes")
    return replace(case, strategy=strategy, options=STRATEGIES[strategy][size])


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


def states(world: World, case: Case, first: int, state: State | None) -> tuple[State, Trace]:
    engine, trace = toys.trained(world, case, first, state)
    whole = toys.whole_state(world, engine)
    engine.close()
    return toys.as_from_disk(whole), {**trace, **toys.fingerprint(whole)}
