"""Keeps the gradients of gathered weights in the dtype that autograd computes in.

If a weight is used twice, autograd adds two gradients before any hook sees them. In a single process, this addition is
in the dtype of the weight copy that the model computes with (parallel/weights.py). From torch 2.15, fully_shard sets
`grad_dtype` to the reduction dtype outside of the backward pass of a unit. A gradient that arrives before this backward
pass (such as the gradient of a weight penalty) would be converted first, and the sum would be rounded differently.
"""

from functools import partial
from typing import Any

from lockstep.comm import older_fsdp


def keep_computed_dtype(group: Any) -> None:
    """Allow gathered weights of a unit to have gradients of any dtype. `group` is its fully_shard parameter group."""
    for parameter in group.fsdp_params:
        parameter.init_unsharded_param = partial(_init_unsharded_param, parameter, parameter.init_unsharded_param)
    if not older_fsdp.is_older():
        group._set_unsharded_grad_dtypes = partial(_set_grad_dtypes, group, group._set_unsharded_grad_dtypes)


def _init_unsharded_param(parameter: Any, init_unsharded_param: Any) -> None:
    init_unsharded_param()
    if parameter.param_dtype is not None:
        parameter._unsharded_param.grad_dtype = None


def _set_grad_dtypes(group: Any, set_grad_dtypes: Any, defer_upcast: bool) -> None:
    set_grad_dtypes(defer_upcast=defer_upcast)  # also converts gradients that are already accumulated
    for parameter in group.fsdp_params:
        if parameter.param_dtype is not None and "_unsharded_param" in vars(parameter):
            parameter._unsharded_param.grad_dtype = None
