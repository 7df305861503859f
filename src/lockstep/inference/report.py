"""A page on runs: their curves, what differs, and what their models do, which alone needs torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from lockstep.errors import UsageError, os_error_as
from lockstep.jobs.reader import runs_by_name
from lockstep.reporting.page import page
from lockstep.reporting.png import check_png, write_png
from lockstep.reporting.run_page import sections

_SAMPLES: Final = 10_000  # of each run's validation data, at most


@dataclass(frozen=True)
class Report:
    """What was written: the page, and with `png` its charts; `warnings` say what could not be read, or shown."""

    page: Path
    charts: tuple[Path, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Options:
    """What a page is to show; the last four are of `examples`."""

    runs: Sequence[str]
    out: Path
    png: bool
    examples: bool
    samples: int | None
    best: bool
    overrides: tuple[str, ...]
    trust: bool


def report(
    runs: str | Path | Sequence[str | Path] = "runs",
    *,
    out: str | Path = "report.html",
    png: bool = False,
    examples: bool = False,
    samples: int | None = None,
    best: bool = False,
    overrides: Mapping[str, Any] | None = None,
    trust: bool = False,
) -> Report:
    """Draw run folders, or all runs in a folder, on one page, as `lockstep report` does, in a background process.

    A page that is at `out` is replaced; with `png` each chart becomes a file, too, in a folder beside it. With
    `examples` the newest checkpoint of each run, or the `best`, is evaluated on at most so many `samples` of its
    validation data, left out 10,000, and what its model does is shown; code that its recipe names runs only if
    `overrides` name it too, or with `trust`. UsageError where no run can be drawn or shown.
    """
    from lockstep.run.background import as_names, as_words, in_background

    options = Options(as_names(runs), Path(out), png, examples, samples, best, tuple(as_words(overrides)), trust)
    [found] = in_background(lambda: [asdict(write_report(options, lambda _: None))])
    return Report(Path(found["page"]), tuple(map(Path, found["charts"])), tuple(found["warnings"]))


def write_report(options: Options, tell: Callable[[str], None]) -> Report:
    """Write the page and the charts; `tell` gets a line on each checkpoint that is evaluated."""
    out, samples = options.out, options.samples
    if not options.examples and (samples is not None or options.best or options.trust or options.overrides):
        raise UsageError("--samples, --best, --trust and overrides are for --examples, which is missing; add it")
    if samples is not None and samples < 1:
        raise UsageError(f"--samples {samples}: expected a whole number from 1")
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {out.parent}; make it, or choose another")
    if options.png:
        check_png()
    found, warnings = runs_by_name([Path(each) for each in options.runs])
    shown = sections(found)
    if options.examples:
        from lockstep.inference.inspection import inspect_runs
        from lockstep.inference.saved import open_saved
        from lockstep.run.evaluation import EvalRequest

        asked = EvalRequest("", options.overrides, options.trust, options.best, "report --examples")
        seen = inspect_runs(found, samples or _SAMPLES, lambda run: open_saved(replace(asked, path=run)), tell)
        shown, warnings = [*shown, *seen.sections], [*warnings, *seen.problems]
    title = found[0].folder if len(found) == 1 else f"{len(found)} runs"
    with os_error_as(UsageError, f"--out {out}: not written"):
        out.write_text(page(title, shown), encoding="utf-8")
    return Report(out, tuple(write_png(shown, out.with_suffix("")) if options.png else ()), tuple(warnings))
