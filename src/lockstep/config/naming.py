"""Removes values from a configuration that an override makes obsolete.

If an override selects a different model, dataset or optimizer, the options of the previous model, dataset or optimizer
are removed. If an override sets one of two alternative keys, such as `epochs` and `steps`, the other key is removed.
"""

from collections.abc import Iterator
from typing import Any, Final

from lockstep.config.document import UNREADABLE, Document, Path, format_key
from lockstep.config.overrides import OVERRIDE, remove_positions
from lockstep.config.wording import get_field
from lockstep.config.write import format_flow, iterate_leaves

# Maps sections with a `name` to the keys that are kept if an override changes the name.
_KEPT_KEYS: Final[dict[Path, tuple[Path, ...]]] = {
    ("recipe", "task"): (),
    ("recipe", "model"): (),
    ("recipe", "data"): (("download",), ("augment", "crop_padding"), ("augment", "flip")),
    ("recipe", "optimizer"): (
        *(("lr",), ("weight_decay",), ("decay_bias_and_norm",)),
        *(("groups",), ("layer_decay",)),
    ),
    ("recipe", "schedule"): (("each",), ("warmup_epochs",), ("warmup_steps",), ("warmup_factor",), ("min_lr",)),
    ("recipe", "loss"): (),
    ("placement", "strategy"): (),
}
# Pairs of mutually exclusive keys.
_ALTERNATIVES: Final[tuple[tuple[Path, Path], ...]] = (
    (("recipe", "epochs"), ("recipe", "steps")),
    (("recipe", "microbatch"), ("recipe", "microbatches")),
    (("recipe", "schedule", "warmup_epochs"), ("recipe", "schedule", "warmup_steps")),
    (("run", "save_every", "epochs"), ("run", "save_every", "steps")),
    (("run", "evaluate_every", "epochs"), ("run", "evaluate_every", "steps")),
)


def drop_obsolete_values(before: Document, after: Document) -> list[str]:
    """Remove from `after` all values that overrides have made obsolete, and return a note about each removal.

    `before` is the document without overrides, and `after` is the document with overrides. Values that are set by
    overrides are kept, regardless of the order of the overrides.
    """
    notes = []
    for section, kept_keys in _KEPT_KEYS.items():
        old_name, new_name = _get_section_name(before, section), _get_section_name(after, section)
        if not isinstance(old_name, str) or new_name is UNREADABLE:
            continue
        if new_name == old_name and not _changes_source(before, after, section):
            continue
        name_dependent = list(_find_name_dependent_values(after, section, kept_keys))
        dropped = [
            f"{format_key(path[len(section) :])}={format_flow(value)[:60]} ({after.positions[path]})"
            for path, value in name_dependent
            if value not in (_get_default(path), {})
        ]
        if dropped:
            names = (
                f"{format_flow(new_name)} instead of {format_flow(old_name)}"
                if new_name != old_name
                else f"{format_flow(new_name)} from a different source"
            )
            notes.append(f"{format_key(section)} is {names}; dropped the previous settings: {', '.join(dropped)}")
        for path, _ in name_dependent:
            _remove_value(after, path)
    return [*notes, *_drop_alternatives(after)]


def _drop_alternatives(document: Document) -> Iterator[str]:
    """Remove each key in the file whose alternative is set by an override. Yield a note for each removal."""
    for pair in _ALTERNATIVES:
        for key, alternative in (pair, pair[::-1]):
            override_value, value = _get_value(document, key), _get_value(document, alternative)
            if None in (override_value, value) or document.positions.get(key) != OVERRIDE:
                continue
            if (position := document.positions[alternative]) != OVERRIDE:
                del _get_value(document, alternative[:-1])[alternative[-1]]
                yield f"{format_key(key)} replaces {format_key(alternative)}={format_flow(value)[:60]} ({position})"


def _get_section_name(document: Document, section: Path) -> Any:
    """Return the name that is set by the key `name` of a section or by a bare value, or the default name."""
    value = _get_value(document, section)
    name = value.get("name") if isinstance(value, dict) else value
    return _get_default((*section, "name")) if name is None else name


def _changes_source(before: Document, after: Document, section: Path) -> bool:
    """Return whether an override changes the `source` of a section, which changes the meaning of its `name`."""
    old_source, new_source = _get_value(before, (*section, "source")), _get_value(after, (*section, "source"))
    return old_source != new_source and new_source is not None


def _get_default(path: Path) -> Any:
    field = get_field(path)
    default = field.default if field else None
    return list(default) if isinstance(default, tuple) else default


def _find_name_dependent_values(
    document: Document, section: Path, kept_keys: tuple[Path, ...]
) -> Iterator[tuple[Path, Any]]:
    """Yield the path and value of each key that the file sets in a section, except for `kept_keys`."""
    value = _get_value(document, section)
    for inner, leaf in iterate_leaves(value) if isinstance(value, dict) else ():
        is_kept = inner == ("name",) or any(inner[: len(prefix)] == prefix for prefix in kept_keys)
        if not is_kept and document.positions.get((*section, *inner)) != OVERRIDE:
            yield (*section, *inner), leaf


def _remove_value(document: Document, path: Path) -> None:
    """Remove a value, and all enclosing mappings that become empty."""
    while len(path) > 2:
        parent = _get_value(document, path[:-1])
        del parent[path[-1]]
        remove_positions(document, path)
        path = path[:-1]
        if parent:
            return


def _get_value(document: Document, path: Path) -> Any:
    value: Any = document.values
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value
