"""The meta device, whose tensors have shapes and no values: a model is looked at there without memory for it."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lockstep.device.cached_tensors import new_tensors_dropped


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a model on the meta device, or on the CPU where that fails: for its names and shapes."""
    with warnings.catch_warnings(action="ignore"):  # the real build warns too, and not of values that are not there
        try:
            with new_tensors_dropped(), torch.device("meta"):
                return build()
        except Exception:  # a model may read values while it is built; what fails on the CPU too is told
            return build()


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor has more than a shape."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))
