"""Writes the adapters of a run as files of peft, so that you can load them with peft."""

from pathlib import Path

import safetensors.torch

from lockstep.common.patterns import matches
from lockstep.core.shard import local_tensor
from lockstep.errors import UsageError
from lockstep.models.adapters import has_adapters, peft_config, peft_names
from lockstep.setup.build import tuning_of
from lockstep.setup.resume import checkpoint_recipe
from lockstep.training.checkpoint import store


def export_adapters(run: str | Path, folder: str | Path) -> None:
    """Write the adapters of a checkpoint, or of a run's newest checkpoint, for `PeftModel.from_pretrained`.

    `folder` receives adapter_model.safetensors and adapter_config.json. Modules that were trained next to the adapters
    (`recipe.model.lora.train`) are included as peft's modules_to_save. Raises UsageError if the run has no adapters.
    """
    found = store.load(Path(run))
    lora = tuning_of(checkpoint_recipe(found.path, found.snapshot)).lora
    if lora is None:
        raise UsageError(f"{found.path}: the run has no adapters; its weights are in {store.MODEL}")
    tensors = {name: local_tensor(held) for name, held in found.snapshot.model.items()}
    beside = {name for name, each in tensors.items() if matches(name, lora.train) and not has_adapters({name: each})}
    modules = sorted({name.rpartition(".")[0] for name in beside})
    Path(folder).mkdir(parents=True, exist_ok=True)
    named = {name: each.contiguous() for name, each in peft_names(tensors, modules).items()}
    safetensors.torch.save_file(named, Path(folder) / "adapter_model.safetensors", {"format": "pt"})
    peft_config(lora, modules).save_pretrained(str(folder))
