"""PowerSGD: what two thin matrices can hold arrives, all else comes later, and a resumed run has the same bits."""

from dataclasses import replace

import pytest
import torch
import toys
import worlds
from torch import Tensor, nn
from toys import Case

from lockstep.comm.canonical import CanonicalSum
from lockstep.comm.world import World
from lockstep.core.mesh import DataRank, Mesh
from lockstep.core.shard import get_local_tensor
from lockstep.core.tree import LeafBlock
from lockstep.parallel.gradients import flatten_gradients, unflatten_gradients
from lockstep.parallel.powersgd import PowerSgd, count_elements_sent, is_compressible

SHAPES = {"conv": (8, 3, 2, 2), "bias": (8,), "linear": (9, 7)}
PARAMETERS = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES.values()]
ENDS = [len(parameter.reshape(-1)) for parameter in PARAMETERS]
CASES = {
    "accumulated, clipped, averaged": Case(6, (12, 12, 7, 3), clip=0.1, ema=True),
    "fp16, skipping": Case(precision="fp16", initial_scale=2.0**19),
    "fp16-true, channels last": Case(precision="fp16-true", static_scale=1.0, channels_last=True),
}


def alone(columns: int = 2) -> PowerSgd:
    return PowerSgd(_named(), CanonicalSum(0, [DataRank()], None), DataRank(), columns, 0)


def _named() -> list[tuple[str, nn.Parameter]]:
    return list(zip(SHAPES, PARAMETERS, strict=True))


def sent(power: PowerSgd, gradient: Tensor, rank: DataRank = DataRank()) -> Tensor:  # noqa: B008
    [block] = rank.get_own_blocks(rank.num_replicas) or [LeafBlock(0, 1)]
    parts = [part.view_as(each) for part, each in zip(torch.split(gradient, ENDS), PARAMETERS, strict=True)]
    flat = flatten_gradients(parts, PARAMETERS)
    found = unflatten_gradients(
        power.sum_bucket(PARAMETERS, {block: flat}, rank.num_replicas, torch.empty_like(flat)), PARAMETERS
    )
    return torch.cat([each.reshape(-1) for each in found])


def drawn(seed: int) -> Tensor:
    return torch.randn(sum(ENDS), generator=torch.Generator().manual_seed(seed))


def errors(power: PowerSgd) -> Tensor:
    """Return what all ranks that are here hold back, as a bucket."""
    kept = power.get_feedback()
    found = [
        get_local_tensor(kept[f"{name}/error"])[0] if f"{name}/error" in kept else torch.zeros(SHAPES[name])
        for name in SHAPES
    ]
    return torch.cat([each.reshape(-1) for each in found])


def test_two_matrices_are_sent_where_they_are_smaller() -> None:
    assert count_elements_sent((8, 3, 2, 2), 4) == 80
    assert count_elements_sent((8, 3, 2, 2), 5) == 96
    assert count_elements_sent((1000,), 1) == 1000
    assert is_compressible((8, 3, 2, 2), 4)
    assert not is_compressible((8, 3, 2, 2), 5)  # 100 elements in the place of 96
    assert not is_compressible((1000,), 1)
    assert not is_compressible((), 1)


def test_what_is_left_out_of_a_step_comes_with_the_next_ones() -> None:
    power, given, arrived = alone(), torch.zeros(sum(ENDS)), torch.zeros(sum(ENDS))
    for step in range(4):
        given += drawn(step)
        arrived += sent(power, drawn(step))
        power.finish_step(True, 1.0)
        assert not torch.allclose(arrived, given, atol=0.1)
        torch.testing.assert_close(arrived + errors(power), given, atol=1e-5, rtol=0)


def test_a_gradient_of_so_many_independent_columns_arrives_whole() -> None:
    power, chance = alone(2), torch.Generator().manual_seed(0)
    columns = [[torch.randn(shape, generator=chance) for shape in ((len(p), 2), (2, p[0].numel()))] for p in PARAMETERS]
    gradient = torch.cat([left.mm(right).reshape(-1) for left, right in columns])
    torch.testing.assert_close(sent(power, gradient), gradient, atol=1e-5, rtol=0)
    power.finish_step(True, 1.0)
    assert float(errors(power).abs().max()) < 1e-5


def test_a_step_that_moved_nothing_is_forgotten_and_errors_follow_the_loss_scale() -> None:
    power = alone()
    sent(power, drawn(0))
    power.finish_step(True, 1.0)
    before = errors(power)
    sent(power, torch.full_like(before, torch.inf))
    power.finish_step(False, 0.5)
    assert torch.equal(errors(power), before / 2)


def test_it_reaches_a_minimum_by_one_column() -> None:
    power, goal = alone(1), drawn(0)
    at = torch.zeros_like(goal)
    for _ in range(400):
        at -= 0.1 * sent(power, at - goal)
        power.finish_step(True, 1.0)
    assert float((at - goal).abs().max()) < 1e-3


def over_ranks(world: World) -> tuple[Tensor, Tensor]:
    """Return what three steps gave, and the sum of the errors."""
    mesh = Mesh(world.size)
    rank = mesh.get_data_rank(world.rank)
    power = PowerSgd(_named(), world.make_canonical_sum(mesh, "replicate", side_stream=False), rank, 2, 0)
    steps = []
    for step in range(3):
        own = sum(drawn(10 * step + part) for part in range(world.rank, 12, world.size))
        steps.append(sent(power, own, rank))
        power.finish_step(True, 1.0)
    return torch.stack(steps), world.add_(errors(power))


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
def test_ranks_do_what_one_does_with_all_of_their_gradients() -> None:
    [(expected, left)] = worlds.run(1, over_ranks)
    for size in (2, 3):
        found = worlds.run(size, over_ranks)
        assert all(torch.equal(found[0][0], steps) for steps, _ in found)
        torch.testing.assert_close(found[0][0], expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(found[0][1], left, atol=1e-4, rtol=0)


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_has_the_bits_of_an_undisturbed_one(name: str) -> None:
    case = replace(CASES[name], strategy="ddp", options=(("compress", "powersgd"), ("powersgd_rank", 1)))
    plain = worlds.run(3, toys.states, replace(case, options=()), 0, None)[0][1]
    half = replace(case, samples=case.samples[:2])
    state, trace = worlds.run(3, toys.states, half, 0, None)[0]
    assert state.feedback
    (whole, undisturbed), *others = worlds.run(3, toys.states, case, 0, None)
    assert undisturbed != plain
    for _, rest in [*worlds.run(3, toys.states, case, 2, state), *others]:
        assert {**trace, **rest} == undisturbed
    # On other ranks the errors of all are on the first, and nothing is lost.
    fewer, _ = worlds.run(2, toys.states, case, len(case.samples), whole)[0]
    kept = whole.feedback or {}
    assert fewer.feedback.keys() == kept.keys()
    for slot, held in fewer.feedback.items():
        own, before = get_local_tensor(held), get_local_tensor(kept[slot])
        assert torch.isfinite(before).all()
        assert torch.equal(own, before) if slot.endswith("factor") else torch.equal(own[0], before.sum(0))
