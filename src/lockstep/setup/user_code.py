"""Finds the user's code, and the line of a function, attribute or variable in it, such as `net.py:12`.

The user's code is all code outside the Python library, installed packages and Lockstep. It also includes everything
that a recipe names by an import path.
"""

import ast
import inspect
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, Final

import numpy as np
import torch

from lockstep.common.own_code import is_installed, is_own, location
from lockstep.common.version import PACKAGE
from lockstep.config.recipe import Recipe
from lockstep.config.recorded import mixed

_BUILDING: Final = ("__init__", "__new__", "__post_init__")  # attributes set here aren't state that a forward changes
# Calls of these names, as statements, show a value to a person.
_SHOWING: Final = (
    *("print", "log", "debug", "info", "warning", "write", "add_scalar", "add_scalars"),
    *("set_postfix", "set_postfix_str", "set_description"),
)
_IN_PLACE: Final = ("append", "extend", "insert", "pop", "add", "update", "setdefault", "clear")


def import_paths(recipe: Recipe) -> dict[str, str]:
    """Return the import paths in a recipe, by section, such as `model` or `data`."""
    named = {
        "model": recipe.model.name,
        **dict(_of_data("data", recipe.data.name, recipe.data.options)),
        "loss": recipe.loss.name,
        "optimizer": recipe.optimizer.name,
        "schedule": recipe.schedule.name,
        "collate": recipe.data.collate or "",
        "task": recipe.task.name,
    }
    named |= {f"metrics.{number}": name for number, name in enumerate(recipe.metrics)}
    names = {part: name for part, name in named.items() if ":" in name}
    if recipe.model.source != "auto":  # if the source is set, a colon is part of a timm name
        names.pop("model", None)
    return names


def _of_data(section: str, name: str, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the section and name of a dataset, and of the datasets that it mixes."""
    yield section, name
    for label, source in mixed(name, options).items():
        yield from _of_data(f"{section}.options.of.{label}", source["name"], source.get("options") or {})


def own_modules(paths: Iterable[str]) -> dict[str, ModuleType]:
    """Return the imported modules of the user's code. `paths` are the import paths of a recipe."""
    packages = {path.partition(":")[0].partition(".")[0] for path in paths}
    found = {}
    for name, module in list(sys.modules.items()):
        # Some libraries put objects into sys.modules that make up attributes.
        file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
        if isinstance(file, str) and (name.partition(".")[0] in packages or is_own(file)):
            found[name] = module
    return found


def place_of(thing: object) -> str:
    """Return the first line of a function or class, or of the class of an object.

    Returns "" if the line isn't known, or if it is in a library.
    """
    found = inspect.unwrap(thing) if callable(thing) else thing
    if not (inspect.isclass(found) or inspect.isroutine(found)):
        found = type(found)
    try:
        file, (_, line) = inspect.getsourcefile(found), inspect.getsourcelines(found)
    except (TypeError, OSError):  # written in C, or typed into an interpreter
        return ""
    return location(file, line) if file and not is_librarys(file) else ""


def place_of_attribute(kind: type, name: str) -> str:
    """Return the line where methods of a class or its bases change `self.<name>`, or "" if it can't be found."""
    for each in kind.__mro__:
        file = _file(each)
        if file is None or not is_own(file):
            continue
        lines, first = inspect.getsourcelines(each)
        tree = ast.parse(textwrap.dedent("".join(lines)))
        line = _line(tree, lambda node: isinstance(node, ast.Attribute) and node.attr == name)
        if line is not None:
            return location(file, first + line - 1)
    return ""


def place_of_variable(scope: ModuleType | CodeType, name: str) -> str:
    """Return the line where functions change a global of a module, or where a function changes its local variable.

    If no such line is found, returns the first line that mentions it.
    """
    file = _file(scope)
    if file is None:
        return ""
    lines, first = inspect.getsourcelines(scope)
    tree = ast.parse(textwrap.dedent("".join(lines)))

    uses = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == name]
    line = _line(tree, lambda node: node in uses) or min((node.lineno for node in uses), default=1)
    return location(file, max(first, 1) + line - 1)


def is_carried(scope: ModuleType | CodeType, name: str) -> bool | None:
    """Return whether a loop reads a variable before assigning it, so that a value is carried between iterations.

    Returns None if no loop of this module or function assigns the variable. A tensor may still be written in place.
    """
    file = _file(scope)
    if file is None:
        return None
    lines, _ = inspect.getsourcelines(scope)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While)]
    orders = [[*_accesses(loop, name)] for loop in loops]
    assigned = [order for order in orders if any(not reads for reads, _ in order)]
    if not assigned:
        return None
    # A conditional assignment may be skipped. A read after it may then see the value of an earlier iteration.
    return any(next((reads for reads, maybe in order if reads or not maybe), False) for order in assigned)


