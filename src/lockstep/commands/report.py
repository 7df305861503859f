"""Draw a page about runs: curves, differences, restarts, checkpoints, and examples of what the models do.

The page is a single file and doesn't need a network connection.
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
    help="The page to write. An existing file is replaced.",
)
@click.option(
    "--png", is_flag=True, help="Also write each chart as a PNG file, in a folder next to the page. Requires Chromium."
)
@click.option("--examples", is_flag=True, help="Evaluate a checkpoint of each run, and show what its model does.")
@click.option("--samples", type=click.IntRange(1), metavar="N", help="Maximum number of validation samples [10000].")
@click.option("--best", is_flag=True, help="Use the best checkpoint of each run instead of the newest.")
@click.option("--trust", is_flag=True, help="Run user code that the recipes of the checkpoints reference.")
def command(
    folders: tuple[str, ...], out: Path, png: bool, examples: bool, samples: int | None, best: bool, trust: bool
) -> None:
    """Draw the runs in each RUN next to each other. RUN is a run folder or a folder of runs, and defaults to runs/.

    The page shows curves over samples and time, throughput, memory, the keys that differ between recipes and
    placements, restarts and checkpoints.

    With --examples, a checkpoint of each run is evaluated on its validation data. The page then also shows the
    confusion matrix and the worst mistakes of a classifier, text samples and the loss by position of a language model,
    predicted and true values of a regression, and the confusion matrix over the pixels of a segmentation. Overrides are
    dotted (placement.device=cpu). User code that a recipe references, such as recipe.model.name: my.nets:net, only runs
    if an override also references it, or with --trust.
    """
    from lockstep.inference.report import ReportOptions, write_report

    overrides, paths = _overrides.split_overrides(folders)
    options = ReportOptions(paths or ["runs"], out, png, examples, samples, best, overrides, trust)
    report = write_report(options, lambda line: click.echo(printable_line(line), err=True))
    for line in report.warnings:
        click.echo(printable_line(f"warning: {line}"), err=True)
    for path in (report.page, *report.charts):
        click.echo(printable(f"written {path}"))
