"""Hashes of the source files of user code. A recipe only contains import paths, so the source is recorded separately.

Import statements are parsed, not executed, so the result doesn't depend on modules that are already imported. Imports
by other means, such as importlib, aren't found.
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

_HASH_DIGITS: Final = 16  # digits of a hash, which are enough to avoid collisions
_MAX_NAMED: Final = 10


def source_digests(paths: Iterable[str]) -> dict[str, str]:
    """Return a hash of each user source file that the import paths refer to, directly or through imports.

    Files are named relative to the folder from which they are imported, so that the folder can be moved.
    """
    digests: dict[str, str] = {}
    queue = [name for path in paths for name in _with_packages(path.partition(":")[0])]
    visited: set[str] = set()
    while queue:
        name = queue.pop()
        if name in visited:
            continue
        visited.add(name)
        spec = _spec(name)
        file = spec.origin if spec is not None and spec.has_location else None
        if spec is None or file is None or not is_own(file):
            continue
        try:
            content = Path(file).read_bytes()
        except OSError:  # the file was removed after the import, or is in an archive
            continue
        digests[_relative_file(name, spec, file)] = hashlib.sha256(content).hexdigest()[:_HASH_DIGITS]
        queue += [imported for imported in _imports(content, spec) if _may_be_own(imported)]
    return dict(sorted(digests.items()))


def script_digests() -> dict[str, str]:
    """Return the hashes of the script that this process runs and of its imports, or {} if it isn't user code."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    if not isinstance(file, str) or not is_own(file):
        return {}
    try:
        content = Path(file).read_bytes()
    except OSError:  # the file was removed after the process started
        return {}
    names = [name for name in _imports(content, ModuleSpec("__main__", None)) if _may_be_own(name)]
    return {Path(file).name: hashlib.sha256(content).hexdigest()[:_HASH_DIGITS], **source_digests(names)}


def source_changes(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Return the changed files as text, such as `nets.py, blocks.py (new), old.py (gone)`, or an empty string."""
    names = [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
    changed = [
        f"{name}{'' if name in before and name in after else ' (new)' if name in after else ' (gone)'}"
        for name in names
    ]
    return list_some(changed, _MAX_NAMED)


def _with_packages(name: str) -> list[str]:
    """Return the name of a module and the names of its parent packages."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def _imports(content: bytes, spec: ModuleSpec) -> Iterator[str]:
    """Yield the names of all modules that the import statements of a file may refer to, at any nesting level."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):  # e.g. a compiled file
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _with_packages(alias.name)
        elif isinstance(node, ast.ImportFrom):
            try:
                base = importlib.util.resolve_name("." * node.level + (node.module or ""), spec.parent)
            except ImportError:  # a relative import beyond the top-level package
                continue
            yield from _with_packages(base)
            yield from (f"{base}.{alias.name}" for alias in node.names if alias.name != "*")


def _may_be_own(name: str) -> bool:
    """Return whether the top-level package is user code. Used to skip installed packages."""
    spec = _spec(name.partition(".")[0])
    if spec is None:
        return False
    places = [*(spec.submodule_search_locations or ()), *([spec.origin] if spec.has_location and spec.origin else ())]
    return any(is_own(f"{folder}/") for folder in places)


def _spec(name: str) -> ModuleSpec | None:
    """Return the spec of an imported module, or the spec that an import would load. Doesn't import the module."""
    module = sys.modules.get(name)
    if isinstance(module, ModuleType) and isinstance(vars(module).get("__spec__"), ModuleSpec):
        return module.__spec__
    parent, _, _ = name.rpartition(".")
    if not parent:
        try:
            return importlib.util.find_spec(name)
        except (ValueError, ImportError):  # the entry in sys.modules isn't a regular module
            return None
    parent_spec = _spec(parent)
    if parent_spec is None or parent_spec.submodule_search_locations is None:
        return None
    return PathFinder.find_spec(name, list(parent_spec.submodule_search_locations))


def _relative_file(name: str, spec: ModuleSpec, file: str) -> str:
    path = PurePosixPath(*name.split("."))
    is_package = spec.submodule_search_locations is not None
    return str(path / Path(file).name if is_package else path.with_name(Path(file).name))
