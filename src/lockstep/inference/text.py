"""Continues a prompt with a language model, token by token.

The model generates either the most likely token, or a sampled token.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lockstep.data.text.tokenizer import FileTokenizer, Tokenizer, tokenizer_of
from lockstep.errors import UsageError
from lockstep.inference.images import Row
from lockstep.inference.saved import EvaluationModel, SavedModel
from lockstep.tasks.batches import get_predictions


@dataclass(frozen=True)
class Sampling:
    """The settings for generating text.

    `tokens` is the number of tokens to generate. If `temperature` is 0, the most likely token is always selected.
    Otherwise, tokens are sampled using `seed`.
    """

    tokens: int = 100
    temperature: float = 0.0
    seed: int = 0


def continue_prompt(
    saved: SavedModel, model: EvaluationModel, prompt: str, sampling: Sampling, tokenizer: str | None = None
) -> Iterator[Row]:
    """Yield a single prediction: the prompt, its continuation, and the number of tokens in both.

    `tokenizer` is the path of a tokenizer file (tokenizers library). It is required if the dataset of the run has no
    tokenizer, or if the tokenizer file of the run was moved.
    """
    run_tokenizer = get_tokenizer(saved, tokenizer)
    prompt_ids = run_tokenizer.encode(prompt).astype(np.int64).tolist()
    if not prompt_ids:
        raise UsageError("--prompt: is empty; pass at least one character")
    prompt_text, text, count = continue_tokens(saved, model, run_tokenizer, prompt_ids, sampling)
    yield {"prompt": prompt_text, "text": text, "tokens": len(prompt_ids), "new_tokens": count}


def continue_tokens(
    saved: SavedModel, model: EvaluationModel, tokenizer: Tokenizer, prompt_ids: list[int], sampling: Sampling
) -> tuple[str, str, int]:
    """Return the prompt as text, its continuation, and the number of generated tokens."""

    def compute_logits(ids: list[int]) -> Tensor:
        outputs = get_predictions(model((torch.tensor([ids]),)), saved.name)
        return outputs[0, -1, : tokenizer.vocab_size]  # the model may have a larger vocabulary than the tokenizer

    new_ids = generate_tokens(compute_logits, prompt_ids, sampling, saved.dataset_info.context)
    # With a byte tokenizer, the prompt may end in the middle of a character. Therefore, decode the prompt and the
    # generated tokens together.
    prompt_text, text = (tokenizer.decode(np.array(ids)) for ids in (prompt_ids, prompt_ids + new_ids))
    return prompt_text, text.removeprefix(prompt_text), len(new_ids)


def generate_tokens(
    compute_logits: Callable[[list[int]], Tensor], prompt_ids: list[int], sampling: Sampling, context: int | None
) -> list[int]:
    """Return the tokens that continue `prompt_ids`. The model sees at most the last `context` tokens.

    `compute_logits` returns the logits of the next token, of shape [vocabulary]. Tokens are sampled on the CPU in
    float64.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    ids = list(prompt_ids)
    for _ in range(sampling.tokens):
        logits = compute_logits(ids[-context:] if context else ids).double().cpu()
        if sampling.temperature:
            probabilities = (logits / sampling.temperature).softmax(0)
            ids.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        else:
            ids.append(int(logits.argmax()))
    return ids[len(prompt_ids) :]


def get_tokenizer(saved: SavedModel, file: str | None = None) -> Tokenizer:
    """Return the tokenizer of a run, or load a tokenizer from `file`.

    Raises UsageError if the run requires a file that isn't available, or if the tokenizer doesn't match the run.
    """
    tokenizer_type = saved.tokenizer_type
    path = file or saved.recipe.data.options.get("tokenizer")
    if tokenizer_type is None and file is None:
        raise UsageError(
            f"{saved.path}: dataset {saved.recipe.data.name} has no tokenizer; use --tokenizer to pass the file "
            f"of the tokenizer (tokenizers library) that produced its tokens"
        )
    if tokenizer_type not in (None, "tokenizer") and file is not None:
        raise UsageError(
            f"--tokenizer: this run uses a {tokenizer_type} tokenizer, which has no file; remove --tokenizer"
        )
    if tokenizer_type == "tokenizer" and not isinstance(path, str):
        raise UsageError(f"{saved.path}: the run uses a tokenizer file with an unknown path; pass it with --tokenizer")
    tokenizer = (
        FileTokenizer(file or "")
        if tokenizer_type is None
        else tokenizer_of(saved.dataset_info.tokenizer or {}, path or "")
    )
    if saved.dataset_info.vocabulary is not None and tokenizer.vocab_size > saved.dataset_info.vocabulary:
        raise UsageError(
            f"tokenizer: has {tokenizer.vocab_size:,} tokens, but the data of the run has "
            f"{saved.dataset_info.vocabulary:,}; pass the tokenizer that produced its tokens"
        )
    return tokenizer
