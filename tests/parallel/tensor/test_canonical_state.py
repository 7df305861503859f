"""Who asks an engine of a model in chunks sees a model that nobody cut."""

from dataclasses import replace

import cut_models
import pytest
import torch
import toys
import worlds
from toys import Case

from lockstep.comm.world import World
from lockstep.parallel.layouts.base import gather_full_tensors

pytestmark = [pytest.mark.slow("several ranks"), pytest.mark.worlds]
CASE = Case(model=cut_models.Net, chunks=4, plan=cut_models.PLAN, optimizer="adamw", ema=True, samples=(6,))


def _shapes(world: World, case: Case) -> dict[str, tuple[int, ...]]:
    state = toys.whole_state(world, toys.trained(world, case)[0])
    kinds = {"": state.model, "ema ": state.ema or {}, "optimizer ": state.optimizer}
    return {f"{kind}{name}": tuple(each.shape) for kind, tensors in kinds.items() for name, each in tensors.items()}


def test_the_state_has_the_names_and_shapes_of_the_uncut_model() -> None:
    uncut = Case(model=cut_models.Net, optimizer="adamw", ema=True, samples=(6,))
    [expected] = worlds.run(1, _shapes, uncut)
    for size in (1, 2):
        for found in worlds.run(size, _shapes, replace(CASE, strategy="tensor")):
            assert found == expected


def _gradients(world: World, case: Case) -> dict[str, torch.Tensor]:
    engine = toys.engine(world, case)
    step, _, _ = next(toys.steps(case))
    engine.forward_backward(toys.share(world, case, step), step)
    return gather_full_tensors(world, engine.gradients())


def test_gradients_are_those_of_the_uncut_model() -> None:
    cases = [
        Case(model=cut_models.Still, samples=(6,)),
        Case(model=cut_models.Still, samples=(6,), chunks=4, plan=cut_models.PLAN),
        Case(model=cut_models.Still, samples=(6,), chunks=4, plan=cut_models.PLAN, strategy="tensor"),
    ]
    [expected], [alone], [shared, _] = (
        worlds.run(size, _gradients, case) for size, case in zip((1, 1, 2), cases, strict=True)
    )
    assert expected.keys() == alone.keys() == shared.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(alone[name], gradient)
        assert torch.equal(shared[name], alone[name])
