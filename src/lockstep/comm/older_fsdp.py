"""Backports features of torch 2.15's fully_shard to older versions. Remove at torch >= 2.15.

Older versions gather all parameters of a unit in the same dtype. They also round gradients to this dtype, even those
that an operation computes in fp32, such as oneDNN's LSTM.
"""

from collections.abc import Collection
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy


def needs_backports() -> bool:
    """Return whether fully_shard in this version of torch gathers all parameters of a unit in the same dtype."""
    return "param_dtype_override_fn" not in {field.name for field in fields(MixedPrecisionPolicy)}


def find_parameters(unit: nn.Module, parameters: Collection[nn.Parameter]) -> set[tuple[nn.Module, str]]:
    """Return the module and the name of each parameter of `unit` that is in `parameters`.

    Call this function before fully_shard replaces the parameters.
    """
    return {
        (module, name)
        for module in unit.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter in parameters
    }


def patch_group(group: Any, unconverted_parameters: Collection[tuple[nn.Module, str]]) -> None:
    """Make fully_shard gather the parameters `unconverted_parameters` of a unit in their own dtype.

    The gradients of the unit are converted to a single dtype, as fully_shard requires. `group` is the unit's
    FSDPParamGroup.
    """
    for parameter in group.fsdp_params:
        if (parameter._module_info.module, parameter._module_info.param_name) in unconverted_parameters:
            own_dtype = MixedPrecisionPolicy(None, torch.float32, cast_forward_inputs=False)
            parameter.init_dtype_attrs = partial(_init_with_policy, parameter.init_dtype_attrs, own_dtype)
    group.post_backward = partial(_unify_dtypes, group, group.post_backward)


def _init_with_policy(original_function: Any, policy: MixedPrecisionPolicy, unit_policy: MixedPrecisionPolicy) -> None:
    original_function(policy)


def _unify_dtypes(group: Any, post_backward: Any, *_: Any) -> None:
    """Convert the gradients of a unit to the same dtype before fully_shard collects them."""
    for parameter in group.fsdp_params:
        if "_unsharded_param" in vars(parameter):  # missing before the first forward pass of the unit
            parameter.to_accumulated_grad_if_needed()
    post_backward()
