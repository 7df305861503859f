"""Lets gradients of gathered weights keep the dtype in which autograd computes them.

If a weight is used twice, autograd adds two gradients before anything else sees them. In one process they are added in
the dtype of the copy that the model computes with (parallel/weights.py). From torch 2.15, fully_shard sets `grad_dtype`
to the dtype of the reduction while no backward runs, so that a gradient which arrives before the unit's own backward
begins, such as that of a penalty on the weights, is converted first, and the sum is rounded differently.
"""

from functools import partial
from typing import Any

from lockstep.comm import older_fsdp


def keep_computed_dtype(group: Any) -> None:
    """Let the gathered weights of a unit take gradients of any dtype; `group` is fully_shard's group of the unit."""
    for parameter in group.fsdp_params:
        parameter.init_unsharded_param = partial(_init_unsharded_param, parameter, parameter.init_unsharded_param)
    if not older_fsdp.is_older():
        group._set_unsharded_grad_dtypes = partial(_set_grad_dtypes, group, group._set_unsharded_grad_dtypes)


def _init_unsharded_param(parameter: Any, init_unsharded_param: Any) -> None:
    init_unsharded_param()
    if parameter.param_dtype is not None:
        parameter._unsharded_param.grad_dtype = None


def _set_grad_dtypes(group: Any, set_grad_dtypes: Any, defer_upcast: bool) -> None:
    set_grad_dtypes(defer_upcast=defer_upcast)  # converts gradients that already accumulate
    for parameter in group.fsdp_params:
        if parameter.param_dtype is not None and "_unsharded_param" in vars(parameter):
            parameter._unsharded_param.grad_dtype = None
