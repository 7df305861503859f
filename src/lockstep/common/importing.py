"""Imports of user objects by a path such as `package.module:function`, and of optional packages."""

import importlib
import os
import sys
from importlib import metadata
from types import ModuleType
from typing import Any

from lockstep.common.names import format_suggestion
from lockstep.common.user_code import UserCode, describe_error
from lockstep.errors import LockstepError, UsageError, UserCodeError


def import_object(path: str, purpose: str) -> Any:
    """Import `package.module:function`. `purpose` describes the object in errors, e.g. model, dataset or loss.

    The current directory is searched first, as with `python -m`, because console scripts don't search it. Raises
    UsageError if the path is malformed, or if the module or the name doesn't exist. Raises UserCodeError if importing
    the module fails.
    """
    name, _, attribute = path.partition(":")
    if not all(part.isidentifier() for part in name.split(".")) or not attribute.isidentifier():
        raise UsageError(f"{purpose} {path}: not an import path; use the form package.module:function")
    module = _import_module(name, f"{purpose} {path}")
    with UserCode(f"{purpose} {path}"):  # a module can define __getattr__ or replace itself
        try:
            return getattr(module, attribute)
        except AttributeError:
            pass
    names = [str(key) for key in getattr(module, "__dict__", ())]
    public = [key for key in names if not key.startswith("_")]
    file = getattr(module, "__file__", None) or "a folder without __init__.py"
    raise UsageError(
        f"{purpose} {path}: module {name} ({file}) has no '{attribute}'{format_suggestion(attribute, public)}"
    )


def import_callable(path: str, purpose: str, expected: str) -> Any:
    """Import an object with `import_object`. If it isn't callable, raise a UsageError that contains `expected`."""
    value = import_object(path, purpose)
    if not callable(value):
        raise UsageError(f"{purpose} {path}: expected {expected}, got an object of type {type(value).__name__}")
    return value


def import_extra(package: str, extra: str, label: str) -> Any:
    """Import a package of an optional extra. Raises UsageError, prefixed with `label`, if the package isn't installed.

    Importing such a package can take seconds, so call this function only when the package is needed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise UsageError(f"{label}: {package} is not installed; pip install 'lockstep-train[{extra}]'") from error


def get_version(package: str) -> str | None:
    """Return the version of a package without importing it, or None if it isn't installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _import_module(module_name: str, label: str) -> ModuleType:
    cwd = os.getcwd()
    if cwd not in sys.path and "" not in sys.path:
        sys.path.insert(0, cwd)
    try:
        return importlib.import_module(module_name)
    except (LockstepError, KeyboardInterrupt):
        raise
    except BaseException as error:  # includes SystemExit, because a script without a main guard may exit
        # The missing module is the requested module or one of its parent packages.
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise UsageError(
                f"{label}: module {error.name} not found, neither in {os.getcwd()} nor among the installed packages; "
                f"start Lockstep in the folder of the module, or set PYTHONPATH"
            ) from None
        message = describe_error(error, f'to see it, run python -c "import {module_name}"')
        raise UserCodeError(f"{label}: module {module_name} fails on import: {message}") from error
