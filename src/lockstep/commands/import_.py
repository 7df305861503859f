"""Turn a configuration of Distribuuuu or pycls into a recipe."""

import click


@click.command("import")
@click.argument("file", type=click.Path())
@click.argument("arguments", nargs=-1, metavar="[KEY VALUE]... [KEY=VALUE]...")
@click.option("--gpus", type=click.IntRange(min=1), help="Number of GPUs that the per-GPU batch size is meant for.")
def command(file: str, arguments: tuple[str, ...], gpus: int | None) -> None:
    """Print FILE, a YAML configuration of Distribuuuu or pycls, as a recipe and a placement.

    Comments show which key of FILE each value comes from, and why some keys have no counterpart. KEY VALUE are
    overrides in the syntax of the framework, and KEY=VALUE are overrides in the syntax of Lockstep: OPTIM.BASE_LR 6.4
    recipe.data.root=/data/imagenet

    Distribuuuu sets the batch size per GPU. A recipe sets the global batch size, for --gpus GPUs. --gpus defaults to
    the number of GPUs of this machine.
    """
    from lockstep.setup.recipe_import import import_recipe

    recipe = import_recipe(file, arguments, gpus)
    recipe.load()  # reports errors now instead of when the recipe is trained
    click.echo(recipe.to_yaml(), nl=False)
