"""torch.compile by block, so that the kernels for a shape depend only on the block and the shape.

By default, torch.compile switches to dynamic-shape kernels when it sees a second size. The order in which shapes appear
differs between ranks, and between a resumed run and an uninterrupted run, so they would run different kernels. In
addition, operator fusion depends on which code is compiled together. Therefore Lockstep compiles separate kernels for
each shape, and compiles each block of the model separately (parallel/blocks.py), because every strategy calls a block
as a unit. Code between blocks isn't compiled.

The loss of a language model is one more unit (setup/compiled_loss.py).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import unwrap
from types import CodeType
from typing import Final, NoReturn, ParamSpec, TypeVar

import torch
from torch import nn

from lockstep.common.user_code import format_location
from lockstep.device.compiler import COMPILE_OPTIONS, configure_compiler
from lockstep.device.machine import make_fingerprint
from lockstep.errors import UsageError
from lockstep.parallel.blocks import find_blocks

_P = ParamSpec("_P")
_T = TypeVar("_T")

_MAX_MESSAGE_LENGTH: Final = 300  # maximum length of a torch message in an error


def compile_blocks(model: nn.Module, device: torch.device) -> None:
    """Compile the blocks of a model for `device`, in place. If the model has no blocks, the full model is compiled.

    Only the forward method of a block is compiled. Hooks, such as those of fully_shard, run eagerly.
    """
    configure_compiler(make_fingerprint(device, compiled=True))
    names = {module: name for name, module in model.named_modules()}
    for block in find_modules_to_compile(model):
        name = f"block {names[block]}" if names[block] else "the model"
        block.forward = compile_function(block.forward, name, unwrap(type(block).forward).__code__)


def find_modules_to_compile(model: nn.Module) -> list[nn.Module]:
    """Return the modules that are each compiled as a unit: the blocks, or the model itself if it has no blocks."""
    return find_blocks(model) or [model]


def compile_function(function: Callable[_P, _T], name: str, code: CodeType) -> Callable[_P, _T]:
    """Return a compiled function whose kernels for a shape depend only on the function and the shape.

    Errors contain `name` and the source location of `code`.
    """
    compiled = torch.compile(function, dynamic=False, options=dict(COMPILE_OPTIONS))
    return _name_function_in_errors(name, code)(compiled)


@contextmanager
def _name_function_in_errors(name: str, code: CodeType) -> Iterator[None]:
    """Convert compilation errors in the `with` block to UsageErrors that name the compiled function."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    try:
        yield
    except FailOnRecompileLimitHit as error:
        raise UsageError(
            f"recipe.compile: torch reached its recompilation limit, because {name} was called with too many shapes or "
            f"Python values; make its code depend on fewer shapes and values, or set recipe.compile to false"
        ) from error
    except TorchDynamoException as error:
        _raise_compile_error(name, code, error)


def _raise_compile_error(name: str, code: CodeType, error: Exception) -> NoReturn:
    frames = [*getattr(error, "real_stack", ())]  # the call stack in the model's code, if torch recorded one
    code_location = (frames[-1].filename, frames[-1].lineno) if frames else (code.co_filename, code.co_firstlineno)
    message, _, output = str(error).strip().partition("\nOutput:\n")  # torch appends the output of the C++ compiler
    lines = [text.strip().partition("\n")[0][:_MAX_MESSAGE_LENGTH] for text in (message, output) if text]
    raise UsageError(
        f"recipe.compile: torch cannot compile {name} ({format_location(*code_location)}): {': '.join(lines)}; "
        "change this code, exclude it with torch.compiler.disable, or set recipe.compile to false"
    ) from error
