"""How many training samples a data set has, known without torch and without reading one of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

KNOWN: Final[Mapping[str, int]] = {
    "digits": 1437,
    "cifar10": 50_000,
    "cifar100": 50_000,
    "mnist": 60_000,
    "fashion_mnist": 60_000,
}
IMAGE_SUFFIXES: Final = frozenset({".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"})


def training_samples(name: str, root: str, options: Mapping[str, Any]) -> int | None:
    """Return the number of training samples; None where only the data itself can tell."""
    if name == "synthetic":
        samples = options.get("samples")
        return samples if isinstance(samples, int) else None
    if name == "folder":
        return _images(Path(root) / "train") or None
    return KNOWN.get(name)


def _images(folder: Path) -> int:
    """Count the images below the folders of the classes, by their names alone."""
    return sum(
        os.path.splitext(file)[1].lower() in IMAGE_SUFFIXES
        for parent, _, files in os.walk(folder, followlinks=True)
        if Path(parent) != folder
        for file in files
    )
