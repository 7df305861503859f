"""The orders of the samples of an epoch, by name. It imports nothing heavy: a recipe is checked before NumPy is."""

from __future__ import annotations

from typing import Literal

OrderName = Literal["bijection", "argsort"]  # argsort is that of version 0.1: an array of all samples
