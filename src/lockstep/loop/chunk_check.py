"""Compares a model that is split into tensor-parallel chunks with the original model, at the first call in a loop."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, Final, final

import torch
from torch import nn

from lockstep.common.user_code import make_refusal
from lockstep.core.batch import get_tensors
from lockstep.data.items import preserve_rng_states
from lockstep.device.cached_tensors import drop_new_tensors
from lockstep.loop.model import list_entry_modules
from lockstep.setup.chunk_check import (
    MAX_COMPARED_PARAMETERS,
    PLAN_ADVICE,
    ChunkDifference,
    describe_difference,
    find_quick_difference,
)

_SKIPPED_PREFIX: Final = "run.place: the chunked model was not compared with the whole model, because"

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]


@final
class FirstCallCheck:
    """Checks that splitting a model into chunks doesn't change its outputs.

    The check copies the model before it is split. At the first call, which provides the inputs, it compares the outputs
    of the split model with those of the copy, in float32 and for two samples of the first micro-batch. If the model
    can't be copied, or the copy can't be called, the check only warns.
    """

    def __init__(
        self, model: nn.Module, num_chunks: int, split_model: Callable[[nn.Module], object], warn: Callable[[str], None]
    ) -> None:
        self._chunks = num_chunks
        self._split_model = split_model
        self._warn = warn
        parameters = sum(parameter.numel() for parameter in model.parameters())
        if parameters > MAX_COMPARED_PARAMETERS:
            warn(
                f"{_SKIPPED_PREFIX} this would copy its {parameters:,} parameters twice; check the plan with a smaller "
                f"model"
            )
            return
        try:
            original_model = copy.deepcopy(model).eval()
        except Exception as error:  # copying a custom model can raise any exception
            warn(f"{_SKIPPED_PREFIX} copy.deepcopy failed: {error}; make the model copyable to check the plan")
            return
        self._original_model = original_model
        names = {module: name for name, module in model.named_modules()}
        self._names = {entry: names[entry] for entry in list_entry_modules(model)}
        self._hooks = {
            entry: entry.register_forward_pre_hook(self._check_first_call, with_kwargs=True) for entry in self._names
        }

    def _check_first_call(self, called_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare outputs at the first call of the model, or of a module in a container. Registered as a hook."""
        self._hooks.pop(called_module).remove()
        original_model, name = self._original_model, self._names.pop(called_module)
        if not self._names:
            del self._original_model
        difference = self._compare_outputs(original_model, name, (args, kwargs))
        if difference:
            raise make_refusal(f"run.place: plan: {describe_difference(difference, self._chunks)}", PLAN_ADVICE)

    def _compare_outputs(self, original_model: nn.Module, name: str, inputs: Arguments) -> ChunkDifference | None:
        first_tensor = next(iter(get_tensors(inputs)), None)
        device = torch.device("cpu") if first_tensor is None else first_tensor.device

        def run(model: nn.Module, arguments: Arguments) -> Any:
            args, kwargs = arguments
            return model.get_submodule(name)(*args, **kwargs)

        with preserve_rng_states(), drop_new_tensors(), torch.autocast(device.type, enabled=False):
            try:
                return find_quick_difference(original_model.to(device), self._split_model, inputs, run)
            except Exception as error:  # calling a custom model can raise any exception
                self._warn(f"{_SKIPPED_PREFIX} the comparison failed: {type(error).__name__}: {error}")
        return None
