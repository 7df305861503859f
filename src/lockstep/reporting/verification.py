"""The results of a verification, as a table and as JSON."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.common.text import format_count

Verdict = Literal["identical", "within tolerance", "differs", "failed", "not possible"]

_GOOD_VERDICTS: Final = ("identical", "within tolerance", "not possible")
_MIB: Final = 1 << 20
_NUMERIC_COLUMNS: Final = ("processes", "seconds")  # right-aligned


@dataclass(frozen=True)
class Mismatch:
    """The first difference between a placement and the reference run, with its likely cause as text.

    `step` counts from 1, and is None for a difference after the last step. `reference` and `found` are the expected and
    the actual value as text. For a tensor, these are the values of the element that differs most, and `index` is its
    index. `ranks` lists the ranks that computed `found`, or is empty if the ranks are unknown.
    """

    step: int | None
    what: str
    name: str
    microbatch: int | None
    ranks: tuple[int, ...]
    index: tuple[int, ...] | None
    reference: str
    found: str
    cause: str
    after: str = ""  # text about the checkpoint that the run resumed from, if any


@dataclass(frozen=True)
class VerdictRow:
    """The result of a single placement.

    `largest` is the largest relative difference from the reference run, or None if there was no difference.
    """

    strategy: str
    processes: int
    verdict: Verdict
    reason: str = ""  # why the placement isn't possible, or why it failed
    exactness: str = "bits"
    largest: float | None = None
    tolerance: float | None = None
    seconds: float | None = None  # duration of the training steps
    peak_bytes: tuple[int, ...] = ()  # peak memory of each rank
    resumed_on: str = ""  # the placement that resumed from the checkpoint of this placement
    departure: Mismatch | None = None
    differing: int = 0  # number of metrics and tensors that differ, over all steps

    @property
    def good(self) -> bool:
        """Whether the placement passed. A placement that isn't possible counts as passed."""
        return self.verdict in _GOOD_VERDICTS


@dataclass(frozen=True)
class CodeFinding:
    """A finding about the user's code.

    If `fault` is set, the code makes results depend on the placement. Otherwise, the finding is only a note.
    """

    culprit: str
    fault: bool
    text: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verification:
    """The full result of a verification.

    `steps` lists the compared steps, counted from 1, of the `total_steps` of the recipe.
    """

    recipe: str
    steps: tuple[int, ...]
    microbatches: int
    total_steps: int
    evaluated: int
    validation_samples: int
    rows: tuple[VerdictRow, ...]
    findings: tuple[CodeFinding, ...] = ()

    @property
    def agree(self) -> bool:
        """Whether all possible placements match the reference and no finding is a fault."""
        return all(row.good for row in self.rows) and not any(finding.fault for finding in self.findings)


def to_json(verification: Verification) -> str:
    """Return the full result as JSON. Non-finite floats become strings, because JSON has no NaN or infinity."""
    return json.dumps({"agree": verification.agree, **_to_json_value(asdict(verification))}, indent=1) + "\n"


def print_verification(verification: Verification, console: Console) -> None:
    """Print the table, the findings about the user's code, and an explanation for each placement that failed."""
    console.print(Text(_format_heading(verification)), soft_wrap=True)
    console.print(_make_table([row for row in verification.rows if row.verdict != "not possible"]))
    for row in verification.rows:
        if row.verdict == "not possible":
            console.print(Text(f"{row.strategy} on {row.processes}: not possible: {row.reason}"), soft_wrap=True)
    for finding in verification.findings:
        kind = "fault" if finding.fault else "note"
        console.print(Text(f"{kind}: {finding.text}", style="bold red" if finding.fault else ""), soft_wrap=True)
    for row in verification.rows:
        if not row.good:
            console.print(Text("\n".join(explain_row(row, verification.findings))), soft_wrap=True)
    console.print(Text(format_conclusion(verification), style="bold"), soft_wrap=True)


def format_failures(verification: Verification) -> str:
    """Return the faults, the explanation of each failed placement, and the conclusion as text."""
    lines = [f"fault: {finding.text}" for finding in verification.findings if finding.fault]
    lines += [line for row in verification.rows if not row.good for line in explain_row(row, verification.findings)]
    return "\n".join([*lines, format_conclusion(verification)])


