"""What task and model must know of data with classes: a data set's `facts`, which a checkpoint keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def facts(
    classes: Sequence[str],
    shape: Sequence[int],
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> dict[str, Any]:
    """Return the names of the classes by their numbers and the shape of a sample as the model sees it.

    For images also mean and std of each channel, of values in [0, 1].
    """
    return {
        "classes": list(classes),
        "shape": list(shape),
        "mean": None if mean is None else list(mean),
        "std": None if std is None else list(std),
    }
