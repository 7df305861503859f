"""Builds models on the meta device, where tensors have shapes but no values and take no memory."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lockstep.device.cached_tensors import drop_new_tensors


def build_on_meta(build_model: Callable[[], nn.Module]) -> nn.Module:
    """Build a model on the meta device to inspect names and shapes. Falls back to the CPU if this fails."""
    with warnings.catch_warnings(
        action="ignore"
    ):  # relevant warnings are repeated when the model is built for training
        try:
            with drop_new_tensors(), torch.device("meta"):
                return build_model()
        except Exception:  # the model may read tensor values in its constructor, which fails on the meta device
            return build_model()


def has_values(tensor: Tensor) -> bool:
    """Return whether a tensor has values. Meta and fake tensors only have a shape."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))