def explain_row(row: VerdictRow, findings: Sequence[CodeFinding]) -> Iterator[str]:
    """Yield lines that explain how a placement differs. A cause from `findings` isn't repeated."""
    where = f"{row.strategy} on {format_count(row.processes, 'process')}"
    if row.departure is None:
        yield f"{where}: {row.verdict}: {row.reason}"
        return
    departure = row.departure
    yield f"{where}: the first difference{departure.after}: {describe_location(departure)}"
    yield f"  reference {departure.reference}, here {departure.found}"
    if row.differing > 1:
        yield f"  {row.differing} metrics and tensors differ in total"
    causes = [f"{finding.culprit}, see above" for finding in findings if finding.text == departure.cause]
    yield f"  likely cause: {[*causes, departure.cause][0]}"


def describe_location(mismatch: Mismatch) -> str:
    """Return the location of a difference as text, such as `step 1, gradient of conv.weight[3, 1], rank 1`."""
    name = mismatch.name + (str(list(mismatch.index)) if mismatch.index else "")
    parts = [
        f"step {mismatch.step}" if mismatch.step is not None else "after the last step",
        f"{mismatch.what} {name}".rstrip(),
    ]
    if mismatch.microbatch is not None:
        parts.append(f"micro-batch {mismatch.microbatch}")
    if mismatch.ranks:
        parts.append(f"rank{'s' if len(mismatch.ranks) > 1 else ''} {', '.join(map(str, mismatch.ranks))}")
    return ", ".join(parts)


def _format_heading(verification: Verification) -> str:
    steps = ", ".join(map(str, verification.steps))
    return (
        f"{verification.recipe}: step{'s' if len(verification.steps) > 1 else ''} {steps} of "
        f"{verification.total_steps:,}, "
        f"{format_count(verification.microbatches, 'micro-batch')}, "
        f"{verification.evaluated} of {verification.validation_samples} validation samples; "
        f"reference: single on 1 process"
    )


def _make_table(rows: Sequence[VerdictRow]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("strategy", "processes", "result", "resumed on", "seconds"):
        table.add_column(heading, justify="right" if heading in _NUMERIC_COLUMNS else "left", no_wrap=True)
    table.add_column("peak MiB")  # one value per rank, which may wrap on a narrow terminal
    for row in rows:
        seconds = "" if row.seconds is None else f"{row.seconds:.2f}"
        peaks = " ".join(f"{peak / _MIB:.0f}" for peak in row.peak_bytes)
        result = Text(_format_result(row), style="" if row.good else "bold red")
        table.add_row(row.strategy, str(row.processes), result, row.resumed_on, seconds, peaks)
    return table


def _format_result(row: VerdictRow) -> str:
    if row.largest is None or row.verdict in ("identical", "failed", "not possible"):
        return row.verdict
    if row.verdict == "within tolerance":
        return f"within {row.largest:.1e} of {row.tolerance:.1e}"
    return f"differs by {row.largest:.1e}" + ("" if row.tolerance is None else f", not {row.tolerance:.1e}")


def format_conclusion(verification: Verification) -> str:
    """Return the overall result as a line of text."""
    possible = [row for row in verification.rows if row.verdict != "not possible"]
    good = sum(row.good for row in possible)
    if verification.agree:
        return (
            f"all agree: loss, gradients, weights, optimizer state, buffers, evaluation and the resumed run of "
            f"{format_count(good, 'placement')}"
        )
    faults = sum(finding.fault for finding in verification.findings)
    where = "in the recipe's own code"
    if good == len(possible):
        found = f"{format_count(faults, 'fault')} {'was' if faults == 1 else 'were'} found {where}"
        return f"the placements agree, but {found}" if possible else f"nothing was compared: {found}"
    found = f"; {format_count(faults, 'fault')} {where}" if faults else ""
    return f"not the same: {good} of {len(possible)} placements agree{found}"


def _to_json_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _to_json_value(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json_value(each) for each in value]
    return value if not isinstance(value, float) or abs(value) < float("inf") else str(value)
