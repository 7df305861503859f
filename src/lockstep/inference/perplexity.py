"""How well a language model predicts validation text: loss by position in the context, and samples of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor

from lockstep.core.batch import tensors_of
from lockstep.data.text.tokenizer import Tokenizer
from lockstep.errors import UsageError
from lockstep.inference.saved import SavedModel
from lockstep.inference.text import Sampling, generate_tokens, tokenizer_for
from lockstep.inference.validation_pass import EvaluatedBatch, Validation
from lockstep.reporting.page import Passage, Passages, Section, Words
from lockstep.tasks.batches import predictions
from lockstep.tasks.language import Language

_MOST_POINTS: Final = 256  # of a line over positions
_SAMPLES: Final = 3  # of text
_GIVEN: Final = 32  # tokens of each, at most
_SAMPLING: Final = Sampling(tokens=120, temperature=0.8)

_NOTE: Final = (
    f"The beginnings of validation samples, in grey, and {_SAMPLING.tokens} tokens that the model draws after them, at "
    f"a temperature of {_SAMPLING.temperature}."
)


@final
class Perplexity:
    """A View of a language model: its loss by position, and samples of text."""

    def __init__(self, run: str, task: Language, validation: Validation, saved: SavedModel) -> None:
        self._run = run
        self._task = task
        self._validation = validation
        self._saved = saved
        self._losses = torch.zeros(0, dtype=torch.float64)
        self._tokens = torch.zeros(0, dtype=torch.int64)

    def add(self, evaluated: EvaluatedBatch) -> None:
        """See View: losses are added by the position of the token that the model is to give."""
        losses, counted = self._task.losses(evaluated.outputs, evaluated.batch)
        self._losses = _longer(self._losses, losses.double().sum(0).cpu())
        self._tokens = _longer(self._tokens, counted.sum(0).cpu())

    def line(self) -> list[tuple[float, float]]:
        """Return (position, mean loss), from 1; of many positions the means of stretches, at the middle of each."""
        stretch = max(-(-len(self._tokens) // _MOST_POINTS), 1)
        points = []
        for first in range(0, len(self._tokens), stretch):
            tokens = int(self._tokens[first : first + stretch].sum())
            if tokens:
                middle = first + (min(stretch, len(self._tokens) - first) + 1) / 2
                points.append((middle, float(self._losses[first : first + stretch].sum()) / tokens))
        return points

    def sections(self) -> list[Section]:
        """Return how the model continues the beginnings of some samples; its loss by position is `line`."""
        title = f"{self._run}: samples of text"
        try:
            words = tokenizer_for(self._saved)
        except UsageError as error:
            return [Words(title, [f"There are none: {error}. The option is one of `lockstep predict`."])]
        chosen = np.linspace(0, len(self._validation.numbers), _SAMPLES, endpoint=False).astype(np.int64)
        numbers = dict.fromkeys(self._validation.numbers[chosen].tolist())
        return [Passages(title, [self._passage(number, words) for number in numbers], _NOTE)]

    def _passage(self, number: int, words: Tokenizer) -> Passage:
        given = _beginning(self._task, self._validation.split.fetch(np.array([number]), None))

        def scores(ids: list[int]) -> Tensor:
            outputs = predictions(self._validation.computing((torch.tensor([ids]),)), self._saved.name)
            return outputs[0, -1, : words.vocabulary]

        text = words.decode(
            np.array(given + generate_tokens(scores, given, replace(_SAMPLING, seed=number), self._saved.facts.context))
        )
        known = words.decode(np.array(given))
        return Passage(self._validation.name(number), known, text.removeprefix(known))


def _beginning(task: Language, batch: Any) -> list[int]:
    """Return the first tokens of a batch's one sample, without its padding."""
    inputs = task.inputs(batch)
    named = inputs if isinstance(inputs, Mapping) else {}
    [ids] = named["input_ids"] if "input_ids" in named else tensors_of(inputs)[0]
    if "attention_mask" in named:
        ids = ids[named["attention_mask"][0] != 0]
    found: Sequence[int] = ids[: min(_GIVEN, max(len(ids) // 2, 1))].tolist()
    return [*found]


def _longer(one: Tensor, other: Tensor) -> Tensor:
    """Add two rows, of which the shorter ends in zeros."""
    sums = torch.zeros(max(len(one), len(other)), dtype=one.dtype)
    sums[: len(one)] += one
    sums[: len(other)] += other
    return sums
