"""The source of the user's own code, file by file: it is part of the recipe, though the recipe only names it.

Import statements are read, not followed: what is found does not depend on what happens to be imported already. So
what code imports by other means, such as importlib, is not seen.
"""

import ast
import hashlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Final

from lockstep.common.own_code import is_own
from lockstep.common.patterns import list_some

_DIGITS: Final = 16  # of a hash, of which no two are alike by chance
_NAMED: Final = 10


def source_digests(paths: Iterable[str]) -> dict[str, str]:
    """Return a hash of each file of the user's that the import paths lead to, directly or from one of these files.

    A file is named as it lies below the folder that it is imported from, so that the folder may be another one.
    """
    found: dict[str, str] = {}
    waiting = [name for path in paths for name in _with_packages(path.partition(":")[0])]
    met: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in met:
            continue
        met.add(name)
        spec = _spec(name)
        file = spec.origin if spec is not None and spec.has_location else None
        if spec is None or file is None or not is_own(file):
            continue
        try:
            content = Path(file).read_bytes()
        except OSError:  # gone since it was imported, or in an archive
            continue
        found[_below_root(name, spec, file)] = hashlib.sha256(content).hexdigest()[:_DIGITS]
        waiting += [each for each in _imports(content, spec) if _may_be_own(each)]
    return dict(sorted(found.items()))


def script_digests() -> dict[str, str]:
    """Return the same for the script that this process runs; empty where it runs none of the user's."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    if not isinstance(file, str) or not is_own(file):
        return {}
    try:
        content = Path(file).read_bytes()
    except OSError:  # gone since
        return {}
    names = [name for name in _imports(content, ModuleSpec("__main__", None)) if _may_be_own(name)]
    return {Path(file).name: hashlib.sha256(content).hexdigest()[:_DIGITS], **source_digests(names)}


def source_changes(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Name the files that differ: `nets.py, blocks.py (new), old.py (gone)`; "" where none does."""
    names = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    changed = [
        f"{name}{'' if name in before and name in now else ' (new)' if name in now else ' (gone)'}" for name in names
    ]
    return list_some(changed, _NAMED)


def _with_packages(name: str) -> list[str]:
    """Return a module's name and those of the packages that it is imported through."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def _imports(content: bytes, spec: ModuleSpec) -> Iterator[str]:
    """Yield the names of all modules that a file's import statements may mean, wherever in it they stand."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):  # compiled
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _with_packages(alias.name)
        elif isinstance(node, ast.ImportFrom):
            try:
                base = importlib.util.resolve_name("." * node.level + (node.module or ""), spec.parent)
            except ImportError:  # beyond the package
                continue
            yield from _with_packages(base)
            yield from (f"{base}.{alias.name}" for alias in node.names if alias.name != "*")


def _may_be_own(name: str) -> bool:
    """Return whether the package at the top is the user's, so that what is installed is not looked through."""
    spec = _spec(name.partition(".")[0])
    if spec is None:
        return False
    places = [*(spec.submodule_search_locations or ()), *([spec.origin] if spec.has_location and spec.origin else ())]
    return any(is_own(f"{place}/") for place in places)


def _spec(name: str) -> ModuleSpec | None:
    """Return what the import of a module would load, or has loaded, without loading anything."""
    module = sys.modules.get(name)
    if isinstance(module, ModuleType) and isinstance(vars(module).get("__spec__"), ModuleSpec):
        return module.__spec__
    parent, _, _ = name.rpartition(".")
    if not parent:
        try:
            return importlib.util.find_spec(name)
        except (ValueError, ImportError):  # what stands in sys.modules is no usual module
            return None
    above = _spec(parent)
    if above is None or above.submodule_search_locations is None:
        return None
    return PathFinder.find_spec(name, list(above.submodule_search_locations))


def _below_root(name: str, spec: ModuleSpec, file: str) -> str:
    path = PurePosixPath(*name.split("."))
    is_package = spec.submodule_search_locations is not None
    return str(path / Path(file).name if is_package else path.with_name(Path(file).name))
