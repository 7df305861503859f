"""Checks for post-training: packed conversations must be independent, and reference models must be supported."""

from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.common.user_code import UserCode
from lockstep.core.batch import call_model, get_tensors
from lockstep.data.items import preserve_rng_states
from lockstep.device.cached_tensors import drop_new_tensors
from lockstep.errors import UsageError
from lockstep.models.initialization import initialize_model
from lockstep.setup.build import Setup, make_model_builder
from lockstep.setup.resolved import ResolvedConfig
from lockstep.tasks.batches import get_predictions
from lockstep.tasks.dpo import Dpo
from lockstep.tasks.sft import POSITIONS

# The maximum number of parameters of a model that is checked with all its layers.
_MAX_CHECKED_PARAMETERS: Final = 250_000_000
_REDUCED_NUM_LAYERS: Final = 2
_SEQUENCE_LENGTH: Final = 8  # length of each sequence, whose ids are drawn from a sample
# Maximum difference due to a different input shape, relative to the largest magnitude.
_MAX_RELATIVE_DIFFERENCE: Final = 2.0**-10


def check_reference(resolved: ResolvedConfig, setup: Setup) -> None:
    """Raise UsageError if the task has a reference model, but the recipe or the strategy doesn't support one."""
    if not isinstance(setup.task, Dpo):
        return
    recipe, strategy = resolved.recipe, resolved.strategy
    if resolved.strategy_name == "pipeline" or strategy.mesh(resolved.processes).pipe > 1:
        raise UsageError(
            f"strategy {resolved.strategy_name}: not supported by task dpo, which runs the model and then its "
            f"reference, so there is no single sequence of modules to split into stages; use strategy ddp, zero1, "
            f"zero2, zero3 or hsdp"
        )
    for key, value in {"chunks": recipe.model.chunks, "sequence_chunks": recipe.model.sequence_chunks}.items():
        if value > 1:
            raise UsageError(f"recipe.model.{key}: not supported by task dpo; remove it")
    if recipe.compile:
        raise UsageError("recipe.compile: not supported by task dpo; set recipe.compile=false")


def check_packing(setup: Setup) -> None:
    """Raise UsageError if a sequence affects the outputs of the sequence that is packed after it.

    The outputs of a packed sequence must match its outputs without packing, and must not change by a single bit if the
    sequence before it changes.
    """
    if not setup.data.facts.get("packed"):
        return
    name = setup.problem.name
    with preserve_rng_states(), drop_new_tensors():
        model = _build_random_model(setup).eval()
        with torch.no_grad(), UserCode(name):
            sample = get_tensors(setup.data.train.fetch(np.array([0]), None))[0].flatten()
            first, second, other = sample[torch.randint(len(sample), (3, 1, _SEQUENCE_LENGTH))]
            packed, changed = _compute_outputs(model, first, second), _compute_outputs(model, other, second)
            alone = _compute_outputs(model, second)
    tail = packed[:, _SEQUENCE_LENGTH:]
    leaks = not torch.equal(tail, changed[:, _SEQUENCE_LENGTH:])
    if leaks or not (tail - alone).abs().max() <= _MAX_RELATIVE_DIFFERENCE * alone.abs().max():
        raise UsageError(
            f"{name}: recipe.data.options.pack: a packed conversation "
            f"{'affects the conversation after it' if leaks else 'has different outputs than on its own'}, because the "
            f"model does not start a new sequence where {POSITIONS} restart at 0; remove pack, or use a model that "
            f"does, such as llama or qwen3"
        )


def _build_random_model(setup: Setup) -> nn.Module:
    """Build the model with random weights. If it is large, it is built with fewer layers (num_hidden_layers)."""
    if setup.summary.num_parameters <= _MAX_CHECKED_PARAMETERS:
        return initialize_model(setup.build_blank, setup.recipe.seed)
    model = setup.recipe.model
    options = {**model.options, "num_hidden_layers": _REDUCED_NUM_LAYERS}
    recipe = setup.recipe.model_copy(update={"model": model.model_copy(update={"options": options})})
    return initialize_model(make_model_builder(recipe, setup.data.facts), setup.recipe.seed)


def _compute_outputs(model: nn.Module, *sequences: Tensor) -> Tensor:
    positions = torch.cat([torch.arange(sequence.shape[1])[None] for sequence in sequences], 1)
    return get_predictions(call_model(model, {"input_ids": torch.cat(sequences, 1), POSITIONS: positions}))
