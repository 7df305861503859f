"""Print a recipe as it will run, and what follows from it."""

from __future__ import annotations

import click

from lockstep.commands import _completion
from lockstep.common.text import printable


@click.command("show")
@click.argument("recipe", shell_complete=_completion.words)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=_completion.overrides)
def command(recipe: str, overrides: tuple[str, ...]) -> None:
    """Print the configuration of RECIPE, each value with its origin, and the numbers that follow from it.

    With strategy deepspeed, what DeepSpeed is given too.

    RECIPE is a YAML file or the name of a shipped recipe. Overrides are dotted: recipe.optimizer.lr=0.1
    """
    from lockstep.config.load import load, to_yaml
    from lockstep.config.placement import FOREIGN
    from lockstep.config.shipped import shipped
    from lockstep.core.devices import in_words
    from lockstep.run.consequences import consequences

    loaded = load(recipe, overrides)
    if recipe not in shipped() or loaded.origins["recipe.model.name"] == "override":
        from lockstep.config.blame import with_places
        from lockstep.models.find import origin_of  # it imports torch

        with with_places(loaded):
            origin_of(loaded.config.recipe.model.name, loaded.config.recipe.model.source)
    for note in loaded.notes:
        click.echo(printable(f"note: {note}"), err=True)
    click.echo(to_yaml(loaded))
    for name, text in consequences(loaded.config.recipe):
        click.echo(f"{name:<15}{text}")
    placement = loaded.config.placement
    click.echo(f"{'exchange':<15}{in_words(placement.backend, placement.device)}")
    if placement.strategy.name in FOREIGN:
        from lockstep.run.foreign import handed_over_by  # it imports torch

        for name, text in handed_over_by(loaded).items():
            click.echo(f"\n{name}\n{text}", nl=False)
