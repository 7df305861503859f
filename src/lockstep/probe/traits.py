"""Model properties that may change results under sharded strategies: strides, hooks, in-place writes, skipped calls."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import ModuleType
from typing import Any, Final, Self, final

from torch import nn

_CHECKPOINT_FILE: Final = "/torch/utils/checkpoint.py"
_ACCUMULATOR_NAMES: Final = ("AccumulateGrad", "next_functions")  # names that code uses to access gradient accumulators
_HOOK_FUNCTIONS: Final = ("register_hook", "register_prehook")


@final
class ModelTraits:
    """Records properties of a model that may change its results under a sharded strategy.

    This class registers hooks, which only record calls and don't affect results.
    """

    def __init__(self) -> None:
        self._static_traits: list[str] = []
        self._written_parameters: dict[str, None] = {}
        self._recomputed_modules: dict[str, None] = {}
        self._call_counts: list[Counter[str]] = []  # number of calls to each module with parameters, per forward pass
        self._versions: dict[str, tuple[int, int]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # the hooks of a copied model report to the same object

    def wrap_builder(self, build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        """Return a function that calls `build` and watches the returned model."""

        def build_and_watch() -> nn.Module:
            model = build()
            self.watch(model)
            return model

        return build_and_watch

    def watch(self, model: nn.Module) -> None:
        """Register hooks that record all subsequent forward passes of a model."""
        self._static_traits = [*_find_static_traits(model)]
        for name, module in model.named_modules():
            if name and any(True for _ in module.parameters()):
                module.register_forward_pre_hook(partial(self._record_call, name))
        model.register_forward_pre_hook(self._begin_forward)
        model.register_forward_hook(self._end_forward)

    def describe(self, modules: Iterable[tuple[str, ModuleType]] = ()) -> list[str]:
        """Return a description of each recorded property, with the most likely cause of different results first.

        `modules` contains the user's modules by name.
        """
        texts = [
            f"{name} is written in the forward pass, and a strategy that shards weights loses the write; leave weights "
            f"to the optimizer"
            for name in self._written_parameters
        ]
        texts += [
            f"{name} is recomputed by a reentrant checkpoint, whose backward runs separately from that of the model; "
            f"pass use_reentrant=False to torch.utils.checkpoint.checkpoint"
            for name in self._recomputed_modules
        ]
        texts += [
            f"{name} registers hooks on AccumulateGrad nodes, which belong to different tensors under a strategy that "
            f"shards weights; move this into the forward pass of the model"
            for name, module in modules
            if _registers_accumulator_hooks(module)
        ]
        texts += self._static_traits
        names = {name for counts in self._call_counts for name in counts}
        for name in sorted(names):
            if any(name not in counts for counts in self._call_counts):
                texts.append(
                    f"{name} is called in some forward passes and skipped in others, so ranks gather and reduce its "
                    f"weights at different times; always call it, and multiply its output by 0 to drop it"
                )
        for name in sorted(names):
            if (calls := max(counts[name] for counts in self._call_counts)) > 1:
                texts.append(
                    f"{name} is called {calls} times in a forward pass, so its gradients may be added in a different "
                    f"order; use strategy ddp"
                )
        return texts

    def _begin_forward(self, model: nn.Module, _inputs: Any) -> None:
        self._call_counts.append(Counter())
        self._versions = {name: (id(parameter), parameter._version) for name, parameter in model.named_parameters()}

    def _record_call(self, name: str, _module: nn.Module, _inputs: Any) -> None:
        if not self._call_counts:
            self._call_counts.append(Counter())
        if _is_in_backward():
            return
        self._call_counts[-1][name] += 1
        if _is_in_reentrant_checkpoint():
            self._recomputed_modules[name] = None

    def _end_forward(self, model: nn.Module, _inputs: Any, _outputs: Any) -> None:
        for name, parameter in model.named_parameters():
            parameter_id, version = self._versions.get(name, (0, 0))
            if id(parameter) == parameter_id and parameter._version != version:
                self._written_parameters[name] = None


def _find_static_traits(model: nn.Module) -> Iterator[str]:
    for name, parameter in model.named_parameters():
        hooks = [*(parameter._backward_hooks or {}).values(), *(parameter._post_accumulate_grad_hooks or {}).values()]
        if not all(map(_is_part_of_lockstep, hooks)):
            yield (
                f"{name} has a gradient hook, which under some strategies sees a part of the gradient, or a gradient "
                f"that is not yet summed over ranks; move this into the forward pass of the model"
            )
    for name, parameter in model.named_parameters():
        if not parameter.is_contiguous():
            yield (
                f"{name} is not contiguous (strides {tuple(parameter.stride())}), and a strategy that shards weights "
                f"changes its layout, so torch may use a different kernel; create it from a contiguous tensor: "
                f"nn.Parameter(weight.contiguous())"
            )


def _is_part_of_lockstep(hook: Any) -> bool:
    """Return whether a gradient hook belongs to Lockstep, which adds hooks to the parameters of a placed model."""
    function = hook.func if isinstance(hook, partial) else hook
    return str(getattr(function, "__module__", "")).partition(".")[0] == "lockstep"


def _is_in_backward() -> bool:
    """Return whether the backward pass is currently recomputing an activation checkpoint."""
    return any(name == "backward" or name == "unpack_hook" for name in _list_checkpoint_frames())


def _is_in_reentrant_checkpoint() -> bool:
    return "forward" in _list_checkpoint_frames()


def _list_checkpoint_frames() -> list[str]:
    """Return the names of torch's checkpointing functions on the call stack."""
    names, frame = [], sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.endswith(_CHECKPOINT_FILE):
            names.append(frame.f_code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    return names


def _registers_accumulator_hooks(module: ModuleType) -> bool:
    try:
        with open(module.__file__ or "", encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeError, AttributeError):
        return False
    return any(name in text for name in _ACCUMULATOR_NAMES) and any(name in text for name in _HOOK_FUNCTIONS)
