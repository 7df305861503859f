"""A rank that is late is named whatever the run does then: whether it sets up, evaluates or saves, also for eval."""

from pathlib import Path

import pytest
from conftest import DIGITS
from forked import Command

pytestmark = pytest.mark.slow("runs whole commands")

LATE = ('recipe.model={name: "dawdling:model"}', 'recipe.loss={name: "dawdling:loss"}')
SOON = ("placement.processes=2", "placement.stall_timeout_s=0.4")


def reported(command: Command, phase: str, rank: int, words: str) -> None:
    """Wait for the report that a rank is late in a phase and that the other one waits, and let it go on."""
    late, waits = f"  rank {rank} (", f"  rank {1 - rank} waits: "
    command.until(lambda: f" is late: {words}, " in command.err and waits in command.err)
    assert all(line.startswith(late) for line in command.err.splitlines() if f" is late: {words}, " in line)
    Path(phase).touch()


def test_the_phase_is_told_in_which_a_rank_is_late(start):
    command = start("train", *DIGITS, *LATE, *SOON, "run.dir=run")
    reported(command, "setting up", 1, "setting up")
    reported(command, "evaluating", 1, "evaluating after step 23")
    reported(command, "saving", 0, "saving after step 23")
    assert command.wait() == 0
    assert "  ranks wait for a save without a timeout; with placement.on_stall=end, set a longer " in command.err
    assert (Path("run") / "logs" / "exchanges-rank-1.json").exists()


def test_an_evaluation_is_watched(start, run):
    for phase in ("setting up", "evaluating", "saving"):
        Path(phase).touch()
    run("train", *DIGITS, *LATE, "placement.processes=1", "run.dir=run", "recipe.microbatches=2")
    Path("evaluating").unlink()
    command = start("eval", "--trust", "run", *SOON)
    reported(command, "evaluating", 1, "evaluating after step 23")
    assert command.wait() == 0
    assert [each.name for each in (Path("run") / "logs").iterdir()] == ["rank-0.log"]
