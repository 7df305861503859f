"""The machine of a run in a line, as its environment.json says: what stands beside figures. Quick: no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from lockstep.common import plainfile
from lockstep.common.text import printable_line

_FILE: Final = "environment.json"
_LARGEST: Final = 1 << 20  # bytes
_LONGEST: Final = 200  # characters


def machine_of(folder: Path) -> str:
    """Return cores, GPUs and versions in words; empty where the file cannot be read."""
    try:
        found = plainfile.parsed(plainfile.content(folder / _FILE, _LARGEST))
    except (OSError, ValueError):
        return ""
    cpu, packages = _at(found, "cpu"), _at(found, "packages")
    gpus = found.get("gpus") if isinstance(found, dict) else None
    cards = [str(_at(gpu).get("name")) for gpu in gpus] if isinstance(gpus, list) else []
    words = [f"{cpu.get('cores_usable')} cores of {cpu.get('model')}"] if cpu else []
    words += [f"{cards.count(card)} {card}" for card in dict.fromkeys(cards)]
    words += [f"{name} {packages[name]}" for name in ("torch",) if packages.get(name)]
    return printable_line(", ".join(words))[:_LONGEST]


def _at(value: Any, *keys: str) -> dict[str, Any]:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}
