"""A prompt continued by a language model, a token at a time: the likeliest one, or one drawn by its probability."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lockstep.data.text.tokenizer import FromFile, Tokenizer, tokenizer_of
from lockstep.errors import UsageError
from lockstep.inference.pictures import Row
from lockstep.inference.saved import Computing, SavedModel
from lockstep.tasks.batches import predictions


@dataclass(frozen=True)
class Sampling:
    """How a text goes on: by how many `tokens`, the likeliest ones at a `temperature` of 0, else drawn by `seed`."""

    tokens: int = 100
    temperature: float = 0.0
    seed: int = 0


def continue_prompt(
    saved: SavedModel, computing: Computing, prompt: str, sampling: Sampling, tokenizer: str | None = None
) -> Iterator[Row]:
    """Yield the prompt, the text that follows it, and how many tokens were given and made.

    `tokenizer` is a file of the library tokenizers, for a run that keeps none, or whose own has moved.
    """
    words = tokenizer_for(saved, tokenizer)
    given = words.encode(prompt).astype(np.int64).tolist()
    if not given:
        raise UsageError("--prompt: it is empty; give at least one character to go on from")
    known, text, count = continue_tokens(saved, computing, words, given, sampling)
    yield {"prompt": known, "text": text, "tokens": len(given), "new_tokens": count}


def continue_tokens(
    saved: SavedModel, computing: Computing, words: Tokenizer, given: list[int], sampling: Sampling
) -> tuple[str, str, int]:
    """Return the text of the tokens given, the text that follows it, and how many tokens that has."""

    def scores(ids: list[int]) -> Tensor:
        outputs = predictions(computing((torch.tensor([ids]),)), saved.name)
        return outputs[0, -1, : words.vocabulary]  # a model may know more than its tokenizer

    made = generate_tokens(scores, given, sampling, saved.facts.context)
    # Of a tokenizer by bytes the last token given may be half a character, so the whole is decoded at once.
    known, text = (words.decode(np.array(ids)) for ids in (given, given + made))
    return known, text.removeprefix(known), len(made)


def generate_tokens(
    scores: Callable[[list[int]], Tensor], given: list[int], sampling: Sampling, context: int | None
) -> list[int]:
    """Return the tokens that follow those `given`; the model sees the last `context` of what there is.

    `scores` gives the next token's logits, floats of shape [vocabulary]. They are drawn from in float64 on the CPU.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    ids = list(given)
    for _ in range(sampling.tokens):
        found = scores(ids[-context:] if context else ids).double().cpu()
        if sampling.temperature:
            chances = (found / sampling.temperature).softmax(0)
            ids.append(int(torch.multinomial(chances, 1, generator=generator)))
        else:
            ids.append(int(found.argmax()))
    return ids[len(given) :]


def tokenizer_for(saved: SavedModel, file: str | None = None) -> Tokenizer:
    """Return the tokenizer of a run, or that of a file. UsageError where neither is known, or it is another one."""
    by = saved.tokenizer_by
    place = file or saved.recipe.data.options.get("tokenizer")
    if by is None and file is None:
        raise UsageError(
            f"{saved.path}: data set {saved.recipe.data.name} keeps no tokenizer; give the file of the library "
            f"tokenizers that made its tokens, with --tokenizer"
        )
    if by not in (None, "tokenizer") and file is not None:
        raise UsageError(f"--tokenizer: this run's tokens are by {by}, and no file's; leave it out")
    if by == "tokenizer" and not isinstance(place, str):
        raise UsageError(f"{saved.path}: its tokenizer is a file; give it with --tokenizer")
    found = FromFile(file or "") if by is None else tokenizer_of(saved.facts.tokenizer or {}, place or "")
    if saved.facts.vocabulary is not None and found.vocabulary > saved.facts.vocabulary:
        raise UsageError(
            f"tokenizer: it has {found.vocabulary:,} tokens, and the run's data {saved.facts.vocabulary:,}; give the "
            f"one that made its tokens"
        )
    return found
