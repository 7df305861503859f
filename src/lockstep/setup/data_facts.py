"""Facts about a dataset, which ranks compare before a run, and which checkpoints keep for resuming and inference."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from lockstep.errors import UsageError
from lockstep.setup.build import Setup
from lockstep.tasks.batches import targets_if_any
from lockstep.training.sample_digest import digest_ends

_CHOSEN: Final = ("mean", "std")  # facts that a recipe can set, and that are compared with the recipe


def setup_facts(ready: Setup) -> dict[str, Any]:
    """Return facts that show whether ranks have the same user code and the same data.

    The facts about the data are sizes, the facts of the dataset, and digests of the first and last sample of each
    split. For a user's dataset, the digests cover only the targets. Its inputs may be random, which `verify` checks.
    """
    own = ":" in ready.recipe.data.name
    data = ready.data
    splits = [split for split in (data.train, data.validation) if split is not None]
    return {
        "your source files": dict(ready.source),
        "data": {
            "number of samples": [len(split) for split in splits],
            **data.facts,
            "samples": [digest_ends(split, targets_if_any) if own else digest_ends(split) for split in splits],
        },
    }


def model_facts(ready: Setup) -> dict[str, Any]:
    """Return the facts about the data that the model needs for inference. A checkpoint keeps them with the weights."""
    chosen, facts = ready.recipe.data, ready.data.facts
    mean, std = chosen.mean or facts.get("mean"), chosen.std or facts.get("std")
    return {**facts, "mean": None if mean is None else list(mean), "std": None if std is None else list(std)}


def check_facts(here: Mapping[str, Any], learned: Mapping[str, Any], place: Path) -> None:
    """Raise UsageError if a checkpoint was trained on data with different facts, such as names in a different order.

    `here` are the facts of the current data. Facts that only one of the two has are ignored.
    """
    for name, before in learned.items():
        if name in here and here[name] != before and name not in _CHOSEN:
            found = _difference(before, here[name])
            raise UsageError(
                f"{place}: {name} of its training data does not match: {found}; set recipe.data.root to the data that "
                f"it was trained on"
            )


def _difference(before: Any, now: Any) -> str:
    """Return how two facts differ: the first list item that differs, or the lengths of the lists."""
    if not (isinstance(before, list) and isinstance(now, list)):
        return f"{before!r} in the checkpoint, {now!r} in this data"
    if len(before) != len(now):
        return f"{len(before)} in the checkpoint, {len(now)} in this data"
    number, (one, other) = next((n, pair) for n, pair in enumerate(zip(before, now, strict=True)) if pair[0] != pair[1])
    return f"number {number} is {one!r} in the checkpoint, {other!r} in this data"
