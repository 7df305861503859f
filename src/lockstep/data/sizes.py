"""How many training samples a data set has, known without torch and without reading one of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from lockstep.data.images.listing import counted
from lockstep.data.images.words import SYNTHETIC

KNOWN: Final[Mapping[str, int]] = {
    "digits": 1437,
    "cifar10": 50_000,
    "cifar100": 50_000,
    "mnist": 60_000,
    "fashion_mnist": 60_000,
    "mnist1d": 4000,
}


def training_samples(name: str, root: str, options: Mapping[str, Any]) -> int | None:
    """Return the number of training samples; None where only the data itself has it."""
    if name == "synthetic":
        samples = options.get("samples", SYNTHETIC["samples"])
        return samples if isinstance(samples, int) else None
    if name == "folder":
        if options.get("validation"):  # a share of them, which is counted when they are opened
            return None
        return counted(Path(root) / "train") or None
    return KNOWN.get(name)
