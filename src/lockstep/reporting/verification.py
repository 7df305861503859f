"""What a verification found: as a table for people, and as JSON."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.reporting.wording import format_count

Verdict = Literal["identical", "within tolerance", "differs", "failed", "not possible"]

_GOOD: Final = ("identical", "within tolerance", "not possible")
_MIB: Final = 1 << 20
_NUMBERS: Final = ("processes", "seconds")  # columns of the table


@dataclass(frozen=True)
class Mismatch:
    """The first thing on which a placement and the reference disagree, with the likely cause in words.

    `step` is the number of the step in the run, from 1 on; None after the last one. `ranks` are those that saw `found`;
    empty where it is unknown. `reference` and `found` are the two values as text, for a tensor the pair with
    the largest difference, at `index`.
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
    after: str = ""  # what went before, where it was not a plain run: a resumed one


@dataclass(frozen=True)
class VerdictRow:
    """One placement. `largest` is its largest difference as a part of `tolerance`'s scale; None where none was seen."""

    strategy: str
    processes: int
    verdict: Verdict
    reason: str = ""  # why it is not possible, or how it failed
    exactness: str = "bits"
    largest: float | None = None
    tolerance: float | None = None
    seconds: float | None = None  # of the steps alone
    peak_bytes: tuple[int, ...] = ()  # of each rank
    resumed_on: str = ""  # where the state that it saved half way was carried on
    departure: Mismatch | None = None
    differing: int = 0  # how many figures and tensors differ, over all steps

    @property
    def good(self) -> bool:
        """Whether nothing was found against this placement."""
        return self.verdict in _GOOD


@dataclass(frozen=True)
class CodeFinding:
    """Something about the user's own code. A `fault` makes results depend on the placement; the others are notes."""

    culprit: str
    fault: bool
    text: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verification:
    """All that a verification found. `steps` are numbers in the run, from 1 on."""

    recipe: str
    steps: tuple[int, ...]
    microbatches: int
    evaluated: int
    validation_samples: int
    rows: tuple[VerdictRow, ...]
    findings: tuple[CodeFinding, ...] = ()

    @property
    def agree(self) -> bool:
        """Whether all placements that are possible agree with the reference and no fault was found."""
        return all(row.good for row in self.rows) and not any(finding.fault for finding in self.findings)


def to_json(verification: Verification) -> str:
    """Write all of it as JSON; figures that are not finite are text, for JSON has none."""
    return json.dumps({"agree": verification.agree, **_plain(asdict(verification))}, indent=1) + "\n"


def draw(verification: Verification, console: Console) -> None:
    """Print the table, what was found in the user's code, and for each placement that disagrees how."""
    console.print(Text(_heading(verification)), soft_wrap=True)
    console.print(_table([row for row in verification.rows if row.verdict != "not possible"]))
    for row in verification.rows:
        if row.verdict == "not possible":
            console.print(Text(f"{row.strategy} on {row.processes}: not possible: {row.reason}"), soft_wrap=True)
    for finding in verification.findings:
        kind = "fault" if finding.fault else "note"
        console.print(Text(f"{kind}: {finding.text}", style="bold red" if finding.fault else ""), soft_wrap=True)
    for row in verification.rows:
        if not row.good:
            console.print(Text("\n".join(explain_row(row, verification.findings))), soft_wrap=True)
    console.print(Text(conclusion(verification), style="bold"), soft_wrap=True)


def against(verification: Verification) -> str:
    """Return what counts against the placements, as `draw` prints it: the faults, who disagrees, and the end."""
    lines = [f"fault: {finding.text}" for finding in verification.findings if finding.fault]
    lines += [line for row in verification.rows if not row.good for line in explain_row(row, verification.findings)]
    return "\n".join([*lines, conclusion(verification)])


def explain_row(row: VerdictRow, findings: Sequence[CodeFinding]) -> Iterator[str]:
    """Yield the lines on how a placement disagrees; a cause among `findings` is not repeated."""
    where = f"{row.strategy} on {format_count(row.processes, 'process')}"
    if row.departure is None:
        yield f"{where}: {row.verdict}: {row.reason}"
        return
    departure = row.departure
    yield f"{where}: the first difference{departure.after}: {describe_location(departure)}"
    yield f"  reference {departure.reference}, here {departure.found}"
    if row.differing > 1:
        yield f"  {row.differing} figures and tensors differ in all"
    causes = [f"{finding.culprit}, see above" for finding in findings if finding.text == departure.cause]
    yield f"  likely cause: {[*causes, departure.cause][0]}"


def describe_location(departure: Mismatch) -> str:
    """Return what differs and where: `step 1, gradient of conv.weight[3, 1], rank 1`."""
    name = departure.name + (str(list(departure.index)) if departure.index else "")
    parts = [
        f"step {departure.step}" if departure.step is not None else "after the last step",
        f"{departure.what} {name}".rstrip(),
    ]
    if departure.microbatch is not None:
        parts.append(f"micro-batch {departure.microbatch}")
    if departure.ranks:
        parts.append(f"rank{'s' if len(departure.ranks) > 1 else ''} {', '.join(map(str, departure.ranks))}")
    return ", ".join(parts)


def _heading(verification: Verification) -> str:
    steps = ", ".join(map(str, verification.steps))
    return (
        f"{verification.recipe}: step{'s' if len(verification.steps) > 1 else ''} {steps}, "
        f"{format_count(verification.microbatches, 'micro-batch')}, "
        f"{verification.evaluated} of {verification.validation_samples} validation samples; "
        f"reference: single on 1 process"
    )


def _table(rows: Sequence[VerdictRow]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("strategy", "processes", "result", "resumed on", "seconds"):
        table.add_column(heading, justify="right" if heading in _NUMBERS else "left", no_wrap=True)
    table.add_column("peak MiB")  # of each rank: in a narrow terminal they take several lines
    for row in rows:
        seconds = "" if row.seconds is None else f"{row.seconds:.2f}"
        peaks = " ".join(f"{peak / _MIB:.0f}" for peak in row.peak_bytes)
        result = Text(_result(row), style="" if row.good else "bold red")
        table.add_row(row.strategy, str(row.processes), result, row.resumed_on, seconds, peaks)
    return table


def _result(row: VerdictRow) -> str:
    if row.largest is None or row.verdict in ("identical", "failed", "not possible"):
        return row.verdict
    if row.verdict == "within tolerance":
        return f"within {row.largest:.1e} of {row.tolerance:.1e}"
    return f"differs by {row.largest:.1e}" + ("" if row.tolerance is None else f", not {row.tolerance:.1e}")


def conclusion(verification: Verification) -> str:
    """Return whether all agree, in a line."""
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


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if not isinstance(value, float) or abs(value) < float("inf") else str(value)
