"""Example batches of training and evaluation data, for checks before a run."""

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import torch

from lockstep.common.text import format_count
from lockstep.config.base import section_to_dict
from lockstep.config.recipe import Recipe
from lockstep.core.batch import Batch, map_tensors
from lockstep.core.order import Step, Steps
from lockstep.data.base import DataSet, DeviceTransforms, NoTransforms, Request, Split
from lockstep.data.images.device_transforms import make_device_transforms
from lockstep.errors import TrainingError, UsageError

_MIN_NORM_SAMPLES: Final = 4  # with fewer samples, the batch variance of BatchNorm is hardly meaningful
_NUM_EXAMPLE_SAMPLES: Final = 4  # number of samples per split that are used in checks before a run
_MAX_TRIED_SAMPLES: Final = 64  # maximum number of samples to try until one can be read


def get_device_transforms(recipe: Recipe, data: DataSet) -> DeviceTransforms:
    """Return the transforms that a dataset applies to batches on the device, or a no-op if there are none."""
    return make_device_transforms(section_to_dict(recipe), data.facts) or NoTransforms()


def load_example_batches(recipe: Recipe, data: DataSet) -> tuple[Batch, Batch]:
    """Return a training batch and an evaluation batch with a few samples each.

    Raises UsageError if the recipe mixes samples whose targets can't be mixed.
    """
    transforms = get_device_transforms(recipe, data)
    request, fetched = _fetch_few_samples(data.train)
    if (recipe.mix.mixup or recipe.mix.cutmix) and fetched[1].is_floating_point():
        raise UsageError(
            f"dataset {recipe.data.name}: its targets are already mixed, so recipe.mix cannot mix them again; unset "
            f"recipe.mix.mixup and recipe.mix.cutmix"
        )
    _, validation = _fetch_few_samples(data.train if data.validation is None else data.validation)
    return transforms.transform_training_batch(
        transforms.prepare(fetched, request), 0, 0
    ), transforms.transform_evaluation_batch(validation)


def _fetch_few_samples(split: Split) -> tuple[Request, Batch]:
    """Fetch a few samples, or a single readable sample if any of them is unreadable. Returns the request and the batch.

    Unreadable samples aren't reported here, because training reports them later.
    """
    request = Request(np.unique(np.linspace(0, len(split) - 1, _NUM_EXAMPLE_SAMPLES).astype(np.int64)), None)
    try:
        return request, split.fetch(*request)
    except TrainingError:
        request = Request(np.array([_find_readable_sample(split)]), None)
        return request, split.fetch(*request)


def _find_readable_sample(split: Split) -> int:
    """Return the index of the first readable sample. If the first 64 samples are unreadable, raise a TrainingError."""
    for index in range(min(len(split), _MAX_TRIED_SAMPLES)):
        try:
            split.fetch(np.array([index]), None)
        except TrainingError:
            if index + 1 == min(len(split), _MAX_TRIED_SAMPLES):
                raise
        else:
            return index
    raise AssertionError  # unreachable, because no split is empty


def repeat_samples(batch: Batch, num_samples: int) -> Batch:
    """Return a batch with `num_samples` samples, by repeating the samples of `batch`."""
    return map_tensors(lambda tensor: tensor[torch.arange(num_samples) % len(tensor)], batch)


class SmallestMicrobatch(NamedTuple):
    """The size of the smallest micro-batch, a description of its step, and the settings that make it larger."""

    num_samples: int
    step_description: str
    advice: str


def find_smallest_microbatch(recipe: Recipe, steps: Steps) -> SmallestMicrobatch:
    """Return the smallest micro-batch of a run.

    With synchronized BatchNorm, which normalizes over a full step, the returned size is at least 2, unless the step has
    a single sample.
    """
    first_and_last = _get_first_and_last_step(steps)
    sizes = [min(map(len, step.microbatches(recipe.microbatches))) for step in first_and_last]
    if recipe.batchnorm == "sync":
        sizes = [min(max(2, size), step.samples) for size, step in zip(sizes, first_and_last, strict=True)]
    samples = min(sizes)
    step, is_last = first_and_last[sizes.index(samples)], sizes.index(samples) == 1
    count = len(step.microbatches(recipe.microbatches))
    parts = f" in {count:,} micro-batches, the smallest of {format_count(samples, 'sample')}" if count > 1 else ""
    return SmallestMicrobatch(
        samples,
        f"{'the last step of an epoch' if is_last else 'a step'} has {format_count(step.samples, 'sample')}{parts}",
        "set recipe.last_batch=drop, or change recipe.batch or recipe.microbatches"
        if is_last
        else "use a larger recipe.batch or fewer recipe.microbatches",
    )


def list_batchnorm_warnings(recipe: Recipe, steps: Steps) -> Iterator[str]:
    """Yield a warning if BatchNorm normalizes over too few samples to compute meaningful statistics."""
    for step, step_name in zip(_get_first_and_last_step(steps), ("a step", "the last step of an epoch"), strict=True):
        is_sync = recipe.batchnorm == "sync"
        smallest = step.samples if is_sync else min(map(len, step.microbatches(recipe.microbatches)))
        if smallest < _MIN_NORM_SAMPLES and is_sync:
            yield (
                f"recipe.batch: BatchNorm normalizes over {step_name}, which has only {smallest} samples; use a larger "
                f"batch{_format_last_batch_advice(step)}"
            )
            return
        if smallest < _MIN_NORM_SAMPLES:
            yield (
                f"recipe.microbatches: BatchNorm normalizes each micro-batch separately, but {step_name} has "
                f"{format_count(step.samples, 'sample')} in {recipe.microbatches} micro-batches, the smallest of "
                f"{format_count(smallest, 'sample')}; use fewer micro-batches or a larger "
                f"batch{_format_last_batch_advice(step)}"
            )
            return


def _format_last_batch_advice(step: Step) -> str:
    return ", or set recipe.last_batch=drop" if step.number else ""


def _get_first_and_last_step(steps: Steps) -> tuple[Step, Step]:
    """Return the first and the last step of an epoch. The last step may have fewer samples."""
    return steps[0], steps[min(steps.per_epoch, steps.total) - 1]
