"""Draw the curves of runs in a page, with what differs, restarts and checkpoints.

The page is one file, which needs no network.
"""

from __future__ import annotations

from pathlib import Path

import click

from lockstep.commands import _completion
from lockstep.core.text import printable, printable_line


@click.command("report")
@click.argument("folders", nargs=-1, metavar="[RUN]...", shell_complete=_completion.files)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default="report.html",
    show_default=True,
    help="The page to write; one that is there is replaced.",
)
@click.option(
    "--png", is_flag=True, help="Write each chart as a PNG file, too, in a folder beside it, which needs Chromium."
)
def command(folders: tuple[str, ...], out: Path, png: bool) -> None:
    """Draw the runs in each RUN, a run folder or a folder of some (runs/, if left out), beside each other.

    Curves over samples and over time, throughput and memory; the keys in which recipes and placements differ; restarts
    and checkpoints.
    """
    from lockstep.errors import UsageError
    from lockstep.reporting.page import check_plotly, page
    from lockstep.reporting.png import check_png, write_png
    from lockstep.reporting.run_page import charts, sections
    from lockstep.run.reported import reported

    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {out.parent}; make it, or choose another")
    check_plotly()
    if png:
        check_png()
    found, warnings = reported([Path(each) for each in folders or ("runs",)])
    for line in warnings:
        click.echo(printable_line(f"warning: {line}"), err=True)
    title = found[0].run.folder if len(found) == 1 else f"{len(found)} runs"
    try:
        out.write_text(page(title, sections(found)), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--out {out}: not written: {error.strerror}") from error
    drawn = write_png(charts(found), out.with_suffix("")) if png else []
    for path in (out, *drawn):
        click.echo(printable(f"written {path}"))
