"""Models on the meta device, where tensors have shapes but no values and take no memory."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lockstep.device.cached_tensors import new_tensors_dropped


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a model for its names and shapes, on the meta device or on the CPU if that fails."""
    with warnings.catch_warnings(action="ignore"):  # the real build warns too, but not about missing values
        try:
            with new_tensors_dropped(), torch.device("meta"):
                return build()
        except Exception:  # the build may read values; errors on the CPU are raised
            return build()


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor has values, not only a shape."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))
