"""The mistakes of a classifier: the confusion of its classes, and the mistakes with the largest losses."""

import io
from base64 import b64encode
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple, final

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lockstep.core.batch import tensors_of
from lockstep.inference.confusions import confusions
from lockstep.inference.validation_pass import EvaluatedBatch, Validation
from lockstep.reporting.page import Section, Table, Tile, Tiles, Words
from lockstep.reporting.wording import format_count
from lockstep.tasks.batches import predictions, targets_of
from lockstep.tasks.classification import Classification, target_classes

_MAX_MISTAKES: Final = 24  # maximum number of mistakes
_CHANNELS: Final = (1, 3)
_THUMBNAIL_SIDE: Final = 112  # maximum side length of a thumbnail in pixels


class Mistake(NamedTuple):
    """The index of a sample, its true and predicted class, and the probabilities of both classes."""

    number: int
    truth: int
    guess: int
    of_truth: float
    of_guess: float


@final
@dataclass(frozen=True)
class Guesses:
    """The predictions for all valid samples, as tensors of shape [samples].

    `numbers` (sample indices), `truths` and `guesses` are int64. `chances` are the probabilities of the predicted
    classes, and `losses` are the cross entropies of the softmax. Both are float64, and don't depend on the loss
    function of the run.
    """

    numbers: Tensor
    truths: Tensor
    guesses: Tensor
    losses: Tensor
    chances: Tensor

    def worst(self, limit: int = _MAX_MISTAKES) -> list[Mistake]:
        """Return up to `limit` mistakes, with the largest loss first."""
        indices = (self.truths != self.guesses).nonzero()[:, 0]
        order = indices[self.losses[indices].nan_to_num(torch.inf).argsort(descending=True, stable=True)][:limit]
        columns = (self.numbers, self.truths, self.guesses, (-self.losses).exp(), self.chances)
        return [Mistake(*row) for row in zip(*(column[order].tolist() for column in columns), strict=True)]


def mistakes(
    run: str, task: Classification, validation: Validation, batches: Iterable[EvaluatedBatch]
) -> list[Section]:
    """Return the confusion of the classes, and the worst mistakes.

    Image samples are shown as thumbnails, and all other samples as rows of a table.
    """
    result = collect_guesses(task, batches)
    ones = torch.ones_like(result.truths)
    sections = confusions(run, task.classes, result.truths, result.guesses, ones, "samples")
    return [*sections, _worst(f"{run}: worst mistakes", task, validation, result)]


def collect_guesses(task: Classification, batches: Iterable[EvaluatedBatch]) -> Guesses:
    """Return the predictions for all samples."""
    rows = [_rows(task, batch) for batch in batches]
    return Guesses(*(torch.cat(column) for column in zip(*rows, strict=True)))


def _worst(title: str, task: Classification, validation: Validation, result: Guesses) -> Section:
    worst, names, name = result.worst(), task.classes, validation.name
    if not worst:
        return Words(title, ["There are no mistakes."])
    count = int((result.truths != result.guesses).sum())
    note = f"{format_count(len(worst), 'mistake')} of {count:,}, sorted by cross entropy, largest first."
    fetched = validation.split.fetch(np.array([mistake.number for mistake in worst]), None)
    samples = tensors_of(task.inputs(fetched))[0]
    if not are_pictures(samples):
        rows = [
            [name(mistake.number), names[mistake.truth], names[mistake.guess], *map(_format_probability, mistake[-2:])]
            for mistake in worst
        ]
        columns = ["sample", "true", "predicted", "probability of the true class", "of the predicted class"]
        return Table(title, columns, rows, note)
    if samples.dtype != torch.uint8:
        note += " The images are not uint8, so each is stretched: its darkest value is black, its brightest white."
    tiles = []
    for source, mistake in zip(thumbnails(samples), worst, strict=True):
        truth, guess = f"true {names[mistake.truth]}", f"predicted {names[mistake.guess]}"
        lines = [
            name(mistake.number),
            f"{truth} ({_format_probability(mistake.of_truth)})",
            f"{guess} ({_format_probability(mistake.of_guess)})",
        ]
        tiles.append(Tile(source, lines))
    return Tiles(title, tiles, note)


def _rows(task: Classification, evaluated: EvaluatedBatch) -> tuple[Tensor, ...]:
    outputs = predictions(evaluated.outputs, task.model_name)
    truth, valid = target_classes(targets_of(evaluated.batch))
    guess = outputs.argmax(1)  # same tie-breaking as in the confusion matrix of the run's last evaluation
    log_probabilities = outputs.double().log_softmax(1)
    losses = -log_probabilities.gather(1, truth.clamp(min=0)[:, None])[:, 0]
    chances = log_probabilities.gather(1, guess[:, None])[:, 0].exp()
    columns = torch.from_numpy(evaluated.numbers), *(tensor.cpu() for tensor in (truth, guess, losses, chances))
    return tuple(column[valid.cpu()] for column in columns)


def _format_probability(probability: float) -> str:
    share = 100 * probability
    return f"{share:.0f} %" if share >= 1 or not probability else f"{share:.1g} %"


def are_pictures(samples: Tensor) -> bool:
    """Return whether samples are images: shape [n, channels, height, width] with 1 or 3 channels."""
    return samples.ndim == 4 and samples.shape[1] in _CHANNELS and min(samples.shape[2:]) > 1


def thumbnails(samples: Tensor) -> list[str]:
    """Return a thumbnail of each image as a data: URI.

    Images that aren't uint8 are scaled individually, so that the darkest value is black and the brightest value is
    white. Small images are enlarged by an integer factor, so that each pixel is visible.
    """
    return [_source(_bytes(sample)) for sample in samples]


def _bytes(sample: Tensor) -> Tensor:
    if sample.dtype == torch.uint8:
        return sample
    values = sample.detach().cpu().double().nan_to_num(0.0, 0.0, 0.0)
    low, high = float(values.min()), float(values.max())
    return ((values - low) / ((high - low) or 1.0) * 255).round().to(torch.uint8)


def _source(pixels: Tensor) -> str:
    values = pixels.cpu().permute(1, 2, 0).contiguous().numpy()
    picture = Image.fromarray(values[:, :, 0] if values.shape[2] == 1 else values)
    if (factor := _THUMBNAIL_SIDE // max(picture.size)) > 1:
        picture = picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
    picture.thumbnail((_THUMBNAIL_SIDE, _THUMBNAIL_SIDE))
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return f"data:image/png;base64,{b64encode(buffer.getvalue()).decode()}"
