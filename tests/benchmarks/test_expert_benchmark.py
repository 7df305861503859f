"""What is measured of a mixture is one step, whoever has its experts, and every figure is there."""

import json

import pytest
import worlds

from benchmarks import expert
from benchmarks.expert import CUT, SHARED, WHOLE, Mixture
from benchmarks.report import as_json
from benchmarks.tensor_learners import ours
from lockstep.comm.world import World


def losses(world: World, strategy: str, chunks: int) -> list[float]:
    do = ours(strategy, Mixture(32, 1, 1, 16, chunks=chunks, microbatches=2), world)
    return [float(do()) for _ in range(2)]  # type: ignore[arg-type]


@pytest.mark.worlds
def test_all_sides_do_the_same_step() -> None:
    whole, cut, shared = (
        worlds.run(2, losses, strategy, chunks) for strategy, chunks in (("ddp", 1), ("ddp", 2), ("expert", 2))
    )
    assert whole[0][1] < whole[0][0]
    assert cut[0] == pytest.approx(whole[0], rel=1e-5)
    assert shared == cut


@pytest.mark.worlds
def test_all_figures_are_measured() -> None:
    figures = json.loads(json.dumps(as_json(list(expert.results(quick=True)), load_before=0.0, quick=True)))["results"]
    assert [each["name"] for each in figures] == ["expert-time-32", "expert-memory-32"]
    for each in figures:
        assert [row["name"] for row in each["rows"]] == [WHOLE, CUT, SHARED]
        assert all(row["median"] > 0 for row in each["rows"])
        assert len(each["verdicts"]) == 1
