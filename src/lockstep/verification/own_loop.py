"""Whether a loop of the user's own gives the same numbers on all placements: `lockstep.verify`.

The function, or the script, is run once for each placement, in processes of its own. What rank 0 saw is written after
each step, its loss and a digest of each tensor of the model, and compared with one process.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from lockstep.config.placement import Placement
from lockstep.errors import EXIT_DONE, EXIT_USAGE, UsageError, VerificationError
from lockstep.ranks.rendezvous import Rendezvous
from lockstep.run.ambient import AMBIENT, Ambient
from lockstep.run.script import run_script
from lockstep.run.start import in_workers_silently

STRATEGIES: Final = ("ddp", "zero1", "zero2", "zero3")
_TRACE: Final = "trace.jsonl"
_SHOWN: Final = 3  # tensors

Trace = tuple[int, str, dict[str, str]]  # a step's number, its loss, and the digests of all tensors


@dataclass(frozen=True)
class Checked:
    """What became of a placement; `reason` says what was different first, or why it failed or is not possible."""

    strategy: str
    processes: int
    verdict: Literal["identical", "differs", "failed", "not possible"]
    steps: int = 0
    reason: str = ""

    @property
    def good(self) -> bool:
        """Whether nothing is wrong."""
        return self.verdict in ("identical", "not possible")

    @property
    def line(self) -> str:
        """The placement, and what became of it, in a line."""
        what = (
            f"{self.verdict}, {self.steps} steps" if self.verdict == "identical" else f"{self.verdict}: {self.reason}"
        )
        return f"{self.strategy} on {self.processes}: {what}"


def verify(
    function: Callable[[], object],
    *,
    processes: Sequence[int] = (1, 2, 3),
    strategies: Sequence[str | Mapping[str, Any]] = STRATEGIES,
    steps: int | None = None,
) -> list[Checked]:
    """Run `function`, which joins a run and goes through its steps, on all these placements, and compare each step.

    The reference is one process. `strategies`, names or mappings of `name` and options, are in place of what the
    function gives to `run.place`, on each of `processes` above 1; with 1 among them the reference is run twice. After
    `steps` steps a function is ended. Raises VerificationError where any placement differs or fails.
    """
    rows = list(checked(function, processes, strategies, steps))
    if not all(row.good for row in rows):
        raise VerificationError("\n".join(["placements differ from one process:", *(row.line for row in rows)]))
    return rows


def checked(
    function: Callable[[], object],
    processes: Sequence[int],
    strategies: Sequence[str | Mapping[str, Any]],
    steps: int | None,
) -> Iterator[Checked]:
    """Yield what becomes of each placement, as it is known."""
    with tempfile.TemporaryDirectory(prefix="lockstep-verify-") as name:
        folder = Path(name)
        code, said = _ran(function, "single", 1, folder / "reference", steps)
        if code != EXIT_DONE:
            kind = UsageError if code == EXIT_USAGE else VerificationError
            raise kind(f"the reference, one process: {said}")
        reference = _read(folder / "reference")
        places: list[tuple[str | Mapping[str, Any], int]] = [("single", 1)] if 1 in processes else []
        places += [(strategy, count) for strategy in strategies for count in processes if count > 1]
        for number, (strategy, count) in enumerate(places):
            own = folder / str(number)
            code, said = _ran(function, strategy, count, own, steps)
            label = strategy if isinstance(strategy, str) else str(strategy["name"])
            if code != EXIT_DONE:
                yield Checked(label, count, "not possible" if code == EXIT_USAGE else "failed", reason=said)
                continue
            found = _read(own)
            departure = _mismatch(reference, found)
            yield Checked(label, count, "differs" if departure else "identical", len(found), departure)


def script(path: Path, arguments: Sequence[str]) -> Callable[[], object]:
    """Return a script as a function."""
    return partial(run_script, str(path), [str(path), *arguments])


def _ran(
    function: Callable[[], object],
    strategy: str | Mapping[str, Any],
    count: int,
    folder: Path,
    steps: int | None,
) -> tuple[int, str]:
    """Run the function on a placement; return the exit code, and the message of a failure."""
    folder.mkdir()
    given = strategy if isinstance(strategy, str) else dict(strategy)
    work = partial(_work, function, given, folder, steps)
    code, text = in_workers_silently(work, None, Placement(), count)
    return code, text.partition("error: ")[2] or text


class _Enough(BaseException):
    """Ends the function after the steps that are asked for."""


def _work(
    function: Callable[[], object],
    strategy: str | dict[str, Any],
    folder: Path,
    steps: int | None,
    _ready: None,
    rendezvous: Rendezvous,
) -> int:
    """Be one of the ranks of a placement."""
    sys.stderr = sys.__stderr__

    def observe(number: int, loss: float, digests: Mapping[str, str]) -> None:
        if rendezvous.info.rank == 0:
            with (folder / _TRACE).open("a", encoding="utf-8") as trace:
                trace.write(json.dumps([number, loss.hex(), dict(digests)]) + "\n")
        if steps is not None and number >= steps:
            raise _Enough

    ambient = Ambient(rendezvous, strategy, folder / "run", observe)
    AMBIENT.set(ambient)
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        try:
            function()
        except _Enough:
            pass
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
        if not ambient.joined:
            raise UsageError("it joined no run: call lockstep.join in it")
        for run in ambient.joined:
            run.close()
    return EXIT_DONE


def _read(folder: Path) -> list[Trace]:
    path = folder / _TRACE
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    if not lines:
        raise UsageError("the function made no step: go through run.steps(...) in it")
    return [(int(number), str(loss), dict(digests)) for number, loss, digests in map(json.loads, lines)]


def _mismatch(reference: Sequence[Trace], found: Sequence[Trace]) -> str:
    """Say what differs first, "" where nothing does."""
    for (number, loss, digests), (other, other_loss, others) in zip(reference, found, strict=False):
        if number != other:
            return f"step {other} where the reference has step {number}"
        if loss != other_loss:
            return f"step {number}: the loss is {float.fromhex(other_loss)!r}, not {float.fromhex(loss)!r}"
        names = [name for name in digests if digests[name] != others.get(name)]
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            return f"step {number}: after the same loss other weights: {', '.join(names[:_SHOWN])}{more}"
    if len(reference) != len(found):
        return f"{len(found)} steps, not {len(reference)}"
    return ""