def is_used(scope: ModuleType | CodeType, name: str) -> bool:
    """Return whether a loop or an inner function reads a variable other than to add to it, or to print or log it.

    True if that cannot be told.
    """
    file = _file(scope)
    if file is None:
        return True
    lines, _ = inspect.getsourcelines(scope)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    root = tree.body[0] if isinstance(scope, CodeType) and tree.body else tree  # the function itself, or the module
    within = ast.For, ast.AsyncFor, ast.While, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda
    return any(_uses(node, name) for node in ast.walk(root) if node is not root and isinstance(node, within))


def _uses(node: ast.AST, name: str) -> bool:
    match node:
        case ast.Name(ctx=ast.Load()):
            return node.id == name
        case ast.Expr(value=ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called))) if called in _SHOWING:
            return False
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name() as owner, attr=called)) as call) if (
            owner.id == name and called in _IN_PLACE
        ):
            return any(_uses(each, name) for each in (*call.args, *call.keywords))
        case ast.Subscript(value=ast.Name() as owner, ctx=ast.Store()) if owner.id == name:
            return _uses(node.slice, name)
    return any(_uses(each, name) for each in ast.iter_child_nodes(node))


def _accesses(node: ast.AST, name: str, maybe: bool = False) -> Iterator[tuple[bool, bool]]:
    """Yield each access to a variable in evaluation order: whether it is a read, and whether it may be skipped."""
    parts: list[ast.AST] = []
    skipped: list[ast.AST] = []  # runs only if a condition holds
    match node:
        case ast.Name():
            if node.id == name:
                yield isinstance(node.ctx, ast.Load), maybe
        case ast.AugAssign():
            if isinstance(node.target, ast.Name) and node.target.id == name:
                yield True, maybe
            parts = [node.value, node.target]
        case ast.Assign():
            parts = [node.value, *node.targets]
        case ast.AnnAssign() | ast.NamedExpr():
            parts = [each for each in (node.value, node.target) if each is not None]
        case ast.For():
            parts = [node.iter, node.target, *node.body, *node.orelse]
        case ast.If():
            parts, skipped = [node.test], [*node.body, *node.orelse]
        case ast.Try():
            skipped = [*ast.iter_child_nodes(node)]
        case _:
            parts = [*ast.iter_child_nodes(node)]
    for each in parts:
        yield from _accesses(each, name, maybe)
    for each in skipped:
        yield from _accesses(each, name, True)


def own_frames() -> Iterator[FrameType]:
    """Yield the frames of the user's functions on the call stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_locals is not frame.f_globals and is_own(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def place_of_frame(frame: FrameType | None) -> str:
    """Return the line of a frame, or of the nearest caller outside the Python library.

    Returns "" if that line is in torch, NumPy or Lockstep, since these have their own reasons.
    """
    while frame is not None and _of_python(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None or is_librarys(frame.f_code.co_filename):
        return ""
    return location(frame.f_code.co_filename, frame.f_lineno)


def is_librarys(file: str) -> bool:
    """Return whether a source file belongs to Python, torch, NumPy or Lockstep."""
    return _of_python(file) or file.startswith(_libraries())


def _line(tree: ast.AST, is_it: Callable[[ast.AST], bool]) -> int | None:
    """Return the first line in a function that changes a name, or else the first line that uses it."""
    functions = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef) and each.name not in _BUILDING]
    nodes = [node for function in functions for node in ast.walk(function)]
    lines = [(not _changes(node, is_it), node.lineno) for node in nodes if is_it(node) or _changes(node, is_it)]  # type: ignore[attr-defined]
    return min(lines)[1] if lines else None


def _changes(node: ast.AST, is_it: Callable[[ast.AST], bool]) -> bool:
    """Return whether a node assigns a name or an item of it, or calls a method that changes it in place."""
    match node:
        case ast.Attribute(ctx=ast.Store()) | ast.Name(ctx=ast.Store()):
            return is_it(node)
        case ast.Subscript(value=value, ctx=ast.Store()):
            return is_it(value)
        case ast.Attribute(value=value, attr=name):
            return is_it(value) and (name.endswith("_") or name in _IN_PLACE)
    return False


def _file(thing: type | ModuleType | CodeType) -> str | None:
    try:
        return inspect.getsourcefile(thing)
    except TypeError:  # built in
        return None


def _of_python(file: str) -> bool:
    return file.startswith(("<", *_python())) and not is_installed(file)


@cache
def _python() -> tuple[str, ...]:
    return tuple({f"{sysconfig.get_paths()[name]}/" for name in ("stdlib", "platstdlib")})


@cache
def _libraries() -> tuple[str, ...]:
    return (f"{PACKAGE}/", *(f"{Path(inspect.getfile(package)).parent}/" for package in (np, torch)))
