"""Exports to ONNX using torch's exporter, for runtimes without Python."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import torch

from lockstep.errors import UsageError
from lockstep.exports.base import ExportSource
from lockstep.exports.to_torch import describe_sizes, trace_model
from lockstep.inference.saved import SavedModel

SUFFIX: Final = ".onnx"
SAME_KERNELS: Final = False

_REQUIRED_PACKAGES: Final = ("onnx", "onnxscript", "onnxruntime")
_MAX_BYTES: Final = 1 << 31  # maximum size in bytes, as in protobuf


def check(saved: SavedModel) -> None:
    """See Format."""
    missing = [name for name in _REQUIRED_PACKAGES if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"--to onnx: requires {', '.join(missing)}; run pip install 'lockstep-train[onnx]', or use --to torch"
        )
    size = sum(tensor.numel() * tensor.element_size() for tensor in saved.tensors.values())
    if size >= _MAX_BYTES:
        raise UsageError(
            f"--to onnx: the weights have {size:,} bytes, but a file can hold at most {_MAX_BYTES:,}; use --to torch"
        )


def write(export_source: ExportSource, path: Path) -> str:
    """See Format. The model card is stored as metadata, whose values are JSON."""
    program = trace_model(export_source)
    onnx_program = torch.onnx.export(program, dynamo=True, verbose=False)
    assert onnx_program is not None
    onnx_program.model.metadata_props.update(
        {name: json.dumps(value) for name, value in export_source.model_card.items()}
    )
    onnx_program.save(path, external_data=False)
    return describe_sizes(program)
