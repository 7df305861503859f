"""Draw the curves of runs in a page, with what differs, restarts and checkpoints, and what their models do.

The page is one file, which needs no network.
"""

from pathlib import Path

import click

from lockstep.commands import _overrides
from lockstep.common.text import printable, printable_line


@click.command("report")
@click.argument("folders", nargs=-1, metavar="[RUN]... [KEY=VALUE]...", type=click.Path())
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
@click.option("--examples", is_flag=True, help="Evaluate a checkpoint of each run, and show what its model does.")
@click.option("--samples", type=click.IntRange(1), metavar="N", help="At most so many validation samples [10000].")
@click.option("--best", is_flag=True, help="Look at the best checkpoint of each run instead of the newest.")
@click.option("--trust", is_flag=True, help="Run the code that the checkpoints' recipes name.")
def command(
    folders: tuple[str, ...], out: Path, png: bool, examples: bool, samples: int | None, best: bool, trust: bool
) -> None:
    """Draw the runs in each RUN, a run folder or a folder of some (runs/, if left out), beside each other.

    Curves over samples and over time, throughput and memory; the keys in which recipes and placements differ; restarts
    and checkpoints.

    With --examples also, of a checkpoint on its validation data: of classifiers the confusions and the worst mistakes,
    of language models samples of text and the loss by position, predicted against true of regressions, confusions of
    the pixels of segmentations. Overrides are dotted (placement.device=cpu). Code that a recipe names, such as
    recipe.model.name: my.nets:net, runs only if an override names it too, or with --trust.
    """
    from lockstep.inference.report import Options, write_report

    overrides, places = _overrides.split_overrides(folders)
    options = Options(places or ["runs"], out, png, examples, samples, best, overrides, trust)
    done = write_report(options, lambda line: click.echo(printable_line(line), err=True))
    for line in done.warnings:
        click.echo(printable_line(f"warning: {line}"), err=True)
    for path in (done.page, *done.charts):
        click.echo(printable(f"written {path}"))
