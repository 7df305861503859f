"""Opens the checkpoint of a run for inference: its weights, its dataset properties, and its evaluation forward pass."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, final

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor, nn

from lockstep.common.rank import ALONE
from lockstep.common.user_code import UserCode
from lockstep.config.base import section_to_dict
from lockstep.config.placement import Placement
from lockstep.config.recipe import Recipe
from lockstep.core.batch import Batch, Inputs, call_model, map_tensors
from lockstep.core.shard import get_local_tensor
from lockstep.data.base import DataSet
from lockstep.data.images.lazy_images import CropSettings, get_crop_settings
from lockstep.data.request import make_data_request
from lockstep.device.precision import autocast
from lockstep.errors import UsageError
from lockstep.models.find import Construction, make_construction
from lockstep.models.finetuning import build_finetuned
from lockstep.models.initialization import initialize_model
from lockstep.parallel.numerics import Numerics
from lockstep.parallel.weights import convert_compute_dtype, convert_parameters, widen_batchnorm
from lockstep.run.evaluation import EvalRequest, open_checkpoint
from lockstep.run.session import prepare_device
from lockstep.setup.build import get_evaluation_batch_size, make_model_builder, make_tuning, open_recipe_data
from lockstep.setup.resume import check_tensors
from lockstep.tasks.base import Task
from lockstep.tasks.find import find_task
from lockstep.training.checkpoint import saved_state, store

Weights = Literal["model", "ema"]

_MAX_PROBLEMS: Final = 3  # maximum number of invalid dataset properties in an error message


class DatasetInfo(BaseModel):
    """The dataset properties in a checkpoint that inference needs, after validation.

    They are validated, because a run folder may come from an untrusted source. See DataSet.facts for their meaning.
    """

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    classes: list[str] | None = None
    shape: list[int] | None = None
    mean: list[float] | None = None
    std: list[float] | None = None
    pixels: bool = False
    outputs: int | None = None
    targets: list[str] | None = None
    columns: list[dict[str, Any]] | None = None
    vocabulary: int | None = None
    context: int | None = None
    tokenizer: dict[str, Any] | None = None


@dataclass(frozen=True)
class SavedModel:
    """A checkpoint that was saved after `step` steps, opened for inference.

    `tensors` contains the model weights, or their moving average if `weights` is `ema`. `stored_dataset_info` contains
    all dataset properties in the checkpoint, and `dataset_info` contains those that were validated. `notes` and
    `problems` are messages for the user.
    """

    path: Path
    step: int
    weights: Weights
    tensors: Mapping[str, Tensor]
    weights_sha256: str
    recipe: Recipe
    placement: Placement
    stored_dataset_info: Mapping[str, Any]
    dataset_info: DatasetInfo
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of the model for error messages."""
        return f"model {self.recipe.model.name}"

    @property
    def messages(self) -> list[str]:
        """The notes and problems as lines of text for the user."""
        return [*(f"note: {note}" for note in self.notes), *(f"warning: {problem}" for problem in self.problems)]

    @property
    def description(self) -> str:
        """A description of the checkpoint and its weights."""
        averaged = ", averaged weights (ema)" if self.weights == "ema" else ""
        return f"{self.path}, after step {self.step}{averaged}"

    @property
    def mean_and_std(self) -> tuple[list[float] | None, list[float] | None]:
        """The mean and standard deviation of each channel for normalizing samples.

        Values in the recipe take precedence over the values of the dataset. Each is None if neither sets it.
        """
        mean, std = self.recipe.data.mean or self.dataset_info.mean, self.recipe.data.std or self.dataset_info.std
        return list(mean) if mean else None, list(std) if std else None

    @property
    def crop_settings(self) -> CropSettings | None:
        """The crop settings of evaluations, or None if evaluations don't crop or resize images."""
        request = make_data_request(section_to_dict(self.recipe.data))
        return get_crop_settings(request) if request.changes_size else None

    @property
    def tokenizer_type(self) -> str | None:
        """The tokenizer type of the run: `byte`, `character`, or `tokenizer` for a tokenizer file.

        None if the dataset of the run has no tokenizer.
        """
        unit = (self.dataset_info.tokenizer or {}).get("by")
        return unit if unit in ("byte", "character", "tokenizer") else None

    def open_data(self) -> DataSet:
        """Open the dataset that the run was trained on, without downloading it."""
        return open_recipe_data(self.recipe, allow_download=False)

    def get_construction(self) -> Construction:
        """Return the function that builds the model, together with its arguments."""
        model = self.recipe.model
        return make_construction(
            name=model.name, source=model.source, options=model.options, dataset_info=self.stored_dataset_info
        )

    def find_task(self, example: Batch = None) -> Task:
        """Return the task of the run.

        `example` is a batch with a few samples. It is required if the dataset properties don't determine the task.
        """
        return find_task(section_to_dict(self.recipe), self.name, self.stored_dataset_info, example).task

    def build_model(self) -> nn.Module:
        """Build the model without chunks, and load the trained weights.

        The model is on the CPU, in evaluation mode, and doesn't require gradients.

        Raises UsageError if the weights don't match the model of the recipe.
        """
        recipe = self.recipe
        # Don't load pretrained weights, because the checkpoint contains all weights.
        build_plain_model = make_model_builder(recipe, self.stored_dataset_info)
        model = initialize_model(partial(build_finetuned, build_plain_model, make_tuning(recipe)), recipe.seed)
        check_tensors(self.path, self.tensors, model.state_dict())
        model.load_state_dict(dict(self.tensors))
        return model.eval().requires_grad_(False)

    def prepare_model(self) -> "EvaluationModel":
        """Build the model, and prepare it on the device of the run for evaluation forward passes.

        Unlike during training, the model isn't split into chunks.
        """
        recipe = self.recipe
        device = prepare_device(self.placement, ALONE, recipe)
        return EvaluationModel(self.build_model(), recipe, device)


