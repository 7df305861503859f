"""Continues a prompt with a language model, token by token.

Each token is the likeliest token, or is drawn by its probability.
"""

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
    """How to continue a text.

    `tokens` is the number of new tokens. With a `temperature` of 0, each token is the likeliest token. Otherwise,
    tokens are drawn with `seed`.
    """

    tokens: int = 100
    temperature: float = 0.0
    seed: int = 0


def continue_prompt(
    saved: SavedModel, computing: Computing, prompt: str, sampling: Sampling, tokenizer: str | None = None
) -> Iterator[Row]:
    """Yield the prompt, the text that follows it, and the numbers of prompt tokens and new tokens.

    `tokenizer` is a file of the tokenizers library. It is needed if the run doesn't have a tokenizer, or if the file of
    the run's tokenizer was moved.
    """
    words = tokenizer_for(saved, tokenizer)
    given = words.encode(prompt).astype(np.int64).tolist()
    if not given:
        raise UsageError("--prompt: is empty; pass at least one character")
    known, text, count = continue_tokens(saved, computing, words, given, sampling)
    yield {"prompt": known, "text": text, "tokens": len(given), "new_tokens": count}


def continue_tokens(
    saved: SavedModel, computing: Computing, words: Tokenizer, given: list[int], sampling: Sampling
) -> tuple[str, str, int]:
    """Return the text of the given tokens, the text that follows it, and the number of new tokens."""

    def scores(ids: list[int]) -> Tensor:
        outputs = predictions(computing((torch.tensor([ids]),)), saved.name)
        return outputs[0, -1, : words.vocabulary]  # a model can have more tokens than its tokenizer

    made = generate_tokens(scores, given, sampling, saved.facts.context)
    # With a byte tokenizer, the prompt can end within a character, so the prompt and new tokens are decoded together.
    known, text = (words.decode(np.array(ids)) for ids in (given, given + made))
    return known, text.removeprefix(known), len(made)


def generate_tokens(
    scores: Callable[[list[int]], Tensor], given: list[int], sampling: Sampling, context: int | None
) -> list[int]:
    """Return the tokens that follow those in `given`. The model sees at most the last `context` tokens.

    `scores` returns the logits of the next token, floats of shape [vocabulary]. Tokens are drawn on the CPU in float64.
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
    """Return the tokenizer of a run, or the tokenizer in `file`.

    Raises UsageError if the run needs a file and there is none, or if the tokenizer doesn't match the run.
    """
    by = saved.tokenizer_by
    place = file or saved.recipe.data.options.get("tokenizer")
    if by is None and file is None:
        raise UsageError(
            f"{saved.path}: dataset {saved.recipe.data.name} has no tokenizer; pass the file of the tokenizer "
            f"(tokenizers library) that produced its tokens with --tokenizer"
        )
    if by not in (None, "tokenizer") and file is not None:
        raise UsageError(f"--tokenizer: this run uses a {by} tokenizer, which has no file; remove --tokenizer")
    if by == "tokenizer" and not isinstance(place, str):
        raise UsageError(f"{saved.path}: the run uses a tokenizer file with unknown path; pass it with --tokenizer")
    found = FromFile(file or "") if by is None else tokenizer_of(saved.facts.tokenizer or {}, place or "")
    if saved.facts.vocabulary is not None and found.vocabulary > saved.facts.vocabulary:
        raise UsageError(
            f"tokenizer: has {found.vocabulary:,} tokens, but the data of the run has {saved.facts.vocabulary:,}; pass "
            f"the tokenizer that produced its tokens"
        )
    return found
