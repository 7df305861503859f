"""Identifies user code, and finds the source lines of its functions, attributes and variables, such as `net.py:12`.

User code is all code outside the Python standard library, installed packages and Lockstep. It also includes all modules
that a recipe references by an import path.
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

from lockstep.common.user_code import format_location, is_installed, is_user_code
from lockstep.common.version import PACKAGE
from lockstep.config.recipe import Recipe
from lockstep.config.recorded import get_mixture_sources

# An attribute that is only set in these methods isn't changed by a forward pass.
_CONSTRUCTORS: Final = ("__init__", "__new__", "__post_init__")
# A statement that only calls one of these functions displays its arguments, and has no other effect on training.
_DISPLAY_FUNCTIONS: Final = (
    *("print", "log", "debug", "info", "warning", "write", "add_scalar", "add_scalars"),
    *("set_postfix", "set_postfix_str", "set_description"),
)
_IN_PLACE_METHODS: Final = ("append", "extend", "insert", "pop", "add", "update", "setdefault", "clear")


def get_import_paths(recipe: Recipe) -> dict[str, str]:
    """Return the import paths of user code in a recipe, by section such as `model` or `data`."""
    all_names = {
        "model": recipe.model.name,
        **dict(_iterate_dataset_names("data", recipe.data.name, recipe.data.options)),
        "loss": recipe.loss.name,
        "optimizer": recipe.optimizer.name,
        "schedule": recipe.schedule.name,
        "collate": recipe.data.collate or "",
        "task": recipe.task.name,
    }
    all_names |= {f"metrics.{index}": name for index, name in enumerate(recipe.metrics)}
    names = {part: name for part, name in all_names.items() if ":" in name}
    if recipe.model.source != "auto":  # with an explicit source, a colon is part of a timm model name
        names.pop("model", None)
    return names


def _iterate_dataset_names(section: str, name: str, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the section and the name of a dataset. If it is a mixture, also yield those of all its datasets."""
    yield section, name
    for label, source in get_mixture_sources(name, options).items():
        yield from _iterate_dataset_names(f"{section}.options.of.{label}", source["name"], source.get("options") or {})


def get_user_modules(paths: Iterable[str]) -> dict[str, ModuleType]:
    """Return the imported modules that belong to the user's code. `paths` are the import paths of a recipe."""
    packages = {path.partition(":")[0].partition(".")[0] for path in paths}
    modules = {}
    for name, module in list(sys.modules.items()):
        # Read `__file__` from `vars`, because some objects in sys.modules have a value for any attribute name.
        file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
        if isinstance(file, str) and (name.partition(".")[0] in packages or is_user_code(file)):
            modules[name] = module
    return modules


def find_source_line(target: object) -> str:
    """Return the file and the first line of a function or a class, such as `net.py:12`.

    For any other object, the line of its class is returned. Returns "" if the line is unknown or in a library.
    """
    unwrapped = inspect.unwrap(target) if callable(target) else target
    if not (inspect.isclass(unwrapped) or inspect.isroutine(unwrapped)):
        unwrapped = type(unwrapped)
    try:
        file, (_, line) = inspect.getsourcefile(unwrapped), inspect.getsourcelines(unwrapped)
    except (TypeError, OSError):  # raised for code that is written in C or was entered in an interpreter
        return ""
    return format_location(file, line) if file and not is_library_file(file) else ""


def find_attribute_line(kind: type, name: str) -> str:
    """Return the source line at which a method of a type or of its bases changes `self.<name>`.

    Returns "" if no method does.
    """
    for base in kind.__mro__:
        file = _get_source_file(base)
        if file is None or not is_user_code(file):
            continue
        lines, first = inspect.getsourcelines(base)
        tree = ast.parse(textwrap.dedent("".join(lines)))
        line = _find_first_line(tree, lambda node: isinstance(node, ast.Attribute) and node.attr == name)
        if line is not None:
            return format_location(file, first + line - 1)
    return ""


def find_variable_line(scope: ModuleType | CodeType, name: str) -> str:
    """Return the source line at which a function in `scope` changes a variable of a module or function.

    If no such line is found, returns the first line that mentions the variable.
    """
    file = _get_source_file(scope)
    if file is None:
        return ""
    lines, first = inspect.getsourcelines(scope)
    tree = ast.parse(textwrap.dedent("".join(lines)))

    uses = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == name]
    line = _find_first_line(tree, lambda node: node in uses) or min((node.lineno for node in uses), default=1)
    return format_location(file, max(first, 1) + line - 1)


def carries_value(scope: ModuleType | CodeType, name: str) -> bool | None:
    """Return whether a loop reads a variable before assigning it, so that its value carries over between iterations.

    Returns None if no loop in `scope` assigns the variable. In this case, its value may still be modified in place.
    """
    file = _get_source_file(scope)
    if file is None:
        return None
    lines, _ = inspect.getsourcelines(scope)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While)]
    accesses = [
        [access for part in _get_repeated_nodes(loop) for access in _iterate_accesses(part, name)] for loop in loops
    ]
    assigned_in = [access_order for access_order in accesses if any(not is_read for is_read, _ in access_order)]
    if not assigned_in:
        return None
    # If a conditional assignment is skipped, a later read sees the value of an earlier iteration.
    return any(
        next((is_read for is_read, conditional in access_order if is_read or not conditional), False)
        for access_order in assigned_in
    )


def _get_repeated_nodes(loop: ast.For | ast.While) -> list[ast.AST]:
    """Return the parts of a loop that run in each iteration. The iterable of a for loop is only evaluated once."""
    return [loop.target, *loop.body] if isinstance(loop, ast.For) else [loop.test, *loop.body]


