"""Exports to a torch.export program, which contains the operations and weights of a model and only needs torch."""

import json
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from lockstep.common.user_code import describe_error
from lockstep.core.batch import map_tensors
from lockstep.errors import UsageError
from lockstep.exports.base import ExportSource
from lockstep.inference.saved import SavedModel
from lockstep.tasks.batches import get_predictions

SUFFIX: Final = ".pt2"
SAME_KERNELS: Final = False  # torch.export may decompose operations that have a fused kernel

_TRACED_SAMPLES: Final = 2  # with a single sample, torch would specialize the program for a batch size of 1
_CARD_FILE: Final = "lockstep.json"  # name of the model card file within the program


def check(saved: SavedModel) -> None:
    """See Format. Accepts all runs, because only tracing in `write` shows whether the model can be traced."""


def write(export_source: ExportSource, path: Path) -> str:
    """See Format."""
    program = trace_model(export_source)
    program.example_inputs = None
    torch.export.save(program, path, extra_files={_CARD_FILE: json.dumps(export_source.model_card)})
    return describe_sizes(program)


def trace_model(export_source: ExportSource) -> torch.export.ExportedProgram:
    """Trace the model with torch.export, and return the program.

    The batch size is dynamic if the model supports this. For token inputs, the sequence length is dynamic too. Raises
    UsageError if the model can't be traced.
    """
    inputs = export_source.inputs
    arguments = tuple(inputs.values()) if isinstance(inputs, dict) else tuple(inputs)
    # Trace with zeros, because a program may contain its example inputs, and samples may be private.
    zeros = map_tensors(
        lambda tensor: torch.zeros_like(tensor[:1]).expand(_TRACED_SAMPLES, *tensor.shape[1:]).clone(), arguments
    )
    has_tokens = export_source.saved.dataset_info.vocabulary is not None
    shapes = map_tensors(lambda tensor: _mark_dynamic_dims(tensor, has_tokens), arguments)
    model = SingleOutput(export_source.model, list(inputs) if isinstance(inputs, dict) else None).eval()
    try:
        return torch.export.export(model, zeros, dynamic_shapes=(shapes,))
    except Exception as error:  # model code and torch's tracer may raise any exception
        first = describe_error(error).splitlines()[0]
        raise UsageError(
            f"{export_source.saved.name}: torch.export cannot trace the model: {first}; export only the weights with "
            f"--to safetensors"
        ) from error


def describe_sizes(program: torch.export.ExportedProgram) -> str:
    """Describe the input sizes that a program supports, such as `inputs of shape [any, 3, 8, 8]`."""
    names = set(program.graph_signature.user_inputs)
    values = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder" and node.name in names]
    shapes = [", ".join(str(size) if isinstance(size, int) else "any" for size in value.shape) for value in values]
    return f"inputs of shape {' and '.join(f'[{shape}]' for shape in shapes)}"


def _mark_dynamic_dims(tensor: Tensor, has_tokens: bool) -> dict[int, Any]:
    dynamic_dims = [0, 1] if has_tokens and tensor.ndim == 2 else [0]
    return {
        dim: torch.export.Dim.AUTO if dim in dynamic_dims else torch.export.Dim.STATIC for dim in range(tensor.ndim)
    }


@final
class SingleOutput(nn.Module):
    """Wraps a model so that it takes positional inputs and returns a single tensor, as exported programs require."""

    def __init__(self, model: nn.Module, input_names: list[str] | None) -> None:
        super().__init__()
        self.model = model
        self._names = input_names

    def forward(self, *inputs: Any) -> Tensor:
        """Return the predictions of the model."""
        if self._names is None:
            return get_predictions(self.model(*inputs))
        return get_predictions(self.model(**dict(zip(self._names, inputs, strict=True))))
