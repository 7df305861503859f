"""A few samples to check an export with: of the run's validation data where they are here, else made ones."""

from typing import Any, Final, NamedTuple

import numpy as np
import torch

from lockstep.core.batch import Inputs
from lockstep.errors import TrainingError, UsageError
from lockstep.inference.saved import SavedModel
from lockstep.setup.examples import transforms_of

_SAMPLES: Final = 3  # another number than the 2 that a program is traced with
_POSITIONS: Final = 16  # of a made sample whose length is not known


class Sample(NamedTuple):
    """Inputs of a model's forward, and where they come from, in words."""

    inputs: Inputs
    origin: str


def sample_of(saved: SavedModel) -> Sample:
    """Return a few samples as evaluation sees them. UsageError where there are none, and nothing says how to make some.

    Nothing is downloaded for it.
    """
    try:
        data = saved.open_data()
        split, name = (data.train, "training") if data.validation is None else (data.validation, "validation")
        count = min(_SAMPLES, len(split))
        batch = split.fetch(np.arange(count), None)
        arrived = transforms_of(saved.recipe, data, torch.device("cpu")).for_evaluation(batch)
        return Sample(saved.task(arrived).inputs(arrived), f"{count} samples of the {name} data")
    except (UsageError, TrainingError) as error:
        made = _synthesize(saved)
        if made is None:
            raise UsageError(
                f"{saved.path}: nothing to check the export with: the checkpoint does not say what its samples are, "
                f"and the data cannot be opened: {error}"
            ) from error
        return Sample(made, "made samples, since the data is not here")


def _synthesize(saved: SavedModel) -> Inputs | None:
    facts, generator = saved.facts, torch.Generator().manual_seed(0)
    if facts.vocabulary is not None:
        if facts.classes is not None:
            return None  # a text's mapping is that of its own data set
        length = facts.context or _POSITIONS
        return (torch.randint(facts.vocabulary, (_SAMPLES, length), generator=generator),)
    if facts.columns is not None and saved.recipe.data.options.get("codes"):
        sizes = [len(each["values"]) for each in facts.columns if "values" in each]
        codes = [torch.randint(size + 1, (_SAMPLES,), generator=generator) for size in sizes]
        numbers = torch.randn(_SAMPLES, len(facts.columns) - len(sizes), generator=generator)
        stacked = torch.stack(codes, 1) if codes else torch.empty(_SAMPLES, 0, dtype=torch.int64)
        named: dict[str, Any] = {"numbers": numbers, "categories": stacked}
        return (named,)
    if facts.shape is None:
        return None
    return (torch.randn(_SAMPLES, *facts.shape, generator=generator),)
