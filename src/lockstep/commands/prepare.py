"""Decode the images of a recipe's dataset once, so that training doesn't have to."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lockstep.commands import _completion, _recipe
from lockstep.common.text import format_bytes, printable_line
from lockstep.errors import UsageError, convert_os_error

if TYPE_CHECKING:
    from lockstep.config.load import LoadedConfig
    from lockstep.data.base import DataSet


@click.command("prepare")
@click.argument("recipe", shell_complete=_completion.complete_arguments)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=_completion.complete_overrides)
@click.option("--to", required=True, type=click.Path(path_type=Path), help="A folder that doesn't exist yet.")
@click.option(
    "--short-side", type=click.IntRange(1), help="Shrink larger images to this size. Changes the resulting weights."
)
def command(recipe: str, overrides: tuple[str, ...], to: Path, short_side: int | None) -> None:
    """Write the pixels of all images of RECIPE's dataset, and a recipe that reads them and gives the same weights.

    The pixels are stored in tar archives in WebDataset format, about ten times as large as JPEGs. The recipe is
    stored next to them as recipe.yaml.
    """
    from lockstep.config.load import load
    from lockstep.setup.build import open_recipe_data

    loaded = load(recipe, overrides)
    if os.path.lexists(to):
        raise UsageError(f"--to {to}: already exists; remove it, or use a different folder")
    data = open_recipe_data(loaded.config.recipe)
    temporary = to.with_name(f".{to.name}.{os.getpid()}.new")
    try:
        with convert_os_error(UsageError, f"--to {to}: cannot write", "; use a different folder"):
            temporary.mkdir(parents=True)
            for split_name, split in {"train": data.train, "val": data.validation}.items():
                if split is not None:
                    _write_split(split, temporary, split_name, short_side)
            (temporary / "recipe.yaml").write_text(_make_recipe_yaml(loaded, data, to.absolute()), encoding="utf-8")
            total_bytes = sum(file.stat().st_size for file in temporary.iterdir())
            temporary.rename(to)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    click.echo(printable_line(f"{format_bytes(total_bytes)} in {to}"))
    click.echo(printable_line(f"next        lockstep train {to / 'recipe.yaml'}"))


def _write_split(split: object, folder: Path, split_name: str, short_side: int | None) -> None:
    from lockstep.data.images.lazy_images import ImageSplit
    from lockstep.data.images.prepare import write_archives

    if not isinstance(split, ImageSplit):
        raise UsageError("recipe.data.name: samples are not image files; lockstep prepare requires a dataset of images")
    for count in write_archives(split, folder, split_name, short_side):
        _recipe.print_every_tenth(count, len(split), f"{split_name}: {count:,} of {len(split):,} images")


def _make_recipe_yaml(loaded: LoadedConfig, data: DataSet, root: Path) -> str:
    """Return the configuration as YAML, changed to read the dataset from `root`."""
    from lockstep.config.base import section_to_dict
    from lockstep.config.document import format_key
    from lockstep.config.write import format_block, iterate_leaves

    options = {"classes": data.facts["classes"], **({} if data.validation else {"validation": 0.0})}
    data_config = {"name": "webdataset", "root": str(root), "options": options}
    config = section_to_dict(loaded.config)
    config["recipe"]["data"] |= data_config
    origins = {format_key(path): "lockstep prepare" for path, _ in iterate_leaves(data_config, ("recipe", "data"))}
    return "\n".join(format_block(config, {**loaded.origins, **origins})) + "\n"
