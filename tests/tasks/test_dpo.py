"""Direct preference optimization: the loss and its gradient are those of the formula, and figures are of pairs."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.errors import UsageError
from lockstep.tasks.dpo import Dpo, compute_answer_log_probs, dpo
from lockstep.tasks.find import find_task

POLICY = torch.tensor([[-3.0, -5.0], [-4.0, -2.5], [-1.0, -1.0]], dtype=torch.float64)
REFERENCE = torch.tensor([[-3.5, -4.0], [-4.0, -3.0], [-1.0, -1.0]], dtype=torch.float64)
BATCH = {"input_ids": torch.zeros(3, 2, 4, dtype=torch.int64), "labels": torch.zeros(3, 2, 4, dtype=torch.int64)}


def formula(policy: Tensor, reference: Tensor, beta: float) -> Tensor:
    """Return equation 7 of Rafailov et al. 2023, pair by pair."""
    chosen, rejected = (policy[:, i] - reference[:, i] for i in (0, 1))
    return -(1 / (1 + (-beta * (chosen - rejected)).exp())).log()


def test_the_loss_is_the_formula_and_so_is_its_gradient() -> None:
    ours, theirs = POLICY.clone().requires_grad_(), POLICY.clone().requires_grad_()
    loss = Dpo(beta=0.3).loss({"policy": ours, "reference": REFERENCE}, BATCH)
    expected = formula(theirs, REFERENCE, 0.3).sum()
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(ours.grad, theirs.grad)
    # By hand: margins 0.5 - (-1) = 1.5, 0 - 0.5 = -0.5 and 0; sigmoid(0.45), sigmoid(-0.15) and a half.
    golden = math.log1p(math.exp(-0.45)) + math.log1p(math.exp(0.15)) + math.log(2)
    assert loss.item() == pytest.approx(golden, rel=1e-12)


def test_figures_count_pairs_whose_chosen_answer_is_strictly_better() -> None:
    task = Dpo(beta=0.3)
    sums = {**task.sums({"policy": POLICY, "reference": REFERENCE}, BATCH), "samples": torch.tensor(3)}
    assert task.figures(sums) == pytest.approx({"reward_accuracy": 1 / 3, "reward_margin": 0.3 * (1.5 - 0.5) / 3})
    assert task.weight(BATCH) == 3


def test_log_probabilities_are_summed_over_the_tokens_of_an_answer() -> None:
    logits = torch.randn(2, 4, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    answers = torch.tensor([[-100, -100, 3, 4], [-100, 1, -100, -100]])
    chances = logits.log_softmax(2)
    expected = torch.stack([chances[0, 1, 3] + chances[0, 2, 4], chances[1, 0, 1]])
    torch.testing.assert_close(compute_answer_log_probs(logits, answers), expected)


def test_half_precision_logits_are_summed_in_float32() -> None:
    logits = torch.randn(1, 3, 7, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert compute_answer_log_probs(logits, torch.tensor([[-100, 2, 3]])).dtype == torch.float32


@pytest.mark.parametrize(("beta", "said"), [(0, "greater than 0"), (-1.0, "greater than 0"), ("a", "valid number")])
def test_beta_is_a_positive_number(beta: Any, said: str) -> None:
    recipe = {"task": {"name": "dpo", "beta": beta}, "loss": {"name": "cross_entropy", "label_smoothing": 0.0}}
    with pytest.raises(UsageError, match=rf"recipe.task.beta: input should be .*{said}"):
        find_task(recipe, "model m", {"rows": "pairs"}, BATCH)


def test_pairs_ask_for_the_task_by_name_and_conversations_do_not() -> None:
    recipe = {"task": {"name": "auto"}, "loss": {"name": "cross_entropy", "label_smoothing": 0.0}}
    with pytest.raises(UsageError, match=r"auto does not support preference pairs; set recipe\.task=dpo"):
        find_task(recipe, "model m", {"vocabulary": 9, "rows": "pairs"}, BATCH)
    _, line = find_task(recipe, "model m", {"vocabulary": 9, "rows": "conversations"}, BATCH)
    assert line == "task sft: the data has conversations"


def test_other_batches_and_outputs_are_refused() -> None:
    task = dpo("model m")
    with pytest.raises(UsageError, match=r"dpo requires batches with input_ids and labels of shape \[n, 2, t\]"):
        task.inputs({"input_ids": torch.zeros(2, 4), "labels": torch.zeros(2, 4)})
    with pytest.raises(UsageError, match=r"expected policy and reference of shape \[3, 2\]"):
        task.check({"policy": POLICY}, BATCH)
