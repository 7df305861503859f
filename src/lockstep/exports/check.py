"""Checks an export: runs it in a process without Lockstep, and compares its outputs with those of the run's model."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

# torch has no public API for its pytrees.
from torch.utils import _pytree as pytree

from lockstep.common.text import printable
from lockstep.core.batch import Inputs, get_tensors, leaves_with_paths
from lockstep.core.tolerance import compute_tolerance, compute_unit_roundoff
from lockstep.errors import TrainingError, UsageError
from lockstep.exports import as_user

_MAX_ERROR_LINES: Final = 6  # number of stderr lines of the other process in an error message


class Deviation(NamedTuple):
    """The largest difference between two outputs, and the tolerance, both relative to the largest magnitude."""

    difference: float
    tolerance: float

    @property
    def description(self) -> str:
        """The deviation as text for the user."""
        if self.difference == 0:
            return "the outputs are equal, bit for bit"
        return f"the outputs differ by {self.difference:.2g} of the largest output (tolerance {self.tolerance:.2g})"


def check_export(
    format_name: str, path: Path, model: nn.Module, inputs: Inputs, outputs: Tensor, job: Mapping[str, Any], exact: bool
) -> Deviation:
    """Run the export at `path` on `inputs` in a separate process, and compare the result with `outputs`.

    `outputs` are the outputs of the run's model. `job` contains further settings for the process. With `exact`, the
    outputs must be equal. Otherwise, they may differ by the rounding errors of two forward passes in fp32. Raises
    TrainingError if the export can't be loaded, or if its outputs differ too much.
    """
    actual = _run_export(format_name, path, inputs, job)
    tolerance = 0.0 if exact else _compute_tolerance(model, inputs)
    if actual.shape != outputs.shape or actual.dtype != outputs.dtype:
        raise TrainingError(
            f"export to {format_name}: the loaded export returns {actual.dtype} of shape {list(actual.shape)}, but the "
            f"model of the run returns {outputs.dtype} of shape {list(outputs.shape)}, so nothing was written; use a "
            f"different --to"
        )
    if torch.equal(actual, outputs):
        return Deviation(0.0, tolerance)
    scale = max(float(outputs.abs().max()), torch.finfo(torch.float32).tiny)
    difference = float((actual.double() - outputs.double()).abs().max()) / scale
    if not difference <= tolerance:  # this condition also catches NaN
        raise TrainingError(
            f"export to {format_name}: the outputs of the loaded export differ from those of the run's model by "
            f"{difference:.2g} of the largest output (tolerance {tolerance:.2g}), so nothing was written; use a "
            f"different --to"
        )
    return Deviation(difference, tolerance)


def _run_export(format_name: str, path: Path, inputs: Inputs, job: Mapping[str, Any]) -> Tensor:
    with TemporaryDirectory() as folder:
        save_file(_map_positions_to_tensors(inputs), Path(folder, "inputs.safetensors"))
        structure = pytree.treespec_dumps(pytree.tree_structure(_replace_named_tuples(inputs)))
        Path(folder, "job.json").write_text(json.dumps({**job, "inputs": structure}, default=list), encoding="utf-8")
        # Run offline, because the export must contain everything that is needed to load it.
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, as_user.__file__, format_name, str(path.absolute()), folder]
        completed = subprocess.run(command, capture_output=True, text=True, env=environment)
        if completed.returncode:
            output = printable("\n".join(completed.stderr.strip().splitlines()[-_MAX_ERROR_LINES:]))
            raise TrainingError(f"export to {format_name}: cannot load the export, so nothing was written:\n{output}")
        return load_file(Path(folder, "outputs.safetensors"))["outputs"]


def _replace_named_tuples(inputs: Inputs) -> Any:
    """Replace named tuples in the inputs with plain tuples, because the other process may not have their classes."""
    is_namedtuple = pytree.is_namedtuple_instance
    return pytree.tree_map(lambda leaf: tuple(leaf) if is_namedtuple(leaf) else leaf, inputs, is_leaf=is_namedtuple)


def _map_positions_to_tensors(inputs: Inputs) -> dict[str, Tensor]:
    """Return the tensors of the inputs by position. The keys are strings, as safetensors requires."""
    non_tensors = [name for name, leaf in leaves_with_paths(inputs) if not isinstance(leaf, Tensor)]
    if non_tensors:
        raise UsageError(
            f"the model's input {non_tensors[0]} is not a tensor; wrap the model in a function with tensor inputs only"
        )
    return {str(number): tensor.contiguous().clone() for number, tensor in enumerate(get_tensors(inputs))}


def _compute_tolerance(model: nn.Module, inputs: Inputs) -> float:
    """Return the relative tolerance between two forward passes in fp32 that may sum in different orders."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    positions = max((leaf.shape[1] for _, leaf in leaves_with_paths(inputs) if leaf.ndim > 1), default=1)
    length = max([positions, *(parameter.numel() // len(parameter) for parameter in matrices)])
    return compute_tolerance(compute_unit_roundoff("fp32"), length, max(1, len(matrices)), num_steps=1)
