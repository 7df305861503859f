"""The table of a plan: what fits comes first, by what a step takes, and what is not known is not claimed."""

from dataclasses import replace

from rich.console import Console

from lockstep.planning.costs import Costs
from lockstep.planning.measure import Measurements
from lockstep.planning.survey import Machine, PlacementEstimate
from lockstep.planning.table import find_best, format_unmeasured_placements, make_table, sort_rows, to_json

MIB = 2**20
DDP = PlacementEstimate(
    "ddp", 2, "words of ddp", Measurements(300 * MIB, 500 * MIB, 1.0, 100 * MIB, 4), pretended=True, seconds=2.0
)
ZERO3 = PlacementEstimate(
    "zero3", 2, "words of zero3", Measurements(150 * MIB, 260 * MIB, 1.2, 300 * MIB, 40), pretended=True, seconds=2.4
)
PIPELINE = PlacementEstimate("pipeline", 2, "words of pipeline", Measurements(150 * MIB, 300 * MIB, 3.0), seconds=3.0)
NONE = [PlacementEstimate("tensor", count, reason="no chunks\nfile:1") for count in (2, 4)]


def test_what_fits_comes_first_and_is_the_best() -> None:
    rows = [*NONE, PIPELINE, ZERO3, DDP]
    room = Machine(memory=400 * MIB)
    assert [row.strategy for row in sort_rows(rows, room)] == ["zero3", "pipeline", "ddp", "tensor", "tensor"]
    assert find_best(sort_rows(rows, room), room) is ZERO3
    assert find_best(sort_rows(rows, Machine()), Machine()) is DDP
    assert find_best(sort_rows(rows, Machine(memory=MIB)), Machine(memory=MIB)) is None


def test_cells_say_by_how_much_it_does_not_fit() -> None:
    console = Console(width=200)
    with console.capture() as shown:
        console.print(make_table([DDP, PIPELINE, *NONE], Machine(memory=400 * MIB)))
    lines = [" ".join(line.split()) for line in shown.get().splitlines()]
    assert lines[1] == "ddp 2 500 MiB 300 MiB 100 MiB, 4 2 s no, by 100 MiB"
    assert lines[2] == "pipeline 2 300 MiB 150 MiB 3 s yes"
    assert len(lines) == 3
    assert format_unmeasured_placements([DDP, *NONE]) == ["not measured: tensor on 2, 4: no chunks"]
    priced = replace(DDP, costs=Costs(epoch=3.2075, run=24690.0, save_every=99, kept=0.98765))
    with console.capture() as shown:
        console.print(make_table([priced], Machine()))
    assert [" ".join(line.split()) for line in shown.get().splitlines()] == [
        "strategy processes peak memory between steps sends a step fits an epoch the run save every, steps kept",
        "ddp 2 500 MiB 300 MiB 100 MiB, 4 2 s 3.21 24,690 99 98.77 %",
    ]
    assert '"fits": false' in to_json([DDP], Machine(memory=400 * MIB))
