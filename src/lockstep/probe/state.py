"""Snapshots of state that a forward pass can change: the model, random number generators and global variables.

Each value is represented by a string that changes when the value changes.
"""

import random as python_random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import _lru_cache_wrapper, partial
from itertools import count, islice
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final, NamedTuple, Self, final

import numpy as np
from torch import Generator, Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.spectral_norm import SpectralNorm

from lockstep.probe.witness import NUMPY, PYTHON
from lockstep.setup import user_code
from lockstep.training.checkpoint.tensorfile import digest_tensors

CACHE: Final = "cache of"  # prefix of the string that represents a function with functools.lru_cache
SPECTRAL_NORM: Final = "spectral_norm"  # replaces the class name of a module with torch's spectral_norm

_MAX_DEPTH: Final = 4  # maximum nesting level of containers and objects
_MAX_SHOWN_CHARS: Final = 24  # maximum length of a value that is shown in full
_MAX_ITEMS: Final = 1_000  # maximum number of items to compare in a container; its length is always compared
# Maximum size of a tensor or array. Larger arrays are probably datasets, so only their shapes are compared.
_MAX_TENSOR_BYTES: Final = 16 << 20


@final
class ModelState:
    """A snapshot of the state that a forward pass can change in a model, except for torch's own BatchNorm layers."""

    def __init__(self, model: nn.Module) -> None:
        self.kinds: dict[str, str] = {}
        self.buffers: dict[str, str] = {}
        # Buffers of subclasses of torch's BatchNorm, which may update them differently.
        self.norm_buffers: dict[str, str] = {}
        self.attributes: dict[str, str] = {}
        for path, module in model.named_modules():
            prefix = f"{path}." if path else ""
            is_norm = isinstance(module, nn.modules.batchnorm._NormBase)  # includes InstanceNorm
            if not (is_norm and type(module).__module__.startswith("torch.")):
                kind = SPECTRAL_NORM if is_spectral_norm(module) else type(module).__name__
                for name, buffer in module.named_buffers(recurse=False):
                    self.kinds[prefix + name] = kind
                    (self.norm_buffers if is_norm else self.buffers)[prefix + name] = digest_tensors([buffer])
            for name, value in _iterate_custom_attributes(module):
                self.attributes[prefix + name] = _format_value(value, _MAX_DEPTH)

    def find_buffer_changes(self, after: Self) -> list[str]:
        """Return the names of the buffers whose values differ in `after`."""
        return [name for name, value in self.buffers.items() if after.buffers.get(name) != value]

    def find_norm_buffer_changes(self, after: Self) -> list[str]:
        """Return the names of the changed buffers in subclasses of torch's BatchNorm."""
        return [name for name, value in self.norm_buffers.items() if after.norm_buffers.get(name) != value]

    def find_attribute_changes(self, after: Self) -> dict[str, str]:
        """Return the changed attributes by name, with descriptions of the changes, such as `0 -> 2` or `a tensor`."""
        return _describe_changes(self.attributes, after.attributes)


class _Variable(NamedTuple):
    """A global variable or class attribute: its full name, its value, and a function that finds its source line."""

    name: str
    value: Any
    find_source_line: Callable[[], str]


@final
class GlobalState:
    """A snapshot of the global variables, class attributes and functions in the user's modules.

    The state of a function consists of its attributes, default values and closure. `scopes` adds the local variables of
    running functions, as pairs of the variables by name and the code object of the function.
    """

    def __init__(
        self,
        modules: Mapping[str, ModuleType],
        types: Iterable[type],
        scopes: Iterable[tuple[Mapping[str, Any], CodeType]] = (),
    ) -> None:
        all_variables = [
            variable for name, module in modules.items() for variable in _iterate_module_variables(name, module)
        ]
        all_variables += [
            variable for kind in types if kind.__module__ in modules for variable in _iterate_class_attributes(kind)
        ]
        for variables, code in scopes:
            all_variables += [
                _Variable(name, value, partial(user_code.find_variable_line, code, name))
                for name, value in variables.items()
            ]
        self._values = {variable.name: _format_global(variable.value, modules) for variable in all_variables}
        self._source_line_finders = {variable.name: variable.find_source_line for variable in all_variables}

    def find_changes(self, after: Self) -> dict[str, str]:
        """Return the changed variables by name, each with a description of the change."""
        return _describe_changes(self._values, after._values)

    @property
    def values(self) -> Mapping[str, str]:
        """The strings that represent the values, by variable name."""
        return self._values

    def find_source_line(self, name: str) -> str:
        """Return the source line that changes a variable, or an empty string if the line is unknown."""
        return self._source_line_finders[name]() if name in self._source_line_finders else ""


def _iterate_module_variables(name: str, module: ModuleType) -> Iterator[_Variable]:
    for variable, value in list(vars(module).items()):
        if variable.startswith("__") or isinstance(value, ModuleType):
            continue
        if isinstance(value, type | FunctionType) and value.__module__ != module.__name__:  # imported by this module
            continue
        if isinstance(value, type):
            yield from _iterate_class_attributes(value)
        elif isinstance(value, FunctionType | _lru_cache_wrapper):
            yield _Variable(f"{name}.{variable}", value, partial(user_code.find_source_line, value))
        else:
            yield _Variable(f"{name}.{variable}", value, partial(user_code.find_variable_line, module, variable))


def _iterate_class_attributes(cls: type) -> Iterator[_Variable]:
    for attribute, value in list(vars(cls).items()):
        if not attribute.startswith("__") and not callable(value):
            name = f"{cls.__module__}.{cls.__qualname__}.{attribute}"
            yield _Variable(name, value, partial(user_code.find_attribute_line, cls, attribute))


