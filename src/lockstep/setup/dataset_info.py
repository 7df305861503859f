"""Dataset properties: those that must be the same on all ranks, and those that checkpoints store."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from lockstep.errors import UsageError
from lockstep.setup.build import Setup
from lockstep.tasks.batches import get_targets_or_batch
from lockstep.training.sample_digest import digest_end_samples

# The recipe can set these properties, so they are compared as part of the recipe.
_RECIPE_PROPERTIES: Final = ("mean", "std")


def collect_values_to_compare(setup: Setup) -> dict[str, Any]:
    """Return the values that ranks compare before a run: hashes of the user's source files, and dataset properties.

    The properties include the number of samples, and digests of the first and the last sample of each split. For a
    custom dataset, the digests only cover the targets, because the inputs may be random. `lockstep verify` compares the
    inputs.
    """
    is_custom = ":" in setup.recipe.data.name
    data = setup.data
    splits = [split for split in (data.train, data.validation) if split is not None]
    return {
        "your source files": dict(setup.source_hashes),
        "data": {
            "number of samples": [len(split) for split in splits],
            **data.facts,
            "samples": [
                digest_end_samples(split, get_targets_or_batch) if is_custom else digest_end_samples(split)
                for split in splits
            ],
        },
    }


def make_dataset_info(setup: Setup) -> dict[str, Any]:
    """Return the dataset properties that checkpoints store with the weights, because inference needs them."""
    config, facts = setup.recipe.data, setup.data.facts
    mean, std = config.mean or facts.get("mean"), config.std or facts.get("std")
    return {**facts, "mean": None if mean is None else list(mean), "std": None if std is None else list(std)}


def check_dataset_info(current: Mapping[str, Any], saved: Mapping[str, Any], path: Path) -> None:
    """Raise UsageError if the dataset differs from that of a checkpoint, for example in the order of its class names.

    `current` contains the properties of the dataset, and `saved` the properties in the checkpoint at `path`. Properties
    that are missing from one of the two are ignored.
    """
    for name, before in saved.items():
        if name in current and current[name] != before and name not in _RECIPE_PROPERTIES:
            difference = _describe_difference(before, current[name])
            raise UsageError(
                f"{path}: {name} of the dataset does not match: {difference}; set recipe.data.root to the data that "
                f"this checkpoint was trained on"
            )


def _describe_difference(saved: Any, current: Any) -> str:
    """Return a description of how two values differ. For lists, describe the lengths or the first differing items."""
    if not (isinstance(saved, list) and isinstance(current, list)):
        return f"{saved!r} in the checkpoint, {current!r} in this data"
    if len(saved) != len(current):
        return f"{len(saved)} in the checkpoint, {len(current)} in this data"
    index, (saved_item, current_item) = next(
        (n, pair) for n, pair in enumerate(zip(saved, current, strict=True)) if pair[0] != pair[1]
    )
    return f"item {index} is {saved_item!r} in the checkpoint, {current_item!r} in this data"
