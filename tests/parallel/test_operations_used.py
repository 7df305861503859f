"""What Lockstep itself computes in a step has an exact kernel on CUDA, whatever the recipe."""

from typing import Any

import pytest
import torch
import toys
from torch.utils._python_dispatch import TorchDispatchMode
from toys import Case

from lockstep.comm.world import World
from lockstep.common.rank import ALONE
from lockstep.device.kernels import find_nondeterministic_operation


class Refused(TorchDispatchMode):
    """Keeps the names of all operations, and of those that are refused."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.refused: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func._schema.name)
        if find_nondeterministic_operation(func, args, kwargs or {}):
            self.refused.add(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "case",
    [
        Case(6, clip=0.1, ema=True),
        Case(3, optimizer="lamb", clip=1.0, channels_last=True),
        Case(precision="fp16", clip=0.5, optimizer="adamw", skip_nonfinite=True),
    ],
    ids=["clipped, averaged", "lamb, channels_last", "fp16, adamw"],
)
def test_no_operation_of_an_engine_is_refused(case: Case) -> None:
    with Refused() as operations:
        toys.whole_trace(World(ALONE, torch.device("cpu")), case)
    assert {"aten::convolution_backward", "aten::_foreach_add_"} <= operations.seen
    assert not operations.refused
