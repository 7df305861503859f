"""ddp with gradients sent in 16 bits: alike on all ranks, near one process, and the same bits once resumed."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import toys
import worlds
from toys import Case

from lockstep.core.shard import get_local_tensor
from lockstep.core.tolerance import compute_comm_tolerance, compute_tolerance, compute_unit_roundoff

pytestmark = [pytest.mark.slow("several ranks"), pytest.mark.worlds]
CASES = {
    "accumulated, clipped, averaged": Case(6, clip=0.1, ema=True),
    "fp16, skipping": Case(precision="fp16", initial_scale=2.0**20),
    "fp16-true": Case(precision="fp16-true", static_scale=1.0),
    "without BatchNorm": Case(3, model=toys.Plain),
}
STEPS = 4


def _compressed(case: Case, compress: str) -> Case:
    return replace(case, strategy="ddp", options=(("compress", compress),))


@pytest.mark.parametrize("compress", ["fp16", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_all_ranks_agree_and_are_near_one_process(name: str, compress: str) -> None:
    case = CASES[name]
    [(alone, trace)] = worlds.run(1, toys.states, _compressed(case, compress), 0, None)
    assert trace == worlds.run(1, toys.whole_trace, case)[0]  # on one process nothing is sent
    (state, first), (_, second) = worlds.run(2, toys.states, _compressed(case, compress), 0, None)
    assert first == second
    differing = [name for name in alone.model if not torch.equal(*_pair(alone, state, name))]
    assert differing or (case.precision, compress) == ("fp16-true", "fp16")
    allowed = compute_comm_tolerance(compute_unit_roundoff(compress), 2, STEPS) + compute_tolerance(
        compute_unit_roundoff(case.precision), 12, 6, STEPS
    )
    largest = max(float(get_local_tensor(each).abs().max()) for each in alone.model.values())
    for name in differing:
        one, other = _pair(alone, state, name)
        assert float((one - other).abs().max()) <= allowed * largest, name


def _pair(one: Any, other: Any, name: str) -> tuple[Any, Any]:
    return get_local_tensor(one.model[name]).double(), get_local_tensor(other.model[name]).double()


def test_a_resumed_run_has_the_bits_of_an_undisturbed_one() -> None:
    whole = _compressed(replace(CASES["accumulated, clipped, averaged"], samples=(12, 12, 7, 3)), "bf16")
    half = replace(whole, samples=whole.samples[:2])
    _, undisturbed = worlds.run(3, toys.states, whole, 0, None)[0]
    state, trace = worlds.run(3, toys.states, half, 0, None)[0]
    for _, rest in worlds.run(3, toys.states, whole, 2, state):
        assert {**trace, **rest} == undisturbed
