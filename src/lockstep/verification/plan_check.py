"""Whether a model computes in chunks what it computes whole: a plan may be possible, and wrong."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from lockstep.core.batch import Inputs, call, mapped
from lockstep.errors import VerificationError
from lockstep.parallel.tensor.plan import region_names
from lockstep.run.build import Setup
from lockstep.run.chunking import cut
from lockstep.run.examples import examples

# Of the largest magnitude. Chunks add in another order, which is far less; what a wrong plan does is far more.
_BOUNDS: Final = {torch.float64: 2.0**-30, torch.float32: 2.0**-10}


def check_chunks(ready: Setup) -> None:
    """Raise VerificationError where the model of a recipe gives something else in its chunks, in evaluation."""
    asked = ready.recipe.model
    if asked.chunks == 1:
        return
    whole = ready.uncut().eval()
    in_chunks = copy.deepcopy(whole)
    cut(in_chunks, asked.chunks, asked.plan, asked.name)
    _, batch = examples(ready.recipe, ready.data)
    found = departure(whole, in_chunks, ready.task.inputs(batch))
    if found is not None:
        name, apart = found
        raise VerificationError(
            f"recipe.model.plan: in {asked.chunks} chunks {name or 'the model'} computes something else than "
            f"whole: its outputs differ by {apart:.2g} of the largest; between a colwise and a rowwise layer features, "
            f"or heads, have to be treated each by itself, and heads to be counted by heads:NAMES"
        )


def departure(whole: nn.Module, in_chunks: nn.Module, inputs: Inputs) -> tuple[str, float] | None:
    """Return the first region, or "" for the model, with other outputs, and by what part; None where there is none."""
    names = [*region_names(in_chunks), ""]
    for dtype, bound in _BOUNDS.items():
        given = mapped(lambda each: each.to(dtype) if each.is_floating_point() else each, inputs)  # noqa: B023
        try:
            expected, found = (_outputs(model.to(dtype), names, given) for model in (whole, in_chunks))
        except RuntimeError:
            if dtype is torch.float32:
                raise
            continue  # some kernels take no float64
        for name, outputs in expected.items():
            apart = max(map(_apart, outputs, found[name]), default=0.0)
            if not apart <= bound:  # or it is not a number
                return name, apart
        return None
    return None


def _outputs(model: nn.Module, names: list[str], inputs: Inputs) -> dict[str, list[Tensor]]:
    """Return the tensors that each of these modules gave, in the order of their calls."""
    seen: dict[str, list[Tensor]] = {}
    hooks = [model.get_submodule(name).register_forward_hook(partial(_keep, seen, name)) for name in names]
    with torch.no_grad():
        call(model, inputs)
    for hook in hooks:
        hook.remove()
    return seen


def _keep(seen: dict[str, list[Tensor]], name: str, _module: nn.Module, _inputs: Any, outputs: Any) -> None:
    def kept(tensor: Tensor) -> Tensor:
        seen.setdefault(name, []).append(tensor)
        return tensor

    mapped(kept, outputs)


def _apart(one: Tensor, other: Tensor) -> float:
    if one.shape != other.shape:
        return float("inf")
    if not one.numel() or not one.is_floating_point():
        return 0.0
    return ((one - other).abs().max() / one.abs().max().clamp_min(1e-30)).item()
