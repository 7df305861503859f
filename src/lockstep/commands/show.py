"""Print a recipe as it will run, and the values that are derived from it."""

from collections import Counter
from collections.abc import Iterator

import click

from lockstep.commands import _completion, _recipe
from lockstep.config.plan import compute_steps, count_warm_up_steps, format_base_rate
from lockstep.config.recipe import Recipe
from lockstep.core.epochs import format_epochs
from lockstep.core.order import Steps, split_range
from lockstep.data.sources import count_training_samples
from lockstep.setup.schedule import find_rate


@click.command("show")
@click.argument("recipe", shell_complete=_completion.complete_arguments)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=_completion.complete_overrides)
def command(recipe: str, overrides: tuple[str, ...]) -> None:
    """Print the configuration of RECIPE, each value with its origin, and the values that are derived from it.

    With strategy deepspeed, it also prints DeepSpeed's configuration.

    RECIPE is a YAML file or the name of a shipped recipe. Overrides are dotted: recipe.optimizer.lr=0.1
    """
    from lockstep.config.load import load, to_yaml
    from lockstep.config.placement import FOREIGN
    from lockstep.config.shipped import list_shipped_recipes
    from lockstep.core.devices import describe_backend

    loaded = load(recipe, overrides)
    names = (loaded.origins[f"recipe.{section}.name"] for section in ("model", "optimizer"))
    if recipe not in list_shipped_recipes() or "override" in names:
        from lockstep.models.find import find_origin  # imports torch
        from lockstep.parallel.optimize import find_optimizer
        from lockstep.setup.wrong_names import explain_errors

        model, optimizer = loaded.config.recipe.model, loaded.config.recipe.optimizer.name
        with explain_errors(loaded):
            find_origin(model.name, model.source)
            if ":" not in optimizer:
                find_optimizer(optimizer)
    derived_values = [*iterate_derived_values(loaded.config.recipe)]
    _recipe.print_notes(loaded)
    click.echo(to_yaml(loaded))
    for name, text in derived_values:
        click.echo(f"{name:<15}{text}")
    placement = loaded.config.placement
    click.echo(f"{'communication':<15}{describe_backend(placement.backend, placement.device)}")
    if placement.strategy.name in FOREIGN:
        from lockstep.setup.resolved import resolve_config  # imports torch

        for name, text in resolve_config(loaded, 1).engine_files.items():
            click.echo(f"\n{name}\n{text}", nl=False)


def iterate_derived_values(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield the values that are derived from a recipe, such as the number of steps, as (name, text) pairs."""
    yield "global batch", f"{recipe.batch} samples"
    yield "micro-batches", _format_sizes(split_range(recipe.batch, recipe.microbatches))
    yield "learning rate", format_base_rate(recipe)
    samples = count_training_samples(recipe.data.name, recipe.data.root, recipe.data.options)
    if samples is None:
        yield "samples", "printed at the start of lockstep train, as are the steps and the learning rates"
    else:
        steps = compute_steps(recipe, samples)
        length = format_epochs(steps.total_samples / steps.samples_per_epoch)
        dropped = f" ({steps.length - steps.samples_per_epoch} dropped)" if steps.drop_last else ""
        yield "samples", f"{steps.samples_per_epoch} an epoch{dropped}, {steps.total_samples} in {length}"
        yield "steps", f"{steps.per_epoch} an epoch, {steps.total} in all"
        last = steps[steps.per_epoch - 1]
        if last.samples < recipe.batch:
            microbatch_sizes = _format_sizes(last.microbatches(recipe.microbatches))
            yield "last step", f"of an epoch: {last.samples} samples, micro-batches {microbatch_sizes}"
        yield "rates", _format_rates(recipe, steps)


def _format_sizes(ranges: list[range]) -> str:
    counts = Counter(map(len, ranges))
    return ", ".join(f"{count} of {size}" for size, count in counts.items()) + " samples"


def _format_rates(recipe: Recipe, steps: Steps) -> str:
    """Describe the learning rates at the first update, after warm-up, and at the last update."""
    rate_at = find_rate(recipe, steps).compute_rate
    last = steps[steps.total - 1].samples_seen
    warm_up_end = steps[count_warm_up_steps(recipe, steps)].samples_seen
    marks = {"at the start": 0, "after warm-up": warm_up_end, "at the last step": last}
    if not 0 < warm_up_end < last:
        del marks["after warm-up"]
    rates = ", ".join(f"{rate_at(samples):.6g} {when}" for when, samples in marks.items())
    return rates if warm_up_end <= last else f"{rates}, which is still in warm-up"
