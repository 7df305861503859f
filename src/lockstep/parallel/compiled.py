"""torch.compile by block, so that what a block computes for a shape follows from that block and that shape alone.

By itself torch.compile makes kernels for any size once it has seen a second one. A run that resumes sees the shapes of
micro-batches in another order, and a rank others than its neighbour, so they would compute with other kernels. And
what is fused depends on the piece of code that is compiled. So each shape has kernels of its own, and the piece is a
block of the model (parallel/blocks.py), which every strategy calls as one; what stands between blocks is not compiled.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import unwrap
from types import CodeType
from typing import Final, NoReturn

import torch
from torch import nn

from lockstep.common.own_code import location
from lockstep.device.compiler import OPTIONS, prepare
from lockstep.device.machine import numerics
from lockstep.errors import UsageError
from lockstep.parallel.blocks import find_units

_LONGEST: Final = 300  # characters of torch's message


def compile_blocks(model: nn.Module, device: torch.device) -> None:
    """Let the model's blocks, or a model without blocks as a whole, compute compiled on `device`.

    Only their forward is: hooks around it, such as those of fully_shard, run as they are.
    """
    prepare(numerics(device, compiled=True))
    names = {module: name for name, module in model.named_modules()}
    for block in units_to_compile(model):
        name = f"block {names[block]}" if names[block] else "the model"
        forward = torch.compile(block.forward, dynamic=False, options=dict(OPTIONS))
        block.forward = _naming(name, unwrap(type(block).forward).__code__)(forward)


def units_to_compile(model: nn.Module) -> list[nn.Module]:
    """Return what is compiled as one."""
    return find_units(model) or [model]


@contextmanager
def _naming(name: str, code: CodeType) -> Iterator[None]:
    """Turn a failure to compile into an error that names the block."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    try:
        yield
    except FailOnRecompileLimitHit as error:
        raise UsageError(
            f"recipe.compile: {name} has been compiled for so many shapes, or values of what its code reads, that "
            f"torch gives up; let the code depend on fewer, or set recipe.compile to false"
        ) from error
    except TorchDynamoException as error:
        _refuse(name, code, error)


def _refuse(name: str, code: CodeType, error: Exception) -> NoReturn:
    frames = [*getattr(error, "real_stack", ())]  # of the model's code, as far as torch knows it
    place = (frames[-1].filename, frames[-1].lineno) if frames else (code.co_filename, code.co_firstlineno)
    words, _, output = str(error).strip().partition("\nOutput:\n")  # of a compiler
    lines = [text.strip().partition("\n")[0][:_LONGEST] for text in (words, output) if text]
    raise UsageError(
        f"recipe.compile: torch cannot compile {name} ({location(*place)}): {': '.join(lines)}; change the code "
        f"there, keep it out by torch.compiler.disable, or set recipe.compile to false"
    ) from error
