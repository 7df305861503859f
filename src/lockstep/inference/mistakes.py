"""Sections of a report about a classifier's mistakes: confused classes, and the samples with the largest losses."""

import io
from base64 import b64encode
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple, final

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lockstep.common.text import format_count
from lockstep.core.batch import get_tensors
from lockstep.inference.confusions import make_confusion_sections
from lockstep.inference.validation_pass import EvaluatedBatch, Validation
from lockstep.reporting.page import Paragraphs, Section, Table, Tile, Tiles
from lockstep.tasks.batches import get_predictions, get_targets
from lockstep.tasks.classification import Classification, get_target_classes

_MAX_MISTAKES: Final = 24  # maximum number of mistakes that are shown
_CHANNELS: Final = (1, 3)
_THUMBNAIL_SIDE: Final = 112  # maximum side length of a thumbnail in pixels


class Mistake(NamedTuple):
    """A misclassified sample: its index, its true and predicted class, and the probabilities of both classes."""

    sample_index: int
    target: int
    predicted: int
    target_probability: float
    predicted_probability: float


@final
@dataclass(frozen=True)
class ClassPredictions:
    """The predictions for all valid samples, as tensors of shape [samples].

    `sample_indices`, `targets` (true classes) and `predicted` (predicted classes) are int64. `losses` are the cross
    entropies of the softmax, regardless of the loss function of the run. `probabilities` are the probabilities of the
    predicted classes. Both are float64.
    """

    sample_indices: Tensor
    targets: Tensor
    predicted: Tensor
    losses: Tensor
    probabilities: Tensor

    def find_worst_mistakes(self, limit: int = _MAX_MISTAKES) -> list[Mistake]:
        """Return up to `limit` misclassified samples, with the largest loss first."""
        indices = (self.targets != self.predicted).nonzero()[:, 0]
        order = indices[self.losses[indices].nan_to_num(torch.inf).argsort(descending=True, stable=True)][:limit]
        columns = (self.sample_indices, self.targets, self.predicted, (-self.losses).exp(), self.probabilities)
        return [Mistake(*row) for row in zip(*(column[order].tolist() for column in columns), strict=True)]


def make_mistake_sections(
    run: str, task: Classification, validation: Validation, batches: Iterable[EvaluatedBatch]
) -> list[Section]:
    """Return the confusion sections, and a section with the mistakes that have the largest losses.

    Mistakes are shown with thumbnails if the samples are images. Otherwise, they are listed in a table.
    """
    result = collect_predictions(task, batches)
    ones = torch.ones_like(result.targets)
    sections = make_confusion_sections(run, task.classes, result.targets, result.predicted, ones, "samples")
    return [*sections, _make_worst_mistakes_section(f"{run}: worst mistakes", task, validation, result)]


def collect_predictions(task: Classification, batches: Iterable[EvaluatedBatch]) -> ClassPredictions:
    """Return the predictions for the valid samples of all batches."""
    rows = [_compute_predictions(task, batch) for batch in batches]
    return ClassPredictions(*(torch.cat(column) for column in zip(*rows, strict=True)))


def _make_worst_mistakes_section(
    title: str, task: Classification, validation: Validation, predictions: ClassPredictions
) -> Section:
    worst, class_names, get_name = predictions.find_worst_mistakes(), task.classes, validation.get_sample_name
    if not worst:
        return Paragraphs(title, ["There are no mistakes."])
    count = int((predictions.targets != predictions.predicted).sum())
    note = f"{format_count(len(worst), 'mistake')} of {count:,}, sorted by cross entropy, largest first."
    fetched = validation.split.fetch(np.array([mistake.sample_index for mistake in worst]), None)
    samples = get_tensors(task.inputs(fetched))[0]
    if not are_images(samples):
        rows = [
            [
                get_name(mistake.sample_index),
                class_names[mistake.target],
                class_names[mistake.predicted],
                *map(_format_probability, mistake[-2:]),
            ]
            for mistake in worst
        ]
        columns = ["sample", "true", "predicted", "probability of the true class", "of the predicted class"]
        return Table(title, columns, rows, note)
    if samples.dtype != torch.uint8:
        note += " The images are not uint8, so each is stretched: its darkest value is black, its brightest white."
    tiles = []
    for source, mistake in zip(make_thumbnails(samples), worst, strict=True):
        truth, guess = f"true {class_names[mistake.target]}", f"predicted {class_names[mistake.predicted]}"
        lines = [
            get_name(mistake.sample_index),
            f"{truth} ({_format_probability(mistake.target_probability)})",
            f"{guess} ({_format_probability(mistake.predicted_probability)})",
        ]
        tiles.append(Tile(source, lines))
    return Tiles(title, tiles, note)


def _compute_predictions(task: Classification, evaluated_batch: EvaluatedBatch) -> tuple[Tensor, ...]:
    outputs = get_predictions(evaluated_batch.outputs, task.model_name)
    truth, valid = get_target_classes(get_targets(evaluated_batch.batch))
    guess = outputs.argmax(1)  # breaks ties in the same way as the metrics of the task
    log_probabilities = outputs.double().log_softmax(1)
    losses = -log_probabilities.gather(1, truth.clamp(min=0)[:, None])[:, 0]
    probabilities = log_probabilities.gather(1, guess[:, None])[:, 0].exp()
    columns = (
        torch.from_numpy(evaluated_batch.sample_indices),
        *(tensor.cpu() for tensor in (truth, guess, losses, probabilities)),
    )
    return tuple(column[valid.cpu()] for column in columns)


def _format_probability(probability: float) -> str:
    share = 100 * probability
    return f"{share:.0f} %" if share >= 1 or not probability else f"{share:.1g} %"


def are_images(samples: Tensor) -> bool:
    """Return whether a batch has the shape of images: [n, channels, height, width] with 1 or 3 channels."""
    return samples.ndim == 4 and samples.shape[1] in _CHANNELS and min(samples.shape[2:]) > 1


def make_thumbnails(samples: Tensor) -> list[str]:
    """Return a thumbnail of each image as a data: URI.

    If the images aren't uint8, each image is rescaled so that its lowest value is black and its highest value is white.
    Small images are enlarged by an integer factor, so that individual pixels are visible.
    """
    return [_encode_as_uri(_to_uint8(sample)) for sample in samples]


def _to_uint8(sample: Tensor) -> Tensor:
    if sample.dtype == torch.uint8:
        return sample
    values = sample.detach().cpu().double().nan_to_num(0.0, 0.0, 0.0)
    low, high = float(values.min()), float(values.max())
    return ((values - low) / ((high - low) or 1.0) * 255).round().to(torch.uint8)


def _encode_as_uri(pixels: Tensor) -> str:
    values = pixels.cpu().permute(1, 2, 0).contiguous().numpy()
    picture = Image.fromarray(values[:, :, 0] if values.shape[2] == 1 else values)
    if (factor := _THUMBNAIL_SIDE // max(picture.size)) > 1:
        picture = picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
    picture.thumbnail((_THUMBNAIL_SIDE, _THUMBNAIL_SIDE))
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return f"data:image/png;base64,{b64encode(buffer.getvalue()).decode()}"
