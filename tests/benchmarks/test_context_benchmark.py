"""What is measured of long sequences is one step, whatever it is cut into, and every figure is there."""

import json

import pytest
import worlds

from benchmarks import context
from benchmarks.context import Side, Work, stepping
from benchmarks.report import as_json
from lockstep.comm.world import World


def losses(world: World, chunks: int) -> list[float]:
    do = stepping(Side(world.size, "context", Work(32, 1, 16, chunks)), world)
    return [float(do()) for _ in range(2)]  # type: ignore[arg-type]


@pytest.mark.worlds
def test_all_sides_do_the_same_step() -> None:
    [whole], [cut] = (worlds.run(1, losses, chunks) for chunks in (1, 2))
    assert cut == pytest.approx(whole, rel=1e-5)
    assert worlds.run(2, losses, 2) == [cut, cut]
    assert whole[1] < whole[0]


@pytest.mark.worlds
def test_all_figures_are_measured() -> None:
    figures = json.loads(json.dumps(as_json(list(context.results(quick=True)), load_before=0.0, quick=True)))["results"]
    assert [each["name"] for each in figures] == ["context-time-64", "context-memory-64"]
    for each in figures:
        names = [row["name"] for row in each["rows"]]
        assert names[:3] == [context.WHOLE, "2 chunks, 1 process", "2 chunks, context on 2"]
        assert [name for name in names if "2 x 2" in name] == names[3:]
        assert len(names) == 6
        assert all(row["median"] > 0 for row in each["rows"])
        assert len(each["verdicts"]) == 2
