"""Samples for checking an export: samples of the run's dataset if it is on this machine, or else synthetic samples."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from lockstep.core.batch import Inputs
from lockstep.errors import TrainingError, UsageError
from lockstep.inference.saved import SavedModel
from lockstep.setup.examples import get_device_transforms
from lockstep.tasks.dpo import ANSWERS, IDS

_SAMPLES: Final = 3  # must differ from 2, the number of samples that programs are traced with (to_torch.py)
_POSITIONS: Final = 16  # number of tokens in a synthetic sample if the context length is unknown


class SampleInputs(NamedTuple):
    """The inputs of a forward pass, and a description of their origin."""

    inputs: Inputs
    origin: str


def make_sample(saved: SavedModel) -> SampleInputs:
    """Return a few samples, preprocessed as in an evaluation. Data isn't downloaded.

    If there is no validation split, training samples are used. If the dataset isn't available, synthetic samples are
    returned. Raises UsageError if the checkpoint doesn't contain enough information to synthesize samples.
    """
    try:
        data = saved.open_data()
        split, name = (data.train, "training") if data.validation is None else (data.validation, "validation")
        count = min(_SAMPLES, len(split))
        batch = split.fetch(np.arange(count), None)
        transformed = get_device_transforms(saved.recipe, data).transform_evaluation_batch(batch)
        real_inputs = saved.find_task(transformed).inputs(transformed)
        if isinstance(real_inputs, Mapping) and ANSWERS in real_inputs:
            real_inputs = (real_inputs[IDS].flatten(0, 1),)  # the export doesn't contain the reference model
        return SampleInputs(real_inputs, f"{count} samples of the {name} data")
    except (UsageError, TrainingError) as error:
        inputs = _synthesize_inputs(saved)
        if inputs is None:
            raise UsageError(
                f"{saved.path}: cannot check the export, because the checkpoint does not describe its samples, and the "
                f"data cannot be opened: {error}"
            ) from error
        return SampleInputs(inputs, "synthetic samples, because the data is not available")


def _synthesize_inputs(saved: SavedModel) -> Inputs | None:
    facts, generator = saved.dataset_info, torch.Generator().manual_seed(0)
    if facts.vocabulary is not None:
        if facts.classes is not None:
            return None  # the inputs of a text classifier depend on its dataset
        length = facts.context or _POSITIONS
        return (torch.randint(facts.vocabulary, (_SAMPLES, length), generator=generator),)
    if facts.columns is not None and saved.recipe.data.options.get("codes"):
        sizes = [len(column["values"]) for column in facts.columns if "values" in column]
        codes = [torch.randint(size + 1, (_SAMPLES,), generator=generator) for size in sizes]
        numbers = torch.randn(_SAMPLES, len(facts.columns) - len(sizes), generator=generator)
        stacked = torch.stack(codes, 1) if codes else torch.empty(_SAMPLES, 0, dtype=torch.int64)
        inputs: dict[str, Any] = {"numbers": numbers, "categories": stacked}
        return (inputs,)
    if facts.shape is None:
        return None
    return (torch.randn(_SAMPLES, *facts.shape, generator=generator),)
