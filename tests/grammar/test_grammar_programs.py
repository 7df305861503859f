"""The grammar of scripts/prove-loops writes complete programs, and reaches all its productions from any seed."""

import ast
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

from grammar import proving
from grammar.blocks import BLOCKS
from grammar.features import FEATURES, OPTIMIZERS
from grammar.models import TOPOLOGIES, Model
from grammar.programs import Program, all_productions, productions_of, verdicts_of
from grammar.report import as_json, as_table
from grammar.trial import ONE, Outcome, Placement, Plan, Result, Resume, draw_plan
from grammar.verdict import Verdict

PLAIN = Program(Model("linear encoder", "one block", ("linear",), "list"), "sgd", ())
FEW = range(25)


def one_block(name: str) -> Program:
    return Program(Model("linear encoder", "one block", (name,), "list"), "sgd", ())


def test_a_seed_repeats_its_programs() -> None:
    first, again, other = ([proving.draw_program(base, number) for number in FEW] for base in ("a", "a", "b"))
    assert first == again
    assert first != other
    assert len({program.source for program in first}) > len(FEW) // 2


def test_a_seed_repeats_its_placements() -> None:
    assert draw_plan(PLAIN, "a 1") == draw_plan(PLAIN, "a 1")
    plans = [draw_plan(PLAIN, f"a {number}") for number in FEW]
    assert len({placement for plan in plans for placement in plan.placements}) == 9
    assert all(resume.first != resume.second for plan in plans for resume in plan.resumes)


@pytest.mark.slow("draws 4,000 programs")
def test_all_productions_are_reached() -> None:
    reached = {name for number in range(4000) for name in proving.draw_program("reach", number).productions}
    assert set(all_productions()) - reached == set()


def test_names_of_productions_are_unique() -> None:
    names = all_productions()
    assert len(names) == len(set(names))
    assert not [name for name in names if "; " in name]


@pytest.mark.parametrize("name", [*BLOCKS])
def test_each_block_is_in_a_program_that_compiles(name: str) -> None:
    ast.parse(one_block(name).source)


@pytest.mark.parametrize("name", [*TOPOLOGIES])
def test_each_topology_is_in_a_program_that_compiles(name: str) -> None:
    blocks = ("linear",) * TOPOLOGIES[name].blocks
    for container in ("list", "attributes", "dict", "sequential"):
        source = Program(Model("linear encoder", name, blocks, container), "sgd", ()).source
        ast.parse(source)
        assert "{0}" not in source
        assert "{count}" not in source


@pytest.mark.parametrize("name", [*FEATURES])
def test_each_feature_is_in_a_program_that_compiles(name: str) -> None:
    for topology in ("one block", "auxiliary head"):
        model = Model("linear encoder", topology, ("mlp", "linear")[: TOPOLOGIES[topology].blocks], "list")
        source = Program(model, "sgd", (name,)).source
        ast.parse(source)
        assert "logits(" not in source


@pytest.mark.parametrize("name", [*OPTIMIZERS])
def test_each_optimizer_is_in_a_program_that_compiles(name: str) -> None:
    ast.parse(Program(PLAIN.model, name, ()).source)


def test_a_program_says_what_it_was_written_from() -> None:
    program = proving.draw_program("a", 3)
    assert productions_of(program.source) == [*program.productions]
    assert verdicts_of(productions_of(program.source)) == program.verdicts


def test_a_program_is_right_if_all_its_parts_are() -> None:
    assert PLAIN.right
    assert not one_block("scalar parameter").right
    assert one_block("counter in a buffer").verdicts == {Verdict.RIGHT, Verdict.WRONG}


def test_features_that_exclude_each_other_are_not_in_one_program() -> None:
    for number in range(200):
        program = proving.draw_program("slots", number)
        slots = [FEATURES[name].slot for name in program.features]
        assert len(slots) == len(set(slots)), program.productions


