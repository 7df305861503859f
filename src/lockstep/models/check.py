"""Whether a model fits the data: found on shapes alone, before any process is started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import LockstepError, UsageError


@dataclass(frozen=True, slots=True)
class Summary:
    """What the preflight tells of a model; `dims` are the numbers of dims of its parameters, each once."""

    parameters: int
    dims: tuple[int, ...]


def check_model(
    build: Callable[[], nn.Module],
    *,
    name: str,
    shape: tuple[int, ...],
    classes: int,
    smallest: int = 2,
    dtype: torch.dtype = torch.float32,
) -> Summary:
    """Raise UsageError unless inputs of `shape` become [n, classes], in evaluation and in training.

    `smallest` is the number of samples in the run's smallest micro-batch: BatchNorm may want more of them.
    The model is built on the meta device, without memory or arithmetic, and on the CPU only where that fails.
    Let `build` leave pretrained weights out: their values do not matter here.
    """
    trial = partial(_trial, build, name, (smallest, *shape), dtype)
    try:
        evaluated, trained, summary = trial("meta")
    except Exception:  # a model may read values while it is built or runs; what fails on the CPU too is told
        evaluated, trained, summary = trial("cpu")
    _check_outputs(name, evaluated, 2, classes)
    _check_outputs(name, trained, smallest, classes)
    return summary


@torch.no_grad()
def _trial(
    build: Callable[[], nn.Module], name: str, size: tuple[int, ...], dtype: torch.dtype, device: str
) -> tuple[Any, Any, Summary]:
    """Return the outputs for two samples in evaluation and for `size` in training."""
    with torch.device(device):
        model = build()
        two, smallest = torch.zeros((2, *size[1:]), dtype=dtype), torch.zeros(size, dtype=dtype)
        evaluated = _outputs(model.eval(), name, two)
        trained = _outputs(model.train(), name, smallest)
    parameters = list(model.parameters())
    dims = tuple(sorted({parameter.ndim for parameter in parameters}))
    return evaluated, trained, Summary(sum(parameter.numel() for parameter in parameters), dims)


def _outputs(model: nn.Module, name: str, inputs: Tensor) -> Any:
    try:
        return model(inputs)
    except LockstepError:
        raise
    except Exception as error:  # a stranger's model may raise anything
        if "Expected more than 1 value per channel" in str(error):
            raise UsageError(
                f"model {name}: the smallest micro-batch has {len(inputs)} sample, too few for BatchNorm; "
                f"choose batch and microbatches so that every micro-batch, the last step's of an epoch too, "
                f"has at least 2 samples, or set last_batch: drop"
            ) from error
        raise UsageError(
            f"model {name}: it cannot take inputs of shape {tuple(inputs.shape)}: "
            f"{type(error).__name__}: {error}; choose a model or an image size that fit each other"
        ) from error


def _check_outputs(name: str, outputs: object, samples: int, classes: int) -> None:
    if not isinstance(outputs, Tensor):
        raise UsageError(
            f"model {name}: its output is of type {type(outputs).__name__}, not one tensor; "
            f"choose options without further outputs, or wrap it in a function of yours"
        )
    if outputs.shape != (samples, classes):
        raise UsageError(
            f"model {name} gives outputs of shape {tuple(outputs.shape)} for {samples} samples, but the data "
            f"has {classes} classes; set its number of classes to {classes} (a function of yours is given it "
            f"as num_classes where it has that parameter)"
        )
