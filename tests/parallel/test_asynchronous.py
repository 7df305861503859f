"""Asynchronous training: exact where nobody is beside, and elsewhere what can be promised of it."""

from dataclasses import replace

import pytest
import torch
import toys
import worlds
from toys import Case

from lockstep.comm.world import World
from lockstep.core.shard import get_local_tensor
from lockstep.parallel.engine import State

pytestmark = [pytest.mark.slow("several ranks"), pytest.mark.worlds]
ASYNCHRONOUS = {"strategy": "parameter_server", "options": (("asynchronous", 1),)}
CASES = {
    "sgd": Case(),
    "adamw, clipped, averaged": Case(6, optimizer="adamw", clip=0.1, ema=True),
    "bf16-compute": Case(precision="bf16-compute", clip=0.5),
    "fp16, skipping": Case(precision="fp16", initial_scale=2.0**20, optimizer="adamw"),
    "lamb": Case(5, optimizer="lamb"),
}


@pytest.mark.parametrize("name", CASES)
def test_one_process_has_its_usual_bits(name: str) -> None:
    [alone] = worlds.run(1, toys.whole_trace, CASES[name])
    options = ASYNCHRONOUS["options"]
    [served] = worlds.run(1, toys.whole_trace, replace(CASES[name], alone="parameter_server", options=options))
    assert served == alone


def ends(world: World, case: Case, first: int, state: State | None) -> tuple[State, State]:
    """Train; return the state of each rank, and that after it was saved and loaded again."""
    engine, _ = toys.trained(world, case, first, state)
    end = toys.whole_state(world, engine)
    with engine.evaluation():
        pass
    engine.load(toys.as_from_disk(end))
    again = toys.whole_state(world, engine)
    engine.close()
    return toys.as_from_disk(end), toys.as_from_disk(again)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["adamw, clipped, averaged", "bf16-compute"])
def test_all_ranks_end_with_the_weights_of_rank_0(name: str, size: int) -> None:
    (first, again), *others = worlds.run(size, ends, replace(CASES[name], **ASYNCHRONOUS), 0, None)
    for state, _ in [(again, None), *others]:
        assert state.model.keys() == first.model.keys()
        assert all(
            torch.equal(get_local_tensor(state.model[key]), get_local_tensor(first.model[key])) for key in first.model
        )
    for key, tensor in first.optimizer.items():
        assert torch.equal(get_local_tensor(again.optimizer[key]), get_local_tensor(tensor))


def updates(world: World, case: Case) -> tuple[int, float]:
    """Return how many updates the optimizer counts, and how far the weights moved."""
    engine, _ = toys.trained(world, case)
    state = toys.whole_state(world, engine)
    steps = [int(get_local_tensor(each)) for name, each in state.optimizer.items() if name.endswith("/step")]
    initial = toys.build(case).state_dict()
    moved = sum(
        float((get_local_tensor(state.model[name]) - tensor).double().abs().sum()) for name, tensor in initial.items()
    )
    engine.close()
    return max(steps, default=0), moved


def test_every_rank_that_had_work_updates_the_weights_by_itself() -> None:
    case = replace(Case(optimizer="adamw", samples=(12, 12, 12, 2)), **ASYNCHRONOUS)
    (steps, moved), *_ = worlds.run(3, updates, case)
    assert steps == 3 * 3 + 2  # in the last step one rank of three has no sample
    assert moved > 0


def test_a_loss_that_is_not_finite_ends_the_rank() -> None:
    """Not as elsewhere with the next report, for which the ranks meet: by then it might be the others' too."""
    with pytest.raises(worlds.WorldError, match=r"loss is nan at step 2 \(epoch 1\), on rank"):
        worlds.run(2, updates, replace(Case(poisoned=1), **ASYNCHRONOUS))
