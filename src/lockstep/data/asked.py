"""What a recipe asks of a data set, as its source gets it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

OnError = Literal["raise", "skip"]


@dataclass(frozen=True)
class ImageWords:
    """What is asked of images, in the words of the configuration."""

    image_size: int | None = None
    resize_size: int | None = None
    resized_crop: bool = False
    resized_crop_scale: tuple[float, float] = (0.08, 1.0)
    exif: bool = True


@dataclass(frozen=True)
class Asked:
    """A data set's name and location, and what is to be done to its samples."""

    name: str
    root: str = "data"
    download: bool = True
    on_error: OnError = "raise"
    images: ImageWords = ImageWords()
    options: Mapping[str, Any] = field(default_factory=dict)
    collate: str | None = None  # the import path of a function


def asked_by(data: Mapping[str, Any]) -> Asked:
    """Return what a recipe's section `data`, as plain values, asks for; keys that are left out are not among them."""
    images = {name: data[name] for name in ("image_size", "resize_size", "exif") if name in data}
    low, high = data["augment"]["resized_crop_scale"]
    return Asked(
        name=data["name"],
        root=data["root"],
        download=data["download"],
        on_error=data["on_error"],
        images=ImageWords(**images, resized_crop=data["augment"]["resized_crop"], resized_crop_scale=(low, high)),
        options=data["options"],
        collate=data.get("collate"),
    )