def is_used(scope: ModuleType | CodeType, name: str) -> bool:
    """Return whether a loop or function in `scope` uses a variable for more than updating, printing or logging it.

    Returns True if this can't be determined.
    """
    file = _get_source_file(scope)
    if file is None:
        return True
    lines, _ = inspect.getsourcelines(scope)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    root = tree.body[0] if isinstance(scope, CodeType) and tree.body else tree
    scopes = ast.For, ast.AsyncFor, ast.While, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda
    return any(_uses_name(node, name) for node in ast.walk(root) if node is not root and isinstance(node, scopes))


def _uses_name(node: ast.AST, name: str) -> bool:
    match node:
        case ast.Name(ctx=ast.Load()):
            return node.id == name
        case ast.Expr(value=ast.Call(func=ast.Name(id=method) | ast.Attribute(attr=method))) if (
            method in _DISPLAY_FUNCTIONS
        ):
            return False
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name() as owner, attr=method)) as call) if (
            owner.id == name and method in _IN_PLACE_METHODS
        ):
            return any(_uses_name(child, name) for child in (*call.args, *call.keywords))
        case ast.Subscript(value=ast.Name() as owner, ctx=ast.Store()) if owner.id == name:
            return _uses_name(node.slice, name)
    return any(_uses_name(child, name) for child in ast.iter_child_nodes(node))


def _iterate_accesses(node: ast.AST, name: str, conditional: bool = False) -> Iterator[tuple[bool, bool]]:
    """Yield (is_read, is_conditional) for each access to a variable in a syntax tree, in the order of evaluation."""
    nodes: list[ast.AST] = []
    conditional_nodes: list[ast.AST] = []  # nodes that aren't always executed
    match node:
        case ast.Name():
            if node.id == name:
                yield isinstance(node.ctx, ast.Load), conditional
        case ast.AugAssign():
            if isinstance(node.target, ast.Name) and node.target.id == name:
                yield True, conditional
            nodes = [node.value, node.target]
        case ast.Assign():
            nodes = [node.value, *node.targets]
        case ast.AnnAssign() | ast.NamedExpr():
            nodes = [child for child in (node.value, node.target) if child is not None]
        case ast.For():
            nodes = [node.iter, node.target, *node.body, *node.orelse]
        case ast.If():
            nodes, conditional_nodes = [node.test], [*node.body, *node.orelse]
        case ast.Try():
            conditional_nodes = [*ast.iter_child_nodes(node)]
        case _:
            nodes = [*ast.iter_child_nodes(node)]
    for child in nodes:
        yield from _iterate_accesses(child, name, conditional)
    for child in conditional_nodes:
        yield from _iterate_accesses(child, name, True)


def iter_user_frames() -> Iterator[FrameType]:
    """Yield the frames on the call stack that run functions of user code, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_locals is not frame.f_globals and is_user_code(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def find_frame_line(frame: FrameType | None) -> str:
    """Return the source line that a frame is executing. Frames of the Python standard library are skipped.

    Returns "" if the line is in torch, NumPy or Lockstep.
    """
    while frame is not None and _is_python_file(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None or is_library_file(frame.f_code.co_filename):
        return ""
    return format_location(frame.f_code.co_filename, frame.f_lineno)


def is_library_file(file: str) -> bool:
    """Return whether a source file belongs to the Python standard library, torch, NumPy or Lockstep."""
    return _is_python_file(file) or file.startswith(_get_library_folders())


def _find_first_line(tree: ast.AST, is_use: Callable[[ast.AST], bool]) -> int | None:
    """Return the first line in a function that changes a name or, if there is none, the first line that uses it.

    `is_use` returns whether a node refers to the name. Constructors are ignored.
    """
    functions = [
        function_node
        for function_node in ast.walk(tree)
        if isinstance(function_node, ast.FunctionDef) and function_node.name not in _CONSTRUCTORS
    ]
    nodes = [node for function in functions for node in ast.walk(function)]
    uses = [node for node in nodes if is_use(node) or _changes_name(node, is_use)]
    lines = [(not _changes_name(node, is_use), node.lineno) for node in uses]  # type: ignore[attr-defined]
    return min(lines)[1] if lines else None


def _changes_name(node: ast.AST, is_use: Callable[[ast.AST], bool]) -> bool:
    """Return whether a node assigns to a name or one of its items, or accesses a method that modifies it in place."""
    match node:
        case ast.Attribute(ctx=ast.Store()) | ast.Name(ctx=ast.Store()):
            return is_use(node)
        case ast.Subscript(value=value, ctx=ast.Store()):
            return is_use(value)
        case ast.Attribute(value=value, attr=name):
            return is_use(value) and (name.endswith("_") or name in _IN_PLACE_METHODS)
    return False


def _get_source_file(scope: type | ModuleType | CodeType) -> str | None:
    try:
        return inspect.getsourcefile(scope)
    except TypeError:  # a built-in object
        return None


def _is_python_file(file: str) -> bool:
    return file.startswith(("<", *_get_python_folders())) and not is_installed(file)


@cache
def _get_python_folders() -> tuple[str, ...]:
    return tuple({f"{sysconfig.get_paths()[name]}/" for name in ("stdlib", "platstdlib")})


@cache
def _get_library_folders() -> tuple[str, ...]:
    return (f"{PACKAGE}/", *(f"{Path(inspect.getfile(package)).parent}/" for package in (np, torch)))
