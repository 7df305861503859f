"""Exports to a safetensors file that contains the model's state dict.

Its metadata contains the model card and the function that builds the model.
"""

import json
from pathlib import Path
from typing import Any, Final

import safetensors.torch
from torch import nn

from lockstep.common import plainfile
from lockstep.exports.base import ExportSource
from lockstep.inference.saved import SavedModel
from lockstep.models.hugging_face import is_transformers_model

SUFFIX: Final = ".safetensors"
SAME_KERNELS: Final = True


def check(saved: SavedModel) -> None:
    """Accept every run. See Format."""


def write(export_source: ExportSource, path: Path) -> str:
    """See Format."""
    # Clone the tensors, because tied weights share memory, which a safetensors file can't represent.
    tensors = {name: tensor.contiguous().clone() for name, tensor in export_source.model.state_dict().items()}
    card = {**export_source.model_card, "build": describe_builder(export_source.saved, export_source.model)}
    metadata = {name: value if isinstance(value, str) else json.dumps(value) for name, value in card.items()}
    safetensors.torch.save_file(tensors, path, {**metadata, "format": "pt"})
    return ""


def describe_builder(saved: SavedModel, model: nn.Module) -> dict[str, Any]:
    """Return a JSON-compatible dict with the function that builds the model of a run, and the function's arguments.

    For a transformers model, the dict contains the class and the config instead.
    """
    if is_transformers_model(model):
        config = plainfile.parse_json(model.config.to_json_string(use_diff=False))  # type: ignore[union-attr, operator]
        return {"class": type(model).__name__, "config": config}
    construction = saved.get_construction()
    return {"function": construction.function, "arguments": construction.arguments, "options": construction.options}
