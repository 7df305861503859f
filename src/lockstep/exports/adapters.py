"""Writes the adapters of a run in the file format of peft, so that you can load them with peft."""

from pathlib import Path

import safetensors.torch

from lockstep.common.patterns import matches_any
from lockstep.core.shard import get_local_tensor
from lockstep.errors import UsageError
from lockstep.models.adapters import has_adapters, make_peft_config, to_peft_names
from lockstep.runs.remote import make_local_copy
from lockstep.setup.build import make_tuning
from lockstep.setup.resume import get_checkpoint_recipe
from lockstep.training.checkpoint import store


def export_adapters(run: str | Path, folder: str | Path) -> Path:
    """Write the adapters of a checkpoint, or of a run's newest checkpoint, for `PeftModel.from_pretrained`.

    This writes adapter_model.safetensors and adapter_config.json into `folder`, and returns its path. Modules that were
    trained together with the adapters (`recipe.model.lora.train`) are included as peft's modules_to_save. Raises
    UsageError if the run has no adapters.
    """
    checkpoint = store.load(make_local_copy(run))
    lora = make_tuning(get_checkpoint_recipe(checkpoint.path, checkpoint.snapshot)).lora
    if lora is None:
        raise UsageError(f"{checkpoint.path}: the run has no adapters; use its weights in {store.MODEL}")
    tensors = {name: get_local_tensor(tensor) for name, tensor in checkpoint.snapshot.model.items()}
    trained_names = {
        name for name, tensor in tensors.items() if matches_any(name, lora.train) and not has_adapters({name: tensor})
    }
    modules = sorted({name.rpartition(".")[0] for name in trained_names})
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    contiguous = {name: tensor.contiguous() for name, tensor in to_peft_names(tensors, modules).items()}
    # Don't use save_file, which makes the file readable for its owner only, regardless of the umask.
    (path / "adapter_model.safetensors").write_bytes(safetensors.torch.save(contiguous, {"format": "pt"}))
    make_peft_config(lora, modules).save_pretrained(str(path))
    return path
