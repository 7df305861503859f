"""The programs, by name: one file for each report."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Final

from benchmarks.zoo.program import Program

PROGRAMS: Final[dict[str, Program]] = {
    module.name: import_module(f"{__name__}.{module.name}").PROGRAM for module in iter_modules(__path__)
}