def test_a_loss_is_named_by_the_way_it_is_reduced() -> None:
    assert "loss = F.cross_entropy(out, y)\n            step.backward(mean=loss)" in PLAIN.source
    total = Program(PLAIN.model, "sgd", (), reduction="sum").source
    assert 'loss = F.cross_entropy(out, y, reduction="sum")\n            step.backward(sum=loss)' in total
    named = Program(PLAIN.model, "sgd", ("losses by name",), reduction="sum").source
    assert 'step.backward(sum={"every": loss, "few": few})' in named


def failing_number(name: str) -> int:
    """Return the number of the first program that uses a production beside others."""
    return next(
        number
        for number in range(10_000)
        if name in (program := proving.draw_program("shrink", number)).productions and len(program.features) > 1
    )


def test_a_failure_shrinks_to_the_smallest_program() -> None:
    tried: list[Plan] = []
    failure = Result(Outcome.FAILED, "other numbers", place="zero2 on 2")

    def attempt(program: Program, plan: Plan) -> Result:
        tried.append(plan)
        return failure if "clipping" in program.features else Result(Outcome.SAME)

    zero2 = Placement("zero2", 2)
    plan = Plan((Placement("ddp", 2), zero2), (Resume(ONE, zero2, 1, "SIGTERM"),))
    number = failing_number("clipping")
    smallest, result = proving.shrink(proving.draw_program("shrink", number), failure, plan, attempt, seconds=60)
    assert smallest == Program(PLAIN.model, "sgd", ("clipping",))
    assert result == failure
    assert set(tried) == {Plan((zero2,))}  # no more than where it failed


def test_a_failure_of_another_kind_is_no_smaller_one() -> None:
    failure = Result(Outcome.FAILED, "other numbers", place="zero2 on 2")

    def attempt(program: Program, _: Plan) -> Result:
        return failure if len(program.features) > 1 else Result(Outcome.FAILED, "hang", place="zero2 on 2")

    number = failing_number("clipping")
    smallest, _ = proving.shrink(
        proving.draw_program("shrink", number), failure, Plan((Placement("zero2", 2),)), attempt, seconds=60
    )
    assert len(smallest.features) == 2


def test_without_time_a_failure_keeps_its_program() -> None:
    failure = Result(Outcome.FAILED, "other numbers", place="zero2 on 2")
    number = failing_number("clipping")

    def attempt(_: Program, __: Plan) -> Result:
        raise AssertionError("there is no time")

    smallest, _ = proving.shrink(
        proving.draw_program("shrink", number), failure, Plan((Placement("zero2", 2),)), attempt, seconds=0
    )
    assert smallest == proving.draw_program("shrink", number)


def test_messages_are_counted_without_what_differs_between_programs() -> None:
    first = proving.message_class("step 3: blocks.0.layer.weight was frozen (program.py:83); do it before run.place")
    second = proving.message_class("step 1: head.bias was frozen (program.py:7); do it before run.place")
    assert first == second


def test_right_programs_that_are_refused_are_counted() -> None:
    rows = [
        proving.Row(0, PLAIN, Result(Outcome.SAME)),
        proving.Row(1, PLAIN, Result(Outcome.REFUSED, message="step 1: no (program.py:3); do it")),
        proving.Row(2, one_block("counter in a buffer"), Result(Outcome.REFUSED, message="no")),
        proving.Row(3, PLAIN, Result(Outcome.FAILED, "hang", place="zero2 on 2")),
        proving.Row(4, PLAIN, Result(Outcome.INVALID)),
    ]
    summary = proving.Summary(rows)
    assert len(summary.right) == 3
    assert [row.number for row in summary.right_and_refused] == [1]
    found = as_json(summary)
    assert found["outcomes"]["refused"] == 2
    assert found["failures"][0]["kind"] == "hang"
    assert "| linear | 4 | 1 | 1 | 0 | 0 | 1 |" in as_table(summary)
