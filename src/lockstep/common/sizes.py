"""Sizes of memory and files, in words."""

from __future__ import annotations

from typing import Final

GIB: Final = 1 << 30


def size_in_words(count: int) -> str:
    """Give a number of bytes in GiB, MiB or KiB, the largest of which it is one."""
    if count >= GIB:
        return f"{count / GIB:,.1f} GiB"
    mib = count / (1 << 20)
    return f"{mib:,.0f} MiB" if mib >= 1 else f"{count / 1024:,.0f} KiB"
