"""Adds a frozen reference model to a language model, for tasks that compare the two.

The reference is the model at the start of training. If only adapters are trained, it is the model with its adapters
disabled, which needs no additional memory. Otherwise, it is a frozen copy that is a submodule of the model, so engines
shard it and checkpoints contain it.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.models.freezing import keep_in_eval_mode
from lockstep.tasks.batches import get_predictions
from lockstep.tasks.dpo import POLICY, REFERENCE, compute_answer_log_probs

PREFIX: Final = f"{REFERENCE}."  # prefix of the tensor names of a frozen copy


def add_reference(model: nn.Module, *, adapters_only: bool) -> None:
    """Add a reference to a model, and replace the model's forward method with one that runs both.

    The new method takes `input_ids` and `answers` of shape [n, 2, t], and returns the log-probabilities of the answers
    in the format of the Dpo task. If it is called without `answers`, it returns the outputs of the model. The parameter
    names of the model don't change. Set `adapters_only` if all parameters except for those of the adapters are frozen.
    """
    if not adapters_only:
        if REFERENCE in dict(model.named_children()):
            raise UsageError(
                f"recipe.task: dpo adds a module {REFERENCE} to the model, which already has one; rename it"
            )
        reference = copy.deepcopy(model).requires_grad_(False)
        _set_adapters_enabled(reference, enabled=False)
        keep_in_eval_mode(reference)
        model.add_module(REFERENCE, reference)
    model.forward = partial(_forward_policy_and_reference, model, adapters_only)


def remove_reference(model: nn.Module) -> None:
    """Remove the reference of a model, and restore its forward method. This is a no-op without a reference."""
    forward = vars(model).get("forward")
    if isinstance(forward, partial) and forward.func is _forward_policy_and_reference:
        del model.forward
        if REFERENCE in dict(model.named_children()):
            delattr(model, REFERENCE)


def _forward_policy_and_reference(
    model: nn.Module, adapters_only: bool, input_ids: Tensor, answers: Tensor | None = None
) -> Any:
    forward = type(model).forward
    if answers is None:
        return forward(model, input_ids)
    ids, targets = input_ids.flatten(0, 1), answers.flatten(0, 1)
    with torch.no_grad():
        if adapters_only:
            with _use_as_reference(model):
                outputs = forward(model, ids)
        else:
            outputs = model.get_submodule(REFERENCE)(ids)
        reference = compute_answer_log_probs(get_predictions(outputs), targets)
        del outputs  # the logits are large
    policy = compute_answer_log_probs(get_predictions(forward(model, ids)), targets)
    return {POLICY: policy.view(answers.shape[:2]), REFERENCE: reference.view(answers.shape[:2])}


@contextmanager
def _use_as_reference(model: nn.Module) -> Iterator[None]:
    """Disable adapters and dropout in the `with` block."""
    training = [module for module in model.modules() if module.training]
    _set_adapters_enabled(model, enabled=False)
    for module in training:
        module.training = False
    try:
        yield
    finally:
        _set_adapters_enabled(model, enabled=True)
        for module in training:
            module.training = True


def _set_adapters_enabled(model: nn.Module, *, enabled: bool) -> None:
    for name in [path for path, _ in model.named_modules()]:
        if name.endswith(".lora_A"):
            layer: Any = model.get_submodule(name.removesuffix(".lora_A"))
            # Don't call enable_adapters, because it would also change requires_grad.
            layer._disable_adapters = not enabled
