"""Pages about runs: their curves, their differences, and examples of model outputs.

Only the examples require torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from lockstep.common.location import is_url
from lockstep.errors import UsageError, convert_os_error
from lockstep.jobs.reader import read_runs_by_name
from lockstep.reporting.page import render_page
from lockstep.reporting.png import check_png, write_png
from lockstep.reporting.run_page import make_sections

_DEFAULT_SAMPLES: Final = 10_000  # maximum number of validation samples for each run


@dataclass(frozen=True)
class Report:
    """The files that `report` wrote. `warnings` describes everything that couldn't be read or shown."""

    page: Path
    charts: tuple[Path, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class ReportOptions:
    """The options of a report. `samples`, `best`, `overrides` and `trust` only apply to `examples`."""

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
    """Write a page about run folders, or about all runs in a folder, in a background process.

    This is the Python equivalent of `lockstep report`. An existing file at `out` is replaced. With `png=True`, each
    chart is also written as a PNG file to a folder next to the page.

    With `examples=True`, the newest checkpoint of each run is evaluated on its validation data, and the page shows
    examples of the model's outputs. To use the best checkpoint instead, pass `best=True`. `samples` is the maximum
    number of validation samples for each run, and defaults to 10,000. User code that a recipe references only runs if
    `overrides` also reference it, or if you pass `trust=True`.

    Raises UsageError if there is no run to show, or if no run can be evaluated for `examples`.
    """
    from lockstep.run.background import run_in_background, to_arguments, to_path_arguments

    options = ReportOptions(
        to_path_arguments(runs), Path(out), png, examples, samples, best, tuple(to_arguments(overrides)), trust
    )
    [result] = run_in_background(lambda: [asdict(write_report(options, lambda _: None))])
    return Report(Path(result["page"]), tuple(map(Path, result["charts"])), tuple(result["warnings"]))


def write_report(options: ReportOptions, notify: Callable[[str], None]) -> Report:
    """Write the page and the charts. `notify` is called with messages about each evaluated checkpoint."""
    out, samples = options.out, options.samples
    if not options.examples and (samples is not None or options.best or options.trust or options.overrides):
        raise UsageError("--samples, --best, --trust and overrides require --examples; add --examples")
    if samples is not None and samples < 1:
        raise UsageError(f"--samples: must be at least 1, got {samples}")
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: folder {out.parent} does not exist; create it, or use a different folder")
    if options.png:
        check_png()
    copies = _copy_remote_runs(options)
    runs, warnings = read_runs_by_name([*(Path(folder) for folder in options.runs if not is_url(folder)), *copies])
    # The copy of a run in object storage contains at most one of its checkpoints.
    runs = [replace(run, checkpoints=None) if Path(run.folder) in copies else run for run in runs]
    page_sections = make_sections(runs)
    if options.examples:
        from lockstep.inference.inspection import inspect_runs
        from lockstep.inference.saved import open_saved
        from lockstep.run.evaluation import EvalRequest

        request = EvalRequest("", options.overrides, options.trust, options.best, "report --examples")
        inspection = inspect_runs(
            runs, samples or _DEFAULT_SAMPLES, lambda run: open_saved(replace(request, path=run)), notify
        )
        page_sections, warnings = [*page_sections, *inspection.sections], [*warnings, *inspection.problems]
    title = runs[0].folder if len(runs) == 1 else f"{len(runs)} runs"
    with convert_os_error(UsageError, f"--out {out}: cannot write"):
        out.write_text(render_page(title, page_sections), encoding="utf-8")
    return Report(out, tuple(write_png(page_sections, out.with_suffix("")) if options.png else ()), tuple(warnings))


def _copy_remote_runs(options: ReportOptions) -> list[Path]:
    """Download the runs at URLs, with a checkpoint if one is needed. Return their local folders."""
    urls = [folder for folder in options.runs if is_url(folder)]
    if not urls:
        return []
    from lockstep.runs.remote import make_local_copies  # imports torch

    return make_local_copies(urls, "none" if not options.examples else "best" if options.best else "newest")
