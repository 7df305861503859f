"""Replay steps of a run on any machine, and compare them with the digests that the run recorded."""

from pathlib import Path

import click

from lockstep.commands import _overrides
from lockstep.common.text import printable_line
from lockstep.errors import UsageError


@click.command("replay")
@click.argument("arguments", nargs=-1, required=True, metavar="RUN [KEY=VALUE]... [-- COMMAND]", type=click.Path())
@click.option("--step", type=click.IntRange(1), metavar="N", help="Replay step N and examine it.")
@click.option("--steps", metavar="A:B", help="Replay steps A to B, including B.")
@click.option("--check", type=click.IntRange(1), metavar="K", help="Replay K randomly chosen steps.")
@click.option("--samples", is_flag=True, help="With --step: list the samples of the step and compute nothing.")
@click.option("--change", multiple=True, metavar="KEY=VALUE", help="Change a value of the recipe after the checkpoint.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="The page to write [replay-STEP.html].")
@click.option("--trace", type=click.Path(dir_okay=False, path_type=Path), help="With --step: write a trace for bisect.")
@click.option("--trust", is_flag=True, help="Run user code that the run's recipe references.")
def command(
    arguments: tuple[str, ...],
    step: int | None,
    steps: str | None,
    check: int | None,
    samples: bool,
    change: tuple[str, ...],
    out: Path | None,
    trace: Path | None,
    trust: bool,
) -> None:
    """Replay steps of RUN, a run folder, from the nearest checkpoint before them, and compare their bits.

    A step only depends on the recipe, the data, the step number and the weights, so one process computes the same bits
    as many processes. Overrides set where the steps are computed: placement.strategy=zero3
    placement.processes=2, recipe.data.root=/data. Nothing is written to RUN.

    For a custom training loop, pass the command that runs its script. The script itself doesn't need to be changed:
    -- python train.py --size 3.

    With --step, the page also shows the loss of each sample, the norms of gradients and updates, the largest
    activations, and the origin of the first value that isn't finite. --trace writes the digest of each tensor of the
    step for `lockstep bisect`. Exits with code 0 if all bits agree, and with code 3 otherwise.
    """
    from lockstep.replay.drive import ReplayOptions, replay
    from lockstep.runs.remote import make_local_copy

    overrides, paths = _overrides.split_overrides(arguments)
    if not paths:
        raise UsageError("replay: no run folder; pass the folder of a run")
    script = arguments[arguments.index(paths[1]) :] if len(paths) > 1 else ()
    overrides = overrides[: len(arguments) - len(script) - 1]  # arguments after the run folder are for the script
    folder = make_local_copy(paths[0], "all")
    options = ReplayOptions(folder, step, steps, check, samples, change, out, overrides, trust, trace, script)
    raise SystemExit(replay(options, lambda line: click.echo(printable_line(line))))
