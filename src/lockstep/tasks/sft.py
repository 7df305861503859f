"""Supervised fine-tuning (SFT): next-token prediction for the assistant's tokens in a conversation."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, final

from torch import Tensor

from lockstep.core.batch import Batch, Inputs
from lockstep.errors import UsageError
from lockstep.tasks.base import LOSS, MetricValues, Monitor, TaskReport
from lockstep.tasks.batches import get_predictions
from lockstep.tasks.language import LABELS, Language, SumLosses, sum_cross_entropy

POSITIONS: Final = "position_ids"
_IDS: Final = "input_ids"


@final
@dataclass(frozen=True)
class Sft:
    """A task whose outputs are the logits of the next token at each position, with shape [n, t, vocabulary].

    A batch has `input_ids` and `labels` of shape [n, t]. Labels are aligned with the tokens, and are -100 for tokens
    that aren't targets. If sequences contain several conversations, a batch also has `position_ids`, which start at 0
    in each conversation. The weight of a batch is its number of targets.
    """

    vocabulary: int | None = None
    model_name: str = "model"
    sum_losses: SumLosses = sum_cross_entropy
    counts_samples: ClassVar[bool] = False
    unit: ClassVar[str] = "tokens"
    fractions: ClassVar[tuple[str, ...]] = ("token_accuracy",)
    monitor: ClassVar[Monitor] = LOSS

    @property
    def _language(self) -> Language:
        return Language(vocabulary=self.vocabulary, model_name=self.model_name, sum_losses=self.sum_losses)

    def inputs(self, batch: Batch) -> Inputs:
        """See Task."""
        ids = _check_batch(batch)[_IDS]
        return {_IDS: ids, POSITIONS: batch[POSITIONS]} if POSITIONS in batch else (ids,)

    def weight(self, batch: Batch) -> int:
        """See Task."""
        return self._language.weight(_check_batch(batch))

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """See Task."""
        return self._language.loss(outputs, batch)

    def sums(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """Return the number of targets that are the most likely token according to the model."""
        targets = batch[LABELS][:, 1:]
        predictions = get_predictions(outputs, self.model_name)[:, :-1].argmax(2)
        return {"correct": ((predictions == targets) & (targets != self._language.ignore)).sum()}

    def figures(self, sums: Mapping[str, Tensor]) -> MetricValues:
        """Return the perplexity, and the fraction of targets that are the most likely token according to the model."""
        weight = max(int(sums["weight"]), 1)
        loss = float(sums["loss"]) / weight
        return {
            "perplexity": math.exp(loss) if loss < 700 else math.inf,
            "token_accuracy": int(sums["correct"]) / weight,
        }

    def details(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """See Task."""
        return {}

    def report(self, sums: Mapping[str, Tensor]) -> TaskReport:
        """See Task."""
        return {}

    def check(self, outputs: Any, batch: Batch) -> None:
        """See Task."""
        self._language.check(outputs, batch)


def sft(model: str, vocabulary: int | None = None) -> Sft:
    """Create the task from the options of a recipe. `vocabulary` is the vocabulary size of the data."""
    return Sft(vocabulary, model)


def _check_batch(batch: Batch) -> Mapping[str, Tensor]:
    if not isinstance(batch, Mapping) or not {_IDS, LABELS} <= batch.keys():
        raise UsageError(
            f"recipe.task: sft requires batches with {_IDS} and {LABELS}; use recipe.data.name=chat, or a dataset "
            f"whose samples have both"
        )
    return batch
