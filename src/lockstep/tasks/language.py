"""Language modeling by next-token prediction. The weight of a batch is its number of target tokens."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple, final

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.common.type_name import describe_type
from lockstep.core.batch import Batch, Inputs
from lockstep.core.work import find_divisors
from lockstep.errors import UsageError
from lockstep.tasks.base import LOSS, MetricValues, Monitor, TaskReport
from lockstep.tasks.batches import get_predictions

LABELS: Final = "labels"
_IDS: Final = "input_ids"
_MASK: Final = "attention_mask"  # 0 for padding tokens
_POSITIONS: Final = "position_ids"  # 0 for the first token of each packed sequence


# Takes logits of shape [n, vocabulary], targets of shape [n], and the target to ignore. Returns the sum of the losses.
SumLosses = Callable[[Tensor, Tensor, int], Tensor]


def sum_cross_entropy(logits: Tensor, targets: Tensor, ignore: int) -> Tensor:
    """Return the cross entropy summed over the targets that aren't `ignore`, computed in at least float32."""
    return F.cross_entropy(_to_at_least_float32(logits), targets, ignore_index=ignore, reduction="sum")


class NextTokenBatch(NamedTuple):
    """The model inputs, and the targets. The last `tail` output positions have no target."""

    inputs: Inputs
    targets: Tensor
    tail: int


