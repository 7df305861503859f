"""Intercepts collectives in user code before they start, no matter how the code imported them."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType, ModuleType
from typing import Any, Final

import torch.distributed._functional_collectives as functional
import torch.distributed.distributed_c10d as c10d

_OWN_MODULES: Final = ("lockstep.", "torch.distributed.fsdp.")  # fully_shard gathers in forward hooks
DTENSOR_COLLECTIVE: Final = "an operation on sharded weights"  # name reported for all collectives that DTensor calls
_DTENSOR_MODULES: Final = "torch.distributed.tensor."
_QUERY_PREFIXES: Final = ("get_", "_get_", "set_", "__")  # functions that don't communicate, such as get_rank


@contextmanager
def intercept_collectives(on_collective: Callable[[str], None]) -> Iterator[None]:
    """Call `on_collective(name)` before each collective that user code starts in the `with` block.

    `on_collective` may be called twice for the same collective. Its exceptions propagate to the collective's caller.
    """
    # Each collective in these modules first looks up its group with a function of its module, which can be patched.
    # This works no matter how the caller imported the collective. In contrast, ProcessGroup.register_pre_hook (torch
    # 2.15) only intercepts a single group, and does nothing if there is only one process.
    with ExitStack() as stack:
        for lookup in ("_rank_not_in_group", "_get_default_group"):
            stack.enter_context(_patch_lookup(c10d, lookup, on_collective))
        # Remove at torch >= 2.12: in older versions, this function has a different name.
        resolver = "_resolve_group" if "_resolve_group" in vars(functional) else "_resolve_group_name"
        stack.enter_context(_patch_lookup(functional, resolver, on_collective))
        yield


@contextmanager
def _patch_lookup(module: ModuleType, name: str, on_collective: Callable[[str], None]) -> Iterator[None]:
    original = getattr(module, name)

    def look_up_group(*group: Any) -> Any:
        if label := _get_collective_name(sys._getframe(1)):
            on_collective(label)
        return original(*group)

    setattr(module, name, look_up_group)
    try:
        yield
    finally:
        setattr(module, name, original)


def _get_collective_name(frame: FrameType | None) -> str:
    """Return the name of the collective that is being called, or "" if it is Lockstep's or isn't a collective."""
    name = ""
    while frame is not None:
        match str(frame.f_globals.get("__name__")):
            case c10d.__name__ | functional.__name__:
                name = frame.f_code.co_name
            case "torch.distributed.c10d_logger":  # wraps most collectives
                pass
            case caller if caller.startswith(_DTENSOR_MODULES):
                return DTENSOR_COLLECTIVE
            case caller:
                return "" if name.startswith(_QUERY_PREFIXES) or caller.startswith(_OWN_MODULES) else name
        frame = frame.f_back
    return name
