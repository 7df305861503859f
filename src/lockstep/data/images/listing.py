"""The images below a folder, by their names alone and without torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

IMAGE_SUFFIXES: Final = frozenset({".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"})


def images(folder: str) -> Iterator[str]:
    """Yield the images below `folder` in order, by their names alone; passes over what is hidden.

    Links to folders are followed, but into no folder twice, and into none that contains `folder` itself: a link that
    leads back would give the same images again and again.
    """
    if not os.path.isdir(folder):
        return
    above = (*Path(os.path.abspath(folder)).parents, *Path(os.path.realpath(folder)).parents)
    seen = {_identity(each) for each in above}
    if not _is_new(folder, seen):
        return
    for parent, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [each for each in sorted(folders) if not hidden(each) and _is_new(f"{parent}{os.sep}{each}", seen)]
        for file in sorted(files):
            if os.path.splitext(file)[1].lower() in IMAGE_SUFFIXES and not hidden(file):
                yield f"{parent}{os.sep}{file}"


def hidden(name: str) -> bool:
    """Say whether a file or folder is one that users do not see: `._1.jpg` is no image."""
    return name.startswith(".")


def counted(folder: Path) -> int:
    """Count the images below the folders of the classes."""
    return sum(os.path.dirname(file) != str(folder) for file in images(str(folder)))


def _is_new(folder: str, seen: set[tuple[int, int]]) -> bool:
    """Say whether a folder was not seen before, and note it."""
    identity = _identity(folder)
    is_new = identity not in seen
    seen.add(identity)
    return is_new


def _identity(folder: str | Path) -> tuple[int, int]:
    found = os.stat(folder)
    return found.st_dev, found.st_ino
