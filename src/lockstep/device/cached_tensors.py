"""Removes tensors that a model caches at module level while Lockstep inspects it, such as masks in an `lru_cache`.

An inspection runs the model on the meta device, on the CPU or in float64. If the model caches a mask in an inspection,
training would reuse this mask, which has the wrong device or dtype.
"""

import gc
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import _lru_cache_wrapper
from types import FunctionType, ModuleType
from typing import Any, Final

from torch import Tensor

# Like the standard library, these packages aren't searched. They are dependencies of torch and Lockstep, and don't
# cache tensors of a model. Searching a package that is missing from this list only takes milliseconds.
_SKIPPED_PACKAGES: Final = frozenset(
    [
        *("PIL", "accelerate", "anyio", "boto3", "botocore", "charset_normalizer", "click", "cryptography", "cuda"),
        *("datasets", "fsspec", "functorch", "google", "grpc", "h11", "httpcore", "httpx", "huggingface_hub"),
        *("hypothesis", "idna", "joblib", "jinja2", "lockstep", "markupsafe", "matplotlib", "mpmath", "multiprocess"),
        *("networkx", "numpy", "onnx", "pandas", "pip", "pkg_resources", "psutil", "pynvml", "pyarrow", "pydantic"),
        *("pydantic_core", "pygments", "pytest", "_pytest", "ray", "regex", "requests", "rich", "safetensors", "scipy"),
        *("setuptools", "sklearn", "sympy", "tensorboard", "timm", "torch", "torchgen", "torchvision"),
        *("tqdm", "transformers", "triton", "typing_extensions", "urllib3", "wandb", "yaml"),
    ]
)
# Exact types without their subclasses, because accessing an instance of a subclass can import modules.
_MAPPINGS: Final = (dict, OrderedDict, defaultdict)
_CONTAINER_TYPES: Final = frozenset(
    (*_MAPPINGS, list, tuple, set, frozenset, staticmethod, classmethod, FunctionType, _lru_cache_wrapper)
)
_MAX_DEPTH: Final = 6  # maximum nesting depth of the search

TensorsById = Mapping[int, Tensor]  # by id, which is unique because the mapping keeps the tensors alive


@contextmanager
def drop_new_tensors() -> Iterator[None]:
    """On exit, drop the tensors that code in the `with` block added to module-level caches.

    Searches modules and their types, the defaults and closures of functions, and nested containers. Clears each
    `lru_cache` that holds a new tensor. If a variable was rebound to a new tensor, its old value is restored.
    """
    before = {id(tensor): tensor for tensor in _find_all_tensors()}
    variables = {id(owner): dict(namespace) for owner, namespace in _iterate_namespaces()}
    try:
        yield
    finally:
        if any(id(tensor) not in before for tensor in _find_all_tensors()):
            _drop_new_tensors(before, variables)


def _find_all_tensors() -> list[Tensor]:
    return _find_tensors(value for _, namespace in _iterate_namespaces() for value in [*namespace.values()])


def _iterate_namespaces() -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield each module and class of user code and third-party packages, with its variables by name."""
    for name, module in [*sys.modules.items()]:
        package = name.partition(".")[0]
        if package in _SKIPPED_PACKAGES or (package in sys.stdlib_module_names and package != "__main__"):
            continue
        if not isinstance(module, ModuleType):
            continue
        variables = vars(module)
        yield module, variables
        for value in [*variables.values()]:
            if type(value) is type and value.__module__ == name:
                yield value, dict(vars(value))


def _find_tensors(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors in `values` and in nested containers, caches and functions, by breadth-first search."""
    tensors: list[Tensor] = []
    visited: set[int] = set()
    level = [*values]
    for _ in range(_MAX_DEPTH):
        next_level: list[Any] = []
        for value in level:
            if type(value) in _CONTAINER_TYPES:
                if id(value) not in visited:
                    visited.add(id(value))
                    next_level += _get_contents(value)
            elif isinstance(value, Tensor):
                tensors.append(value)
        level = next_level
    return tensors


def _get_contents(value: Any) -> list[Any]:
    """Return the objects that a container, a cache or a function holds."""
    if isinstance(value, _lru_cache_wrapper):
        return [item for item in gc.get_referents(value) if not isinstance(item, FunctionType | ModuleType | type)]
    if type(value) in _MAPPINGS:
        return [*value.values()]
    if type(value) in (list, tuple, set, frozenset):
        return [*value]
    if isinstance(value, staticmethod | classmethod):
        return [value.__func__]
    if isinstance(value, FunctionType):
        return [vars(value), *(value.__defaults__ or ()), value.__kwdefaults__, *_iterate_closure_values(value)]
    return []


def _iterate_closure_values(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # the name isn't bound yet
            continue


def _drop_new_tensors(previous_tensors: TensorsById, previous_variables: Mapping[int, dict[str, Any]]) -> None:
    visited: set[int] = set()
    for owner, namespace in _iterate_namespaces():
        old_variables = previous_variables.get(id(owner), {})
        for name, value in [*namespace.items()]:
            if isinstance(value, Tensor) and id(value) not in previous_tensors and name in old_variables:
                setattr(owner, name, old_variables[name])
            elif isinstance(value, Tensor) and id(value) not in previous_tensors:
                delattr(owner, name)
            else:
                _drop_nested_new_tensors(value, previous_tensors, _MAX_DEPTH, visited)


def _drop_nested_new_tensors(value: Any, previous_tensors: TensorsById, max_depth: int, visited_ids: set[int]) -> None:
    if not max_depth or type(value) not in _CONTAINER_TYPES or id(value) in visited_ids:
        return
    visited_ids.add(id(value))
    if isinstance(value, _lru_cache_wrapper):
        if _holds_new_tensor(value, previous_tensors):
            value.cache_clear()
    elif type(value) in _MAPPINGS:
        for key in [key for key, item in value.items() if _is_new_entry(item, previous_tensors)]:
            del value[key]
    elif type(value) is list:
        value[:] = [item for item in value if not _is_new_entry(item, previous_tensors)]
    elif type(value) is set:
        value -= {item for item in value if _is_new_entry(item, previous_tensors)}
    for item in _get_contents(value):
        _drop_nested_new_tensors(item, previous_tensors, max_depth - 1, visited_ids)


def _is_new_entry(value: Any, previous: TensorsById) -> bool:
    """Return whether `value` is a new tensor, or an immutable container that holds one."""
    if type(value) in (tuple, frozenset):
        return _holds_new_tensor(value, previous)
    return isinstance(value, Tensor) and id(value) not in previous


def _holds_new_tensor(value: Any, previous_tensors: TensorsById) -> bool:
    return any(id(tensor) not in previous_tensors for tensor in _find_tensors([value]))