@final
class EvaluationModel:
    """A model on its device that runs evaluation forward passes, with the run's precision, dtypes and memory format."""

    def __init__(self, model: nn.Module, recipe: Recipe, device: torch.device) -> None:
        self.device = device
        self.batch_size = get_evaluation_batch_size(recipe)
        self._name = f"model {recipe.model.name}"
        self._numerics = Numerics(recipe)
        self._autocast = autocast(recipe.precision, device)
        layout = torch.channels_last if self._numerics.channels_last else torch.preserve_format
        self._model = model.to(device, memory_format=layout)  # type: ignore[call-overload]
        if self._numerics.weight_dtype is not None:  # the dtype in which the run stores the weights
            widen_batchnorm(self._model)
            convert_parameters(self._model, self._numerics.weight_dtype)
        else:
            convert_compute_dtype(self._model, self._numerics.copy_dtype)

    @torch.no_grad()
    def __call__(self, inputs: Inputs) -> Any:
        """Move the inputs to the device, and return the outputs of the forward pass."""
        device_inputs = map_tensors(lambda tensor: tensor.to(self.device), inputs)
        with self._autocast, UserCode(self._name):
            outputs = call_model(self._model, self._numerics.prepare_inputs(device_inputs))
        return self._numerics.prepare_outputs(outputs)


def open_saved(request: EvalRequest, weights: Weights | None = None) -> SavedModel:
    """Open a checkpoint as `lockstep eval` does. User code in the recipe only runs if the request allows it.

    By default, averaged weights (EMA) are used if the run has them. Raises UsageError if `weights` is `ema` and the run
    has no averaged weights.
    """
    if weights not in (None, "model", "ema"):
        raise UsageError(f"weights: expected 'model' or 'ema', got {weights!r}")
    checkpoint, loaded = open_checkpoint(request)
    state = saved_state.parse_state(checkpoint.path, checkpoint.snapshot.state)
    recipe, average = loaded.config.recipe, checkpoint.snapshot.ema
    weights_name: Weights = weights or ("model" if average is None else "ema")
    if weights_name == "ema" and average is None:
        raise UsageError(f"{checkpoint.path}: the run has no averaged weights (recipe.ema); use --weights model")
    tensors = checkpoint.snapshot.model if weights_name == "model" or average is None else average
    return SavedModel(
        path=checkpoint.path,
        step=state.progress.step,
        weights=weights_name,
        tensors={name: get_local_tensor(tensor) for name, tensor in tensors.items()},
        weights_sha256=store.weights_sha256(tensors),
        recipe=recipe,
        placement=loaded.config.placement,
        stored_dataset_info=state.data,
        dataset_info=_validate_dataset_info(checkpoint.path, state.data),
        notes=tuple(loaded.notes),
        problems=tuple(checkpoint.problems),
    )


def _validate_dataset_info(path: Path, stored_dataset_info: Mapping[str, Any]) -> DatasetInfo:
    try:
        return DatasetInfo.model_validate(dict(stored_dataset_info))
    except ValidationError as error:
        lines: Sequence[str] = [
            f"data.{'.'.join(map(str, problem['loc']))}: {problem['msg'].lower()}"
            for problem in error.errors()[:_MAX_PROBLEMS]
        ]
        raise UsageError(
            "\n".join([f"{path / store.STATE}: does not have the format of this version:", *lines])
        ) from None