@final
@dataclass(frozen=True)
class Language:
    """A task whose outputs are the logits of the next token at each position, with shape [n, t, vocabulary].

    A batch is one of:
    - An integer tensor of shape [n, t + 1]: The inputs are the first t tokens, and the targets are the last t tokens.
    - (inputs, targets), both of shape [n, t]: Target i is the token that follows input i.
    - A mapping as in transformers, with `input_ids` of shape [n, t] and optionally `attention_mask`, `position_ids` and
      `labels`. Labels are aligned with the tokens, and the task shifts them. Without labels, all tokens are targets
      except for padding and the first token of each packed sequence, which has position 0.
    - A NextTokenBatch, as returned by `chunk`.

    Targets equal to `ignore` are ignored. The weight of a batch is the number of all other targets. `sum_losses`
    computes the sum of the losses. Compiled recipes replace this function (parallel/compiled.py).
    """

    ignore: int = -100
    vocabulary: int | None = None
    model_name: str = "model"
    sum_losses: SumLosses = sum_cross_entropy
    counts_samples: ClassVar[bool] = False
    unit: ClassVar[str] = "tokens"
    fractions: ClassVar[tuple[str, ...]] = ()
    monitor: ClassVar[Monitor] = LOSS

    def inputs(self, batch: Batch) -> Inputs:
        """See Task."""
        return self._to_next_token_batch(batch).inputs

    def weight(self, batch: Batch) -> int:
        """See Task."""
        return int((self._to_next_token_batch(batch).targets != self.ignore).sum())

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """See Task."""
        parsed = self._to_next_token_batch(batch)
        return self.sum_losses(self._flatten_logits(outputs, parsed), parsed.targets.reshape(-1), self.ignore)

    def losses(self, outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss of each target, and a mask of the targets that aren't ignored, both of shape [n, t].

        The loss of an ignored target is 0.
        """
        parsed = self._to_next_token_batch(batch)
        logits = _to_at_least_float32(self._flatten_logits(outputs, parsed))
        losses = F.cross_entropy(logits, parsed.targets.reshape(-1), ignore_index=self.ignore, reduction="none")
        return losses.reshape(parsed.targets.shape), parsed.targets != self.ignore

    def sums(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """Return an empty dict, because the perplexity depends only on the loss and the weight."""
        return {}

    def figures(self, sums: Mapping[str, Tensor]) -> MetricValues:
        """Return the perplexity, which is infinity if it overflows a float."""
        loss = float(sums["loss"]) / max(int(sums["weight"]), 1)
        return {"perplexity": math.exp(loss) if loss < 700 else math.inf}

    def details(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """See Task."""
        return {}

    def report(self, sums: Mapping[str, Tensor]) -> TaskReport:
        """See Task."""
        return {}

    def check(self, outputs: Any, batch: Batch) -> None:
        """See Task."""
        logits, (_, targets, tail) = get_predictions(outputs, self.model_name), self._to_next_token_batch(batch)
        positions_shape = (*targets.shape[:1], targets.shape[1] + tail)
        if logits.ndim != 3 or logits.shape[:2] != positions_shape or not logits.is_floating_point():
            raise UsageError(
                f"{self.model_name}: expected floats of shape [{positions_shape[0]}, {positions_shape[1]}, "
                f"vocabulary], got {logits.dtype} of shape {list(logits.shape)}; return the logits of the next token "
                f"at each position"
            )
        if self.vocabulary is not None and logits.shape[2] < self.vocabulary:
            raise UsageError(
                f"{self.model_name}: the outputs have {logits.shape[2]} logits, but the data has a vocabulary of "
                f"{self.vocabulary} tokens; set the vocabulary of the model to {self.vocabulary}"
            )
        invalid = targets[(targets != self.ignore) & ((targets < 0) | (targets >= logits.shape[2]))]
        if len(invalid):
            raise UsageError(
                f"targets: token {int(invalid[0])} is out of range, since the model has outputs for tokens 0 to "
                f"{logits.shape[2] - 1}; use {self.ignore} (recipe.task.ignore) for positions that don't count"
            )

    def chunk(self, batch: Batch, index: int, num_chunks: int) -> Batch:
        """See ChunkableTask. The target at the last position of a chunk is the first token of the next chunk."""
        inputs, targets, tail = self._to_next_token_batch(batch)
        [*names], [*values] = (inputs.keys(), inputs.values()) if isinstance(inputs, Mapping) else ((), inputs)
        if len(values) != 1 or names not in ([], [_IDS]):
            raise UsageError(
                f"recipe.model.sequence_chunks: requires batches with only {_IDS}, got "
                f"{', '.join(names) or f'{len(values)} inputs'}; use sequences of the same length without padding or "
                f"{_POSITIONS}, or remove the key"
            )
        positions = _get_chunk_slice(values[0].shape[1], index, num_chunks)
        targets = F.pad(targets, (0, tail), value=self.ignore)[:, positions]
        ids = values[0][:, positions]
        return NextTokenBatch({_IDS: ids} if names else (ids,), targets, 0)

    def _flatten_logits(self, outputs: Any, next_token_batch: NextTokenBatch) -> Tensor:
        """Return the logits of the positions that have a target, with shape [n * t, vocabulary]."""
        logits = get_predictions(outputs, self.model_name)
        if next_token_batch.tail:
            logits = logits[:, : -next_token_batch.tail]
        return logits.reshape(-1, logits.shape[-1])

    def _to_next_token_batch(self, batch: Batch) -> NextTokenBatch:
        if isinstance(batch, NextTokenBatch):
            return batch
        if isinstance(batch, Mapping):
            return self._parse_mapping(batch)
        if isinstance(batch, Tensor):
            _check_tokens("batch", batch)
            return NextTokenBatch((batch[:, :-1],), batch[:, 1:].long(), 0)
        if not (
            isinstance(batch, tuple | list) and len(batch) == 2 and all(isinstance(item, Tensor) for item in batch)
        ):
            raise UsageError(
                f"batch: expected tokens of shape [n, t], (inputs, targets), or a mapping with {_IDS}, got "
                f"{describe_type(batch)}"
            )
        _check_tokens("targets", batch[1])
        return NextTokenBatch((batch[0],), batch[1].long(), 0)

    def _parse_mapping(self, batch: Mapping[str, Tensor]) -> NextTokenBatch:
        inputs = {name: value for name, value in batch.items() if name != LABELS}
        if LABELS in batch:
            labels = batch[LABELS]
        elif _IDS in batch:
            labels = self._derive_labels(batch)
        else:
            raise UsageError(f"batch: expected {_IDS} or {LABELS}, got {', '.join(batch)}")
        _check_tokens(LABELS, labels)
        return NextTokenBatch(inputs, labels[:, 1:].long(), 1)

    def _derive_labels(self, batch: Mapping[str, Tensor]) -> Tensor:
        labels = batch[_IDS]
        if _MASK in batch:
            labels = torch.where(batch[_MASK] == 0, self.ignore, labels)
        if _POSITIONS in batch:
            labels = torch.where(batch[_POSITIONS] == 0, self.ignore, labels)
        return labels


def language(model: str, vocabulary: int | None = None, ignore: int = -100) -> Language:
    """Create the task from recipe options. `vocabulary` is the vocabulary size of the data."""
    return Language(ignore, vocabulary, model)


def _to_at_least_float32(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def _get_chunk_slice(length: int, index: int, num_chunks: int) -> slice:
    """Return the slice of a sequence's positions that form the chunk at `index`.

    Raises UsageError if the chunks would have different lengths, or a length of 1, for which Lockstep can't check that
    the model is causal.
    """
    if length % num_chunks or (num_chunks > 1 and length == num_chunks):
        valid_counts = ", ".join(str(count) for count in find_divisors(length) if count < length or length == 1)
        raise UsageError(
            f"recipe.model.sequence_chunks: sequences of {length} tokens cannot be split into {num_chunks} equal "
            f"chunks of at least 2; use {valid_counts}, or sequences of another length"
        )
    size = length // num_chunks
    return slice(index * size, (index + 1) * size)


def _check_tokens(label: str, tokens: Tensor) -> None:
    if tokens.ndim != 2 or tokens.is_floating_point():
        raise UsageError(
            f"{label}: expected integers of shape [n, t], got {tokens.dtype} of shape {list(tokens.shape)}"
        )
