"""Programs of the grammar are run on all kinds of placements, and what is wrong with Lockstep is found and shrunk."""

import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

from grammar import proving
from grammar.models import Model
from grammar.programs import Program
from grammar.trial import ONE, Extent, Outcome, Placement, Plan, Resume, try_program, try_source
from grammar.verdict import Verdict

from lockstep.parallel.data_parallel import DataParallelEngine
from lockstep.parallel.engine import Sums

# Starts of programs, in processes that take seconds to import what they need.
pytestmark = pytest.mark.slow("runs whole commands")

PROGRAMS = 40
PLAIN = Program(Model("linear encoder", "one block", ("linear",), "list"), "sgd", ())
DDP = Placement("ddp", 2)


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with proving.provers(2) as pool:
        yield pool


@pytest.fixture
def faulty_pool() -> Iterator[ProcessPoolExecutor]:
    """Return a process whose programs add up wrongly over several ranks."""
    with proving.provers(1) as pool:
        pool.submit(plant).result()
        yield pool


def _clips(program: Program) -> bool:
    return "clipping" in program.features and len(program.features) > 1


def plant() -> None:
    right = DataParallelEngine.end

    def end(self: DataParallelEngine) -> Sums:
        sums = right(self)
        if self._world.size == 1:
            return sums
        return sums._replace(total=sums.total + 1e-6)

    DataParallelEngine.end = end  # type: ignore[method-assign]


def test_forty_programs_keep_their_bits(pool: ProcessPoolExecutor) -> None:
    rows = list(proving.prove_all(pool, 2, "gate", range(PROGRAMS), extent=Extent.BRIEF, shrink_s=0))
    failed = [
        f"scripts/prove-loops --seed gate --only {row.number}: {row.result.kind}: {row.result.place}\n"
        f"    {'; '.join(row.program.productions)}\n    {row.result.detail}"
        for row in rows
        if row.result.outcome is Outcome.FAILED
    ]
    assert not failed, "\n".join(failed)
    assert len(rows) == PROGRAMS
    assert sum(row.result.outcome is Outcome.SAME for row in rows) > PROGRAMS // 3


def test_a_right_program_is_the_same_everywhere_and_after_a_resume(pool: ProcessPoolExecutor) -> None:
    plan = Plan((DDP,), (Resume(DDP, ONE, 2, "SIGTERM"),))
    assert pool.submit(try_program, PLAIN, plan).result().outcome is Outcome.SAME


def test_a_wrong_program_is_refused(pool: ProcessPoolExecutor) -> None:
    program = replace(PLAIN, features=("gradients clipped by torch",))
    result = pool.submit(try_program, program, Plan((DDP,))).result()
    assert result.outcome is Outcome.REFUSED
    assert "program.py:" in result.message


def test_a_state_of_the_script_may_differ_and_nothing_else_may(pool: ProcessPoolExecutor) -> None:
    program = replace(PLAIN, features=("rank in the loss",))
    assert pool.submit(try_program, program, Plan((DDP,))).result().outcome is Outcome.DOCUMENTED
    result = pool.submit(try_source, program.source, frozenset([Verdict.RIGHT]), Plan((DDP,))).result()
    assert (result.outcome, result.kind, result.place) == (Outcome.FAILED, "other numbers", "ddp on 2")


def test_a_program_that_hangs_fails(pool: ProcessPoolExecutor) -> None:
    source = PLAIN.source.replace(
        '    print("weights"', '    import time\n    time.sleep(run.size * 600 - 600)\n    print("weights"'
    )
    result = pool.submit(try_source, source, PLAIN.verdicts, Plan((DDP,)), timeout_s=10.0).result()
    assert (result.outcome, result.kind, result.place) == (Outcome.FAILED, "hang", "ddp on 2")


def test_a_program_that_plain_pytorch_cannot_run_is_told_apart(pool: ProcessPoolExecutor) -> None:
    source = PLAIN.source.replace("nn.Linear(16, 3)", "nn.Linear(15, 3)")
    assert pool.submit(try_source, source, PLAIN.verdicts, Plan((DDP,))).result().outcome is Outcome.INVALID


def test_a_wrong_sum_is_found_and_shrunk(faulty_pool: ProcessPoolExecutor) -> None:
    drawn = {number: proving.draw_program("fault", number) for number in range(200)}
    number = next(number for number, program in drawn.items() if program.right and _clips(program))
    row = faulty_pool.submit(proving.prove, "fault", number, shrink_s=30).result()
    assert row.result.outcome is Outcome.FAILED
    assert row.result.kind == "other numbers"
    assert row.smallest is not None
    assert len(row.smallest.productions) < len(row.program.productions)
