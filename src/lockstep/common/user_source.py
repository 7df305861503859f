"""Hashes of user source files. A recipe contains only import paths, so a run also records the hashes of the source.

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

from lockstep.common.patterns import list_some
from lockstep.common.user_code import is_user_code

_HASH_DIGITS: Final = 16  # number of hex digits to keep of each hash; enough to avoid collisions
_MAX_NAMED: Final = 10


def hash_sources(paths: Iterable[str]) -> dict[str, str]:
    """Return the hash of each user source file that the import paths refer to, directly or through further imports.

    The keys are paths relative to the folder from which a file is imported, so the folder can be moved.
    """
    digests: dict[str, str] = {}
    queue = [name for path in paths for name in _list_module_and_parents(path.partition(":")[0])]
    visited: set[str] = set()
    while queue:
        name = queue.pop()
        if name in visited:
            continue
        visited.add(name)
        spec = _find_spec(name)
        file = spec.origin if spec is not None and spec.has_location else None
        if spec is None or file is None or not is_user_code(file):
            continue
        try:
            content = Path(file).read_bytes()
        except OSError:  # the file was removed after the import, or is in an archive
            continue
        digests[_make_relative_path(name, spec, file)] = hashlib.sha256(content).hexdigest()[:_HASH_DIGITS]
        queue += [imported for imported in _find_imports(content, spec) if _may_be_user_code(imported)]
    return dict(sorted(digests.items()))


def hash_script() -> dict[str, str]:
    """Return the hashes of the running script and of its imports, or {} if the script isn't user code."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    if not isinstance(file, str) or not is_user_code(file):
        return {}
    try:
        content = Path(file).read_bytes()
    except OSError:  # the file was removed after the process started
        return {}
    names = [name for name in _find_imports(content, ModuleSpec("__main__", None)) if _may_be_user_code(name)]
    return {Path(file).name: hashlib.sha256(content).hexdigest()[:_HASH_DIGITS], **hash_sources(names)}


def describe_source_changes(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Describe the changed files, such as `nets.py, blocks.py (new), old.py (gone)`. Returns "" if nothing changed."""
    names = [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
    changed = [
        f"{name}{'' if name in before and name in after else ' (new)' if name in after else ' (gone)'}"
        for name in names
    ]
    return list_some(changed, _MAX_NAMED)


def _list_module_and_parents(name: str) -> list[str]:
    """Return the names of a module's parent packages and of the module itself, such as `a`, `a.b` and `a.b.c`."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def _find_imports(content: bytes, spec: ModuleSpec) -> Iterator[str]:
    """Yield the names of all modules that the import statements of a file may refer to. Includes nested statements."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):  # e.g. a compiled file
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _list_module_and_parents(alias.name)
        elif isinstance(node, ast.ImportFrom):
            try:
                base = importlib.util.resolve_name("." * node.level + (node.module or ""), spec.parent)
            except ImportError:  # a relative import beyond the top-level package
                continue
            yield from _list_module_and_parents(base)
            yield from (f"{base}.{alias.name}" for alias in node.names if alias.name != "*")


def _may_be_user_code(name: str) -> bool:
    """Return whether the top-level package of a module may be user code. Used to skip installed packages."""
    spec = _find_spec(name.partition(".")[0])
    if spec is None:
        return False
    locations = [
        *(spec.submodule_search_locations or ()),
        *([spec.origin] if spec.has_location and spec.origin else ()),
    ]
    return any(is_user_code(f"{folder}/") for folder in locations)


def _find_spec(name: str) -> ModuleSpec | None:
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
    parent_spec = _find_spec(parent)
    if parent_spec is None or parent_spec.submodule_search_locations is None:
        return None
    return PathFinder.find_spec(name, list(parent_spec.submodule_search_locations))


def _make_relative_path(module_name: str, spec: ModuleSpec, file: str) -> str:
    path = PurePosixPath(*module_name.split("."))
    is_package = spec.submodule_search_locations is not None
    return str(path / Path(file).name if is_package else path.with_name(Path(file).name))
