"""Sections of a report about a language model: its loss by position in the context, and generated text."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from lockstep.core.batch import get_tensors
from lockstep.errors import UsageError
from lockstep.inference.saved import SavedModel
from lockstep.inference.text import Sampling, continue_tokens, get_tokenizer
from lockstep.inference.validation_pass import EvaluatedBatch, Validation
from lockstep.reporting.page import Paragraphs, Passage, Passages, Section
from lockstep.tasks.language import Language

_MAX_POINTS: Final = 256  # maximum number of points of the loss curve over positions
_SAMPLES: Final = 3  # number of generated texts
_MAX_PROMPT_TOKENS: Final = 32
_SAMPLING: Final = Sampling(tokens=120, temperature=0.8)

_NOTE: Final = (
    f"The beginnings of validation samples, in gray, followed by {_SAMPLING.tokens} tokens that the model generates at "
    f"a temperature of {_SAMPLING.temperature}."
)


def compute_loss_by_position(task: Language, batches: Iterable[EvaluatedBatch]) -> list[tuple[float, float]]:
    """Return the mean loss at each position in the context, as (position, loss) pairs.

    The position of a predicted token is counted from 1. If the context has more than 256 positions, they are grouped
    into ranges, and each pair contains the middle of a range and its mean loss.
    """
    losses, tokens = torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.int64)
    for evaluated in batches:
        token_losses, valid = task.losses(evaluated.outputs, evaluated.batch)
        # Batches can have different sequence lengths. pad_sequence pads the shorter row with zeros.
        losses = pad_sequence([losses, token_losses.double().sum(0).cpu()]).sum(1)
        tokens = pad_sequence([tokens, valid.sum(0).cpu()]).sum(1)
    range_length = max(-(-len(tokens) // _MAX_POINTS), 1)
    points = []
    for first in range(0, len(tokens), range_length):
        count = int(tokens[first : first + range_length].sum())
        if count:
            middle = first + (min(range_length, len(tokens) - first) + 1) / 2
            points.append((middle, float(losses[first : first + range_length].sum()) / count))
    return points


def make_text_samples(run: str, task: Language, validation: Validation, saved: SavedModel) -> list[Section]:
    """Return a section with text that the model generates from the beginnings of a few validation samples."""
    title = f"{run}: samples of text"
    try:
        tokenizer = get_tokenizer(saved)
    except UsageError as error:
        return [Paragraphs(title, [f"There are no samples: {error}. --tokenizer is an option of `lockstep predict`."])]
    positions = np.linspace(0, len(validation.sample_indices), _SAMPLES, endpoint=False).astype(np.int64)
    passages = []
    for number in dict.fromkeys(validation.sample_indices[positions].tolist()):
        prompt = _get_prompt_tokens(task, validation.split.fetch(np.array([number]), None))
        sampling = replace(_SAMPLING, seed=number)
        prompt_text, text, _ = continue_tokens(saved, validation.model, tokenizer, prompt, sampling)
        passages.append(Passage(validation.get_sample_name(number), prompt_text, text))
    return [Passages(title, passages, _NOTE)]


def _get_prompt_tokens(task: Language, batch: Any) -> list[int]:
    """Return the first tokens of a batch with a single sample, without padding tokens."""
    inputs = task.inputs(batch)
    mapping = inputs if isinstance(inputs, Mapping) else {}
    [ids] = mapping["input_ids"] if "input_ids" in mapping else get_tensors(inputs)[0]
    if "attention_mask" in mapping:
        ids = ids[mapping["attention_mask"][0] != 0]
    tokens: Sequence[int] = ids[: min(_MAX_PROMPT_TOKENS, max(len(ids) // 2, 1))].tolist()
    return [*tokens]
