"""Keeps the gradients of gathered weights in the dtype in which autograd computes them.

If a weight is used twice, autograd adds the two gradients before any hook sees them. In a single process, it adds them
in the dtype of the weight copy that the model computes with (parallel/weights.py). From torch 2.15, fully_shard sets
`grad_dtype` to the reduction dtype except in the backward pass of the unit. A gradient that arrives before this
backward pass, such as that of a weight penalty, would be converted first, and the sum would be rounded differently.
"""

from functools import partial
from typing import Any

from lockstep.comm import older_fsdp


def keep_computed_dtype(group: Any) -> None:
    """Allow gradients of any dtype for the gathered weights of a unit. `group` is the unit's FSDPParamGroup."""
    for parameter in group.fsdp_params:
        parameter.init_unsharded_param = partial(_init_unsharded_param, parameter, parameter.init_unsharded_param)
    if not older_fsdp.needs_backports():
        group._set_unsharded_grad_dtypes = partial(_set_grad_dtypes, group, group._set_unsharded_grad_dtypes)


def _init_unsharded_param(parameter: Any, original_function: Any) -> None:
    original_function()
    if parameter.param_dtype is not None:
        parameter._unsharded_param.grad_dtype = None


def _set_grad_dtypes(param_group: Any, original_function: Any, defer_upcast: bool) -> None:
    original_function(defer_upcast=defer_upcast)  # also converts gradients that are already accumulated
    for parameter in param_group.fsdp_params:
        if parameter.param_dtype is not None and "_unsharded_param" in vars(parameter):
            parameter._unsharded_param.grad_dtype = None
