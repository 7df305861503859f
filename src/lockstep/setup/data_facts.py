"""Dataset properties: those that must be the same on all ranks, and those that checkpoints store."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from lockstep.errors import UsageError
from lockstep.setup.build import Setup
from lockstep.tasks.batches import targets_or_batch
from lockstep.training.sample_digest import digest_ends

# The recipe can set these properties, so they are compared as part of the recipe.
_RECIPE_FACTS: Final = ("mean", "std")


def collect_comparison_facts(ready: Setup) -> dict[str, Any]:
    """Return the values that ranks compare before a run: hashes of the user's source files, and dataset properties.

    The properties include the number of samples, and digests of the first and the last sample of each split. For a
    custom dataset, the digests only cover the targets, because the inputs may be random. `lockstep verify` compares the
    inputs.
    """
    is_custom = ":" in ready.recipe.data.name
    data = ready.data
    splits = [split for split in (data.train, data.validation) if split is not None]
    return {
        "your source files": dict(ready.source),
        "data": {
            "number of samples": [len(split) for split in splits],
            **data.facts,
            "samples": [digest_ends(split, targets_or_batch) if is_custom else digest_ends(split) for split in splits],
        },
    }


def model_facts(ready: Setup) -> dict[str, Any]:
    """Return the dataset properties that checkpoints store with the weights, because inference needs them."""
    config, facts = ready.recipe.data, ready.data.facts
    mean, std = config.mean or facts.get("mean"), config.std or facts.get("std")
    return {**facts, "mean": None if mean is None else list(mean), "std": None if std is None else list(std)}


def check_facts(current: Mapping[str, Any], saved: Mapping[str, Any], path: Path) -> None:
    """Raise UsageError if the dataset differs from that of a checkpoint, for example in the order of its class names.

    `current` contains the properties of the dataset, and `saved` the properties in the checkpoint at `path`. Properties
    that are missing from one of the two are ignored.
    """
    for name, before in saved.items():
        if name in current and current[name] != before and name not in _RECIPE_FACTS:
            difference = _difference(before, current[name])
            raise UsageError(
                f"{path}: {name} of the dataset does not match: {difference}; set recipe.data.root to the data that "
                f"this checkpoint was trained on"
            )


def _difference(before: Any, current: Any) -> str:
    """Return a description of how two values differ. For lists, describe the lengths or the first differing items."""
    if not (isinstance(before, list) and isinstance(current, list)):
        return f"{before!r} in the checkpoint, {current!r} in this data"
    if len(before) != len(current):
        return f"{len(before)} in the checkpoint, {len(current)} in this data"
    index, (saved_item, current_item) = next(
        (n, pair) for n, pair in enumerate(zip(before, current, strict=True)) if pair[0] != pair[1]
    )
    return f"number {index} is {saved_item!r} in the checkpoint, {current_item!r} in this data"
