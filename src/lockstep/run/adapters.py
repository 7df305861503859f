"""The adapters of a run in peft's own files, to be loaded with peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import safetensors.torch
from pydantic import ValidationError

from lockstep.common.patterns import matches
from lockstep.config import recipe as config
from lockstep.config.recipe import Recipe
from lockstep.core.shard import local_tensor
from lockstep.errors import UsageError
from lockstep.models.adapters import Lora, has_adapters, peft_config, peft_names
from lockstep.models.finetuning import Tuning
from lockstep.training.checkpoint import saved_state, store


def lora_of(given: config.LoraConfig) -> Lora:
    """Return what the recipe says of adapters."""
    return Lora(given.target_modules, given.r, given.alpha, given.dropout, given.rslora, given.train)


def tuning_of(recipe: Recipe) -> Tuning:
    """Return what the recipe says is done to a model once it is built."""
    lora = recipe.model.lora
    return Tuning(None if lora is None else lora_of(lora), recipe.model.freeze, recipe.batchnorm == "frozen")


def export_adapters(run: str | Path, folder: str | Path) -> None:
    """Write the adapters of a run's newest checkpoint, or of a checkpoint, as PeftModel.from_pretrained reads them.

    `folder` gets adapter_model.safetensors and adapter_config.json. Modules that were trained beside the adapters
    (`recipe.model.lora.train`) are in it as peft's modules_to_save. UsageError where the run has no adapters.
    """
    found = store.load(Path(run))
    recipe = _recipe(found.path, saved_state.parse_state(found.path, found.snapshot.state).recipe)
    if recipe.model.lora is None:
        raise UsageError(f"{found.path}: the run has no adapters; its weights are in {store.MODEL}")
    lora = lora_of(recipe.model.lora)
    tensors = {name: local_tensor(held) for name, held in found.snapshot.model.items()}
    beside = {name for name, each in tensors.items() if matches(name, lora.train) and not has_adapters({name: each})}
    modules = sorted({name.rpartition(".")[0] for name in beside})
    Path(folder).mkdir(parents=True, exist_ok=True)
    named = {name: each.contiguous() for name, each in peft_names(tensors, modules).items()}
    safetensors.torch.save_file(named, Path(folder) / "adapter_model.safetensors", {"format": "pt"})
    peft_config(lora, modules).save_pretrained(str(folder))


def _recipe(path: Path, given: Any) -> Recipe:
    try:
        return Recipe.model_validate(given)
    except ValidationError as error:
        raise UsageError(f"{path}: its recipe is none of this version") from error
