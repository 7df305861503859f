"""The table and the JSON of a verification."""

import io
import json
import math
from dataclasses import replace

import pytest
from rich.console import Console

from lockstep.reporting.verification import (
    CodeFinding,
    Mismatch,
    VerdictRow,
    Verification,
    describe_location,
    explain_row,
    format_failures,
    print_verification,
    to_json,
)

DEPARTURE = Mismatch(2, "gradient of", "conv.weight", None, (1,), (3, 0), "0.5", "0.25", "an order of its own")
SAME = VerdictRow("ddp", 2, "identical", seconds=0.125, peak_bytes=(1 << 29, 3 << 28), resumed_on="single on 1")
OTHER = VerdictRow("zero1", 3, "differs", largest=0.125, seconds=1.0, departure=DEPARTURE, differing=5)
NEAR = VerdictRow("tensor", 2, "within tolerance", exactness="close", largest=1e-7, tolerance=2e-5, seconds=1.0)
GONE = VerdictRow("single", 2, "not possible", reason="use 1")
FAULT = CodeFinding("state in plain attributes", True, "the model keeps state")
NOTE = CodeFinding("unused parameters", False, "nobody uses a.weight")


def verification(*rows: VerdictRow, findings: tuple[CodeFinding, ...] = ()) -> Verification:
    return Verification("digits", (1, 2, 23), 4, 690, 72, 360, rows, findings)


def drawn(found: Verification) -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    print_verification(found, console)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_a_row_for_each_placement_that_is_possible():
    lines = drawn(verification(SAME, NEAR, GONE))
    assert lines == [
        "digits: steps 1, 2, 23 of 690, 4 micro-batches, 72 of 360 validation samples; reference: single on 1 process",
        "strategy  processes  result                     resumed on   seconds  peak MiB",
        "ddp               2  identical                  single on 1     0.12  512 768",
        "tensor            2  within 1.0e-07 of 2.0e-05                  1.00",
        "single on 2: not possible: use 1",
        "all agree: loss, gradients, weights, optimizer state, buffers, evaluation and the resumed run of 2 placements",
    ]


def test_nothing_is_cut_short_in_a_narrow_terminal() -> None:
    row = replace(SAME, strategy="parameter_server", resumed_on="parameter_server on 4", peak_bytes=(1 << 30,) * 8)
    lines = drawn(verification(row))
    assert "…" not in "".join(lines)
    assert "".join(lines).count("1024") == 8


def test_a_departure_is_told_with_place_values_and_cause():
    lines = drawn(verification(SAME, OTHER))
    assert lines[-5:] == [
        "zero1 on 3 processes: the first difference: step 2, gradient of conv.weight[3, 0], rank 1",
        "  reference 0.5, here 0.25",
        "  5 metrics and tensors differ in total",
        "  likely cause: an order of its own",
        "not the same: 1 of 2 placements agree",
    ]


def test_a_cause_that_is_a_finding_is_not_told_twice():
    departure = Mismatch(1, "loss", "", 2, (), None, "1.0", "2.0", FAULT.text)
    lines = drawn(verification(VerdictRow("ddp", 2, "differs", departure=departure), findings=(FAULT, NOTE)))
    assert lines.count("fault: the model keeps state") == 1
    assert "note: nobody uses a.weight" in lines
    assert "  likely cause: state in plain attributes, see above" in lines
    assert lines[-1] == "not the same: 0 of 1 placements agree; 1 fault in the recipe's own code"


def test_a_failure_is_told_in_full():
    lines = drawn(verification(VerdictRow("ddp", 2, "failed", reason="[rank 1 of 2] Traceback\nValueError: no")))
    assert lines[-3:-1] == ["ddp on 2 processes: failed: [rank 1 of 2] Traceback", "ValueError: no"]


@pytest.mark.parametrize(
    ("rows", "findings", "agree"),
    [
        ((SAME, NEAR, GONE), (NOTE,), True),
        ((SAME, OTHER), (), False),
        ((SAME,), (FAULT,), False),
        ((SAME, VerdictRow("ddp", 3, "failed")), (), False),
    ],
)
def test_all_must_agree_and_no_fault_be_found(rows, findings, agree):
    found = verification(*rows, findings=findings)
    assert found.agree is agree
    assert json.loads(to_json(found))["agree"] is agree


def test_json_holds_all_of_it_and_is_json():
    content = json.loads(
        to_json(verification(SAME, VerdictRow("ddp", 3, "differs", largest=math.inf, departure=DEPARTURE)))
    )
    assert content["rows"][0]["peak_bytes"] == [1 << 29, 3 << 28]
    assert content["rows"][1]["largest"] == "inf"
    assert content["rows"][1]["departure"]["index"] == [3, 0]
    assert content["steps"] == [1, 2, 23]


def test_places_in_words():
    assert describe_location(Mismatch(None, "evaluated sum", "correct1", None, (), None, "", "", "")) == (
        "after the last step, evaluated sum correct1"
    )
    assert describe_location(Mismatch(4, "loss of a micro-batch", "", 0, (0, 2), None, "", "", "")) == (
        "step 4, loss of a micro-batch, micro-batch 0, ranks 0, 2"
    )


@pytest.mark.parametrize(
    ("rows", "faults", "last"),
    [
        ((SAME, NEAR), 1, "the placements agree, but 1 fault was found in the recipe's own code"),
        ((SAME,), 2, "the placements agree, but 2 faults were found in the recipe's own code"),
        ((GONE,), 1, "nothing was compared: 1 fault was found in the recipe's own code"),
        ((SAME, OTHER), 1, "not the same: 1 of 2 placements agree; 1 fault in the recipe's own code"),
    ],
)
def test_faults_where_placements_agree_are_no_disagreement(rows, faults, last):
    assert drawn(verification(*rows, findings=(FAULT,) * faults))[-1] == last


def test_what_speaks_against_the_placements_has_cause_and_line():
    assert format_failures(verification(SAME, OTHER, findings=(FAULT, NOTE))).splitlines() == [
        f"fault: {FAULT.text}",
        *explain_row(OTHER, (FAULT,)),
        "not the same: 1 of 2 placements agree; 1 fault in the recipe's own code",
    ]
