"""Rejects nn.RReLU if torch would compute its gradient from uninitialized memory.

torch's rrelu_with_noise writes the noise for its backward pass into an argument. If saved_tensors_hooks are active,
autograd packs the argument before it is written, so the backward pass reads uninitialized memory. Such hooks are used
by torch.utils.checkpoint with use_reentrant=False, and thus by placement.recompute, and by
placement.offload_activations. Plain PyTorch has the same bug (seen with torch 2.11, 2.14 and 2.15). Remove this module
once torch packs the noise after writing it.
"""

from functools import partial
from typing import Any

import torch
from torch import nn

from lockstep.common.user_code import make_refusal


def forbid_rrelu_with_hooks(model: nn.Module) -> None:
    """Make each nn.RReLU raise UsageError if its forward pass in training mode runs with active saved_tensors_hooks."""
    for path, layer in model.named_modules():
        if isinstance(layer, nn.RReLU):
            layer.register_forward_pre_hook(partial(_check_hooks, path))


def _check_hooks(path: str, layer: nn.Module, _inputs: Any) -> None:
    if torch.compiler.is_compiling() or not (layer.training and torch.is_grad_enabled()):
        return
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        raise make_refusal(
            f"{path}: nn.RReLU runs within torch.utils.checkpoint or saved_tensors_hooks, so torch computes its "
            f"gradient from uninitialized memory",
            "call it outside the checkpoint, use a different activation such as nn.LeakyReLU, or set "
            "placement.recompute=none and placement.offload_activations=false",
        )
