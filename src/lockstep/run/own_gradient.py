"""What stands in `grad` of a placed model's parameters between a backward and the update: to be looked at, not written.

The sum of a step's gradients is known when it is updated, and lies elsewhere for each strategy until then. So what the
user's code finds in `grad` is the same everywhere: nothing but nan. Whoever writes to it, or adds to it by a backward
of their own, is refused in the very line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

__tracebackhide__ = True  # a test shows the user's line, which broke the contract, and not ours

Refuse = Callable[[bool], Exception]  # given whether a backward writes


@final
class Withheld(Tensor):
    """A gradient that is not shown. It has no memory; a write to it raises what `refuse` returns."""

    refuse: Refuse

    @staticmethod
    def __new__(cls, like: Tensor, refuse: Refuse) -> Withheld:
        made: Withheld = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        made.refuse = refuse
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Withheld(shape={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute with nan in place of what is withheld; see `torch.Tensor`."""
        named = dict(kwargs or {})
        held = [each for each in tree_leaves((args, named)) if isinstance(each, Withheld)]
        shared = False
        for place, argument in enumerate(func._schema.arguments):
            alias = argument.alias_info
            given = args[place] if place < len(args) else named.get(argument.name)
            if alias is None or not any(isinstance(each, Withheld) for each in tree_leaves(given)):
                continue
            if alias.is_write:
                raise held[0].refuse(torch._C._current_graph_task_id() != -1)
            shared = True
        outputs = func(*tree_map_only(Withheld, _nan, args), **tree_map_only(Withheld, _nan, named))
        # A view, which could be written in its place.
        return tree_map_only(Tensor, lambda each: Withheld(each, held[0].refuse), outputs) if shared else outputs


def _nan(tensor: Tensor) -> Tensor:
    return torch.full(tensor.shape, torch.nan, dtype=tensor.dtype, device=tensor.device)
