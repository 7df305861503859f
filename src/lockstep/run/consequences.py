"""What follows from a recipe: its micro-batches, steps and rates, as `lockstep show` prints them. Quick: no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from lockstep.config.plan import rate, rule, steps, warm_up_steps
from lockstep.config.recipe import Recipe
from lockstep.core.epochs import in_words
from lockstep.core.order import Steps, cut
from lockstep.data.sources import training_samples


def consequences(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield what follows from a recipe, as (name, text)."""
    yield "global batch", f"{recipe.batch} samples"
    yield "micro-batches", _sizes(cut(recipe.batch, recipe.microbatches))
    yield "learning rate", rule(recipe)
    samples = training_samples(recipe.data.name, recipe.data.root, recipe.data.options)
    if samples is None:
        yield "samples", "known only once the data is there; so are steps and the rates of the schedule"
    else:
        run = steps(recipe, samples)
        yield from _length(recipe, run)
        yield "rates", _rates(recipe, run)


def _sizes(parts: list[range]) -> str:
    counts = Counter(map(len, parts))
    return ", ".join(f"{count} of {size}" for size, count in counts.items()) + " samples"


def _length(recipe: Recipe, run: Steps) -> Iterator[tuple[str, str]]:
    length = in_words(run.total_samples / run.samples_per_epoch)
    dropped = f" ({run.length - run.samples_per_epoch} dropped)" if run.drop_last else ""
    yield "samples", f"{run.samples_per_epoch} an epoch{dropped}, {run.total_samples} in {length}"
    yield "steps", f"{run.per_epoch} an epoch, {run.total} in all"
    last = run[run.per_epoch - 1]
    if last.samples < recipe.batch:
        cuts = _sizes(last.microbatches(recipe.microbatches))
        yield "last step", f"of an epoch: {last.samples} samples, micro-batches {cuts}"


def _rates(recipe: Recipe, run: Steps) -> str:
    """Return the rate of the first update, of the first one after warm-up, and of the last."""
    at = rate(recipe, run).at
    last = run[run.total - 1].samples_seen
    warm = run[warm_up_steps(recipe, run)].samples_seen
    marks = {"at the start": 0, "after warm-up": warm, "at the last step": last}
    if not 0 < warm < last:
        del marks["after warm-up"]
    return ", ".join(f"{at(seen):.6g} {when}" for when, seen in marks.items())
