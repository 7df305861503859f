"""Turn a configuration of Distribuuuu or pycls into a recipe."""

import click


@click.command("import")
@click.argument("file", type=click.Path())
@click.argument("words", nargs=-1, metavar="[KEY VALUE]... [KEY=VALUE]...")
@click.option("--gpus", type=click.IntRange(min=1), help="The number of GPUs that a batch for each is meant for.")
def command(file: str, words: tuple[str, ...], gpus: int | None) -> None:
    """Print FILE, a YAML of Distribuuuu or pycls, as a recipe and a placement.

    Comments say which of its keys each value is from, and why others have no counterpart. KEY VALUE are overrides as
    its framework takes them, and KEY=VALUE ours: OPTIM.BASE_LR 6.4 recipe.data.root=/data/imagenet

    Distribuuuu gives the batch of a GPU. A recipe has the whole one, for --gpus of them: as many as this machine has,
    if left out.
    """
    from lockstep.setup.recipe_import import import_recipe

    found = import_recipe(file, words, gpus)
    found.load()  # what is wrong with it is reported here, not by its first training
    click.echo(found.to_yaml(), nl=False)