def get_rng_states() -> dict[str, str]:
    """Return the states of Python's and NumPy's default random number generators as strings, by generator name."""
    # np.random.get_state() is the state of NumPy's legacy generator, which np.random.rand and similar functions use.
    return {PYTHON: repr(python_random.getstate()), NUMPY: repr(np.random.get_state())}


def digest_weights(model: nn.Module) -> dict[str, str]:
    """Return a digest of each parameter of a model."""
    return {name: digest_tensors([parameter]) for name, parameter in model.named_parameters()}


def is_spectral_norm(module: nn.Module) -> bool:
    """Return whether a module uses torch's spectral_norm, in either implementation."""
    by_hook = any(isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values())
    return by_hook or isinstance(module, parametrizations._SpectralNorm)


def describe_change(before: str, after: str) -> str:
    """Describe a change between two represented values, such as `0 -> 2` or `a tensor`."""
    kind, kind_after = before.partition(" ")[0], after.partition(" ")[0]
    if max(len(before), len(after)) <= _MAX_SHOWN_CHARS:
        return f"{before} -> {after}"
    return f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}" if kind == kind_after else f"{kind} -> {kind_after}"


def _describe_changes(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    names = [*before, *(name for name in after if name not in before)]
    pairs = {name: (before.get(name, "unset"), after.get(name, "unset")) for name in names}
    return {
        name: describe_change(text_before, text_after)
        for name, (text_before, text_after) in pairs.items()
        if text_before != text_after
    }


def _iterate_custom_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each attribute that user code has set on a module, without torch's own attributes."""
    # `forward` is included because Lockstep and other libraries wrap it on the instance.
    torch_attributes = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training", "forward"}
    # The hook of spectral_norm recomputes the weight from parameters and buffers before each forward pass.
    computed = {hook.name for hook in module._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)}
    for name, value in vars(module).items():
        # Internal attributes of torch, such as hook dicts and the state of fully_shard.
        is_internal = name.startswith("__") or name.endswith("_hooks") or "_hooks_" in name
        if name not in {*torch_attributes, *computed} and not is_internal and not _holds_parameters(value):
            yield name, value


def _holds_parameters(value: Any) -> bool:
    """Return whether a value is or contains parameters of the model, such as `_flat_weights` of an RNN."""
    values = value if isinstance(value, list | tuple) else (value,)
    return any(isinstance(item, nn.Parameter) for item in values)


def _format_global(value: Any, modules: Mapping[str, ModuleType]) -> str:
    """Return the string that represents a global variable. For an object of a library class, this is its type."""
    if isinstance(value, _lru_cache_wrapper):
        return f"{CACHE} {value.cache_info().currsize} results"
    if isinstance(value, FunctionType):
        cells = [_get_cell_contents(cell) for cell in value.__closure__ or ()]
        return f"function {_format_value([vars(value), cells, value.__defaults__, value.__kwdefaults__], _MAX_DEPTH)}"
    comparable_types = (Tensor, np.ndarray, np.generic, Generator, np.random.Generator, np.random.RandomState)
    is_plain = isinstance(value, bool | int | float | complex | str | bytes | None)
    is_container = isinstance(value, Mapping | list | tuple | set | frozenset | deque | count | python_random.Random)
    if is_plain or is_container or isinstance(value, comparable_types) or type(value).__module__ in modules:
        return _format_value(value, _MAX_DEPTH)
    return type(value).__name__


def _get_cell_contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None


def _format_value(value: Any, depth: int) -> str:
    """Return a string that changes when the value changes. At depth 0, an object is represented by its type."""
    if isinstance(value, Tensor):
        return f"tensor {_compute_digest(value)}"
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        return f"array {array.dtype} {array.shape} {hash(array.tobytes()) if array.nbytes <= _MAX_TENSOR_BYTES else ''}"
    if isinstance(value, bool | int | float | complex | str | bytes | count | None):
        return repr(value)
    if isinstance(value, Generator):
        return f"generator {digest_tensors([value.get_state()])}"
    if isinstance(value, np.random.Generator):
        return f"generator {value.bit_generator.state}"
    if isinstance(value, np.random.RandomState):
        return f"generator {value.get_state()}"
    if isinstance(value, python_random.Random):
        return f"generator {value.getstate()}"
    if not depth or isinstance(value, nn.Module | type):
        return type(value).__name__
    if isinstance(value, Mapping):
        items = islice(value.items(), _MAX_ITEMS)
        text = ", ".join(f"{_format_value(key, depth - 1)}: {_format_value(item, depth - 1)}" for key, item in items)
        return f"{type(value).__name__} {{{text}}}{_format_length_suffix(value)}"
    if isinstance(value, list | tuple | deque):
        text = ", ".join(_format_value(item, depth - 1) for item in islice(value, _MAX_ITEMS))
        return f"{type(value).__name__} [{text}]{_format_length_suffix(value)}"
    if isinstance(value, set | frozenset):
        text = ", ".join(sorted(_format_value(item, depth - 1) for item in islice(value, _MAX_ITEMS)))
        return f"{type(value).__name__} {{{text}}}{_format_length_suffix(value)}"
    return f"{type(value).__name__} {_format_value(getattr(value, '__dict__', None), depth - 1)}"


def _compute_digest(tensor: Tensor) -> str:
    if tensor.is_meta or tensor.numel() * tensor.element_size() > _MAX_TENSOR_BYTES:
        return str(tuple(tensor.shape))
    return digest_tensors([tensor])


def _format_length_suffix(container: Any) -> str:
    return f" of {len(container)}" if len(container) > _MAX_ITEMS else ""
