"""Direct preference optimization (DPO), which learns from pairs of a chosen and a rejected answer.

Rafailov et al. 2023, "Direct preference optimization: Your language model is secretly a reward model", equation 7.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, final

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from lockstep.core.batch import Batch, Inputs
from lockstep.errors import UsageError
from lockstep.tasks.base import LOSS, MetricValues, Monitor, TaskReport
from lockstep.tasks.language import LABELS

IDS: Final = "input_ids"
ANSWERS: Final = "answers"  # name of the labels in the model inputs
POLICY: Final = "policy"
REFERENCE: Final = "reference"
_IGNORED: Final = -100

Beta = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@final
@dataclass(frozen=True)
class Dpo:
    """A task whose outputs are the log-probabilities of both answers in a pair, under the model and its reference.

    A batch has `input_ids` and `labels` of shape [n, 2, t], with the chosen answer first. Labels are -100 for tokens
    that aren't part of the answer. The model returns a mapping with `policy` and `reference`, both of shape [n, 2].
    Each value is the log-probability of an answer, summed over its tokens (models/reference.py).
    """

    beta: float = 0.1
    model_name: str = "model"
    counts_samples: ClassVar[bool] = True
    unit: ClassVar[str] = "samples"
    fractions: ClassVar[tuple[str, ...]] = ("reward_accuracy",)
    monitor: ClassVar[Monitor] = LOSS

    def inputs(self, batch: Batch) -> Inputs:
        """See Task."""
        if not isinstance(batch, Mapping) or not {IDS, LABELS} <= batch.keys() or batch[IDS].ndim != 3:
            raise UsageError(
                f"recipe.task: dpo requires batches with {IDS} and {LABELS} of shape [n, 2, t]; use recipe.data.name="
                f"chat with rows that have chosen and rejected"
            )
        return {IDS: batch[IDS], ANSWERS: batch[LABELS]}

    def weight(self, batch: Batch) -> int:
        """Return the number of pairs."""
        return len(batch[IDS])

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """See Task."""
        rewards = self._compute_rewards(outputs)
        return -F.logsigmoid(rewards[:, 0] - rewards[:, 1]).sum()

    def sums(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """Return the number of pairs whose chosen answer has the higher reward, and the sum of the reward margins."""
        rewards = self._compute_rewards(outputs).detach()
        margins = rewards[:, 0] - rewards[:, 1]
        return {"correct": (margins > 0).sum(), "margins": margins.double().sum()}

    def figures(self, sums: Mapping[str, Tensor]) -> MetricValues:
        """Return the fraction of pairs whose chosen answer has the higher reward, and the mean reward margin."""
        pairs = max(int(sums["samples"]), 1)
        return {"reward_accuracy": int(sums["correct"]) / pairs, "reward_margin": float(sums["margins"]) / pairs}

    def details(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """See Task."""
        return {}

    def report(self, sums: Mapping[str, Tensor]) -> TaskReport:
        """See Task."""
        return {}

    def check(self, outputs: Any, batch: Batch) -> None:
        """See Task."""
        shape = (len(batch[IDS]), 2)
        log_probs = outputs if isinstance(outputs, Mapping) else {}
        if any(name not in log_probs or log_probs[name].shape != shape for name in (POLICY, REFERENCE)):
            raise UsageError(
                f"{self.model_name}: expected {POLICY} and {REFERENCE} of shape {list(shape)}; use a causal language "
                f"model that takes token ids"
            )

    def _compute_rewards(self, outputs: Mapping[str, Tensor]) -> Tensor:
        """Return the rewards of both answers, up to a constant per prompt, with shape [n, 2]."""
        return self.beta * (outputs[POLICY] - outputs[REFERENCE])


def dpo(model: str, beta: Beta = 0.1) -> Dpo:
    """Create the task from the options of a recipe."""
    return Dpo(beta, model)


def compute_answer_log_probs(logits: Tensor, answers: Tensor) -> Tensor:
    """Return the log-probability of each answer, summed over its tokens, in at least float32 with shape [n].

    `logits` has shape [n, t, vocabulary]. `answers` has shape [n, t], and is -100 for tokens outside the answer.
    """
    logits, targets = logits[:, :-1], answers[:, 1:]
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    # On CUDA, the backward pass of gather isn't deterministic, but that of cross_entropy is.
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=_IGNORED, reduction="none")
    return -losses.view(targets.shape).sum(1)
