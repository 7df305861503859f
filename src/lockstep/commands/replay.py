"""Do steps of a run again, anywhere, and compare them with what the run has kept of them."""

from pathlib import Path

import click

from lockstep.commands import _overrides
from lockstep.common.text import printable_line
from lockstep.errors import UsageError


@click.command("replay")
@click.argument("words", nargs=-1, required=True, metavar="RUN [KEY=VALUE]... [-- COMMAND]", type=click.Path())
@click.option("--step", type=click.IntRange(1), metavar="N", help="Do step N again, and find out what happened in it.")
@click.option("--steps", metavar="A:B", help="Do these steps again, the last one included.")
@click.option("--check", type=click.IntRange(1), metavar="K", help="Do K steps again that are drawn at random.")
@click.option("--samples", is_flag=True, help="With --step: list its samples and compute nothing.")
@click.option("--change", multiple=True, metavar="KEY=VALUE", help="Give the recipe another value from there on.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="The page to write [replay-STEP.html].")
@click.option("--trace", type=click.Path(dir_okay=False, path_type=Path), help="With --step: a file for bisect.")
@click.option("--trust", is_flag=True, help="Run the code that the run's recipe names.")
def command(
    words: tuple[str, ...],
    step: int | None,
    steps: str | None,
    check: int | None,
    samples: bool,
    change: tuple[str, ...],
    out: Path | None,
    trace: Path | None,
    trust: bool,
) -> None:
    """Do steps of RUN, a run folder, again from the nearest checkpoint before them, and compare their bits.

    A step is a function of recipe, data, number and weights, so it is the same on one process as it was on many.
    Overrides say where it is computed: placement.strategy=zero3 placement.processes=2, recipe.data.root=/data. Nothing
    is written into RUN.

    Of a loop of your own, COMMAND runs its script, unchanged: -- python train.py --size 3.

    Of --step also a page: the samples with the loss of each, the norms of gradients and updates, the largest
    activations, and where the first value that is not finite arose; --trace writes the digest of each tensor of the
    step, for `lockstep bisect`. Exit code 0 where all bits agree, 3 where not.
    """
    from lockstep.replay.drive import Options, replay

    overrides, places = _overrides.split_overrides(words)
    if not places:
        raise UsageError("give a run folder")
    script = words[words.index(places[1]) :] if len(places) > 1 else ()
    overrides = overrides[: len(words) - len(script) - 1]  # what follows belongs to the script
    options = Options(Path(places[0]), step, steps, check, samples, change, out, overrides, trust, trace, script)
    raise SystemExit(replay(options, lambda line: click.echo(printable_line(line))))
