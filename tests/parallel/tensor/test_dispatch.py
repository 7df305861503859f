"""Experts that are dealt out to ranks have the bits of one process, whichever rank a row comes from."""

import re
from dataclasses import replace
from functools import partial
from typing import Any

import cut_models
import pytest
import toys
import worlds
from same_bits import assert_resumed_bits, assert_same_bits
from test_slices import CASES, NET, sizes_of
from toys import Case

from lockstep.core.mesh import Mesh
from lockstep.errors import UsageError
from lockstep.strategies.expert import Strategy

# On two ranks of three micro-batches one has a dummy; steps of three samples leave one of four ranks without work.
PLACED = {
    "sgd": 4,
    "three micro-batches": 2,
    "clipped, averaged": 4,
    "lamb": 2,
    "lars, in two chunks": 2,
    "bf16": 2,
    "bf16-compute": 4,
    "fp16, skipping": 4,
    "recomputed": 2,
    "frozen in part": 2,
    "several losses": 2,
}


@pytest.mark.worlds
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "sgd" else pytest.mark.slow("several ranks")) for name in PLACED]
)
def test_the_bits_are_those_of_one_process(name: str) -> None:
    assert_same_bits(CASES[name], ("expert", PLACED[name], ()))


class Twice(cut_models.Net):
    """Calls the same experts twice: their gradients of a micro-batch are added."""

    def __init__(self) -> None:
        super().__init__()
        self.tail = self.mixture


class Frozen(cut_models.Net):
    """Nothing before the experts is trained, and of the experts one parameter alone."""

    def __init__(self) -> None:
        super().__init__()
        trained = {self.head.weight, self.mixture.experts.up}
        for each in self.parameters():
            each.requires_grad_(each in trained)


# Of five micro-batches two replicas of two ranks have three and two; of three samples the second has one, or none.
@pytest.mark.slow("several ranks")
@pytest.mark.worlds
@pytest.mark.parametrize("name", ["sgd", "five micro-batches", "clipped, averaged", "fp16, skipping"])
def test_replicas_of_the_experts_keep_the_bits(name: str) -> None:
    case = replace(CASES["sgd"], microbatches=5) if name == "five micro-batches" else CASES[name]
    strategy, option = ("mesh", "expert") if name == "sgd" else ("expert", "replicate")
    assert_same_bits(case, (strategy, 4, ((option, 2),)))


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
@pytest.mark.parametrize("model", [Twice, Frozen])
def test_models_that_call_their_experts_otherwise(model: Any) -> None:
    plan = tuple(each for each in cut_models.PLAN if not each[0].startswith("tail"))
    case = replace(NET, model=model, plan=plan if model is Twice else cut_models.PLAN, microbatches=2)
    for strategy in ("expert", "tensor"):
        assert_same_bits(case, (strategy, 2, ()))


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
@pytest.mark.parametrize(
    "ways", [(("expert", 4, ()), ("zero3", 3, ())), (("tensor", 2, ()), ("expert", 4, (("replicate", 2),)))]
)
def test_going_on_elsewhere_gives_the_same_bits(ways: Any) -> None:
    assert_resumed_bits(replace(CASES["lamb"], samples=(12, 12, 7, 3, 12, 12)), *ways, at=3)


@pytest.mark.parametrize(
    ("case", "processes", "problem"),
    [
        (replace(NET, chunks=1), 2, "strategy expert: recipe.model.chunks is 1, so there is nothing to share; set it"),
        (replace(NET, plan=cut_models.PLAN[:4]), 2, "strategy expert: found no known experts in the model; list them"),
        (NET, 3, "strategy expert: 3 processes cannot share the 4 chunks of mixture.experts; use 1, 2, 4"),
    ],
)
def test_what_has_no_groups_for_all_is_refused(case: Case, processes: int, problem: str) -> None:
    with pytest.raises(UsageError, match=re.escape(problem)):
        Strategy().check_model(partial(toys.build, case), None, processes)


def test_processes_are_shared_out_by_replicas() -> None:
    assert Strategy(replicate=2).mesh(8) == Mesh(replicate=2, expert=4)
    Strategy(replicate=2).check_model(partial(toys.build, NET), None, 8)
    with pytest.raises(UsageError, match="strategy expert: replicate=3 does not divide 4 processes; use 1, 2, 4"):
        Strategy(replicate=3).check(4, 4)


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
def test_a_rank_holds_its_experts_alone() -> None:
    for sizes in worlds.run(2, sizes_of, replace(NET, strategy="expert")):
        assert sizes["mixture.experts.up"] == (4 * 5 * 11, 8 * 5 * 11)
        assert sizes["mixture.experts.up_bias"] == (20, 40)
        assert all(own == whole for name, (own, whole) in sizes.items() if "experts" not in name)
