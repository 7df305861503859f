"""Shell completion of recipes, configuration keys and values. To be fast, this module doesn't import torch.

bash passes `key=value` as three arguments, and zsh and fish pass it as a single argument.
"""

import os
from collections.abc import Iterator, Sequence
from typing import Final, get_args

import click
from click.shell_completion import CompletionItem

# Common values of keys whose complete list of values would require slow imports.
_COMMON_VALUES: Final = {
    "recipe.model": ("digits_convnet", "botnet50", "resnet18", "resnet50"),
    "recipe.optimizer": ("sgd", "adamw", "lars", "lamb"),
    "recipe.loss": ("cross_entropy",),
}
_PATH_KEYS: Final = ("run.dir", "run.resume", "recipe.data.root")


def complete_file_first(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete files and folders in the first argument, and KEY=VALUE in all following arguments."""
    if ctx.params.get(param.name or ""):
        return complete_overrides(ctx, param, incomplete)
    return click.Path().shell_complete(ctx, param, incomplete)


def complete_arguments(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete [RECIPE] [KEY=VALUE]..."""
    items = complete_overrides(ctx, param, incomplete)
    if ctx.params.get(param.name or "") or "=" in incomplete:
        return items
    from lockstep.config.shipped import list_shipped_recipes

    # The item of type `file` makes the shell add file names to the completions. It must come first.
    recipes = [CompletionItem(name) for name in list_shipped_recipes() if name.startswith(incomplete)]
    return [CompletionItem(incomplete, type="file"), *recipes, *(items if incomplete else ())]


def complete_overrides(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete KEY=VALUE."""
    typed = list(ctx.params.get(param.name or "") or ()) if param.nargs == -1 else []
    key, equals, prefix = incomplete.partition("=")
    if equals:
        return [CompletionItem(f"{key}={value}") for value in _list_values(key, prefix)]
    keys = list(_iter_keys())
    if typed[1:] and typed[-1] == "=":
        return [CompletionItem(value) for value in _list_values(typed[-2], incomplete)]
    if typed and typed[-1] in keys and not incomplete:  # the cursor is directly after the =
        return [CompletionItem(value) for value in _list_values(typed[-1], "")]
    return [CompletionItem(f"{name}=") for name in keys if name.startswith(incomplete)]


def _iter_keys(path: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the keys below the section at `path` that take a value, including sections that can be set to a name."""
    from lockstep.config.overrides import SHORTHAND_KEYS
    from lockstep.config.wording import get_section_class

    section = get_section_class(path)
    for name in section.model_fields if section else ():
        subpath = (*path, name)
        if get_section_class(subpath) is None or subpath in SHORTHAND_KEYS:
            yield ".".join(subpath)
        yield from _iter_keys(subpath)


def _list_values(key: str, prefix: str) -> list[str]:
    """Return the values of a key that start with `prefix`. Return [] if its values can't be listed."""
    if key in _PATH_KEYS:
        return list(_iter_paths(prefix))
    return [value for value in _list_choices(key.removesuffix(".name")) if value.startswith(prefix)]


def _list_choices(key: str) -> Sequence[str]:
    from lockstep.config.placement import FASTEST
    from lockstep.config.wording import get_field, get_section_class
    from lockstep.strategies import list_strategy_names

    if key in _COMMON_VALUES:
        return _COMMON_VALUES[key]
    if key == "recipe.data":
        from lockstep.data.sources import SOURCES

        return [*SOURCES]
    if key == "placement.strategy":
        return ["auto", FASTEST, *list_strategy_names()]
    path = tuple(key.split(".")) + (("name",) if get_section_class(tuple(key.split("."))) else ())
    field = get_field(path)
    annotation = field.annotation if field else None
    if annotation is bool or bool in get_args(annotation):
        return ["true", "false"]
    parts = (annotation, *get_args(annotation))  # the annotation may be a union of literal names and an import path
    return [value for part in parts for value in get_args(part) if isinstance(value, str)]


def _iter_paths(prefix: str) -> Iterator[str]:
    folder, slash, name = prefix.rpartition("/")
    try:
        entries = sorted(os.scandir(f"{folder}{slash}" or "."), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith(name) and (name or not entry.name.startswith(".")):
            yield f"{folder}{slash}{entry.name}{'/' if entry.is_dir() else ''}"
