"""Print a recipe as it will run, and what follows from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from lockstep.commands import _completion
from lockstep.core.text import printable

if TYPE_CHECKING:
    from lockstep.config.recipe import Recipe
    from lockstep.core.order import Step, Steps


@click.command("show")
@click.argument("recipe", shell_complete=_completion.words)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=_completion.overrides)
def command(recipe: str, overrides: tuple[str, ...]) -> None:
    """Print the configuration of RECIPE, each value with its origin, and the numbers that follow from it.

    RECIPE is a YAML file or the name of a shipped recipe. Overrides are dotted: recipe.optimizer.lr=0.1
    """
    from lockstep.config.load import load, to_yaml
    from lockstep.core.devices import in_words

    loaded = load(recipe, overrides)
    for note in loaded.notes:
        click.echo(printable(f"note: {note}"), err=True)
    click.echo(to_yaml(loaded))
    for name, text in consequences(loaded.config.recipe):
        click.echo(f"{name:<15}{text}")
    placement = loaded.config.placement
    click.echo(f"{'exchange':<15}{in_words(placement.backend, placement.device)}")


def consequences(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield what follows from a recipe, as (name, text)."""
    from lockstep.config.plan import rule, steps
    from lockstep.data.sizes import training_samples

    yield "global batch", f"{recipe.batch} samples"
    yield "micro-batches", _cuts(recipe)
    yield "learning rate", rule(recipe)
    samples = training_samples(recipe.data.name, recipe.data.root, recipe.data.options)
    if samples is None:
        yield "samples", "known only once the data is there; so are steps and the rates of the schedule"
    else:
        run = steps(recipe, samples)
        yield from _length(recipe, run)
        yield "rates", _rates(recipe, run)


def _cuts(recipe: Recipe) -> str:
    from lockstep.core.order import cut

    return _sizes(cut(recipe.batch, recipe.microbatches))


def _sizes(parts: list[range]) -> str:
    counts = Counter(map(len, parts))
    return ", ".join(f"{count} of {size}" for size, count in counts.items()) + " samples"


def _length(recipe: Recipe, run: Steps) -> Iterator[tuple[str, str]]:
    epochs = f"{run.total_samples / run.samples_per_epoch:g}"
    dropped = f" ({run.length - run.samples_per_epoch} dropped)" if run.drop_last else ""
    yield "samples", f"{run.samples_per_epoch} an epoch{dropped}, {run.total_samples} in {epochs} epochs"
    yield "steps", f"{run.per_epoch} an epoch, {run.total} in all"
    last = run[run.per_epoch - 1]
    if last.samples < recipe.batch:
        yield "last step", f"of an epoch: {last.samples} samples{_last_cuts(recipe, last)}"


def _last_cuts(recipe: Recipe, last: Step) -> str:
    return f", micro-batches {_sizes(last.microbatches(recipe.microbatches))}"


def _rates(recipe: Recipe, run: Steps) -> str:
    """The rate of the first update, of the first one after warm-up, and of the last."""
    from lockstep.config.plan import rate, warm_up_steps

    at = rate(recipe, run).at
    last = run[run.total - 1].samples_seen
    warm = run[warm_up_steps(recipe, run)].samples_seen
    marks = {"at the start": 0, "after warm-up": warm, "at the last step": last}
    if not 0 < warm < last:
        del marks["after warm-up"]
    return ", ".join(f"{at(seen):.6g} {when}" for when, seen in marks.items())
