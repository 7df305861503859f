"""A loss that is no sum over samples is refused, wherever in its graph the mean stands; factors are the user's own."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.errors import UsageError
from lockstep.run.own_loss import LossCheck
from lockstep.tasks.base import MicroBatch

TARGETS = torch.tensor([0, 1, 2, -100])
WEIGHT = nn.Parameter(torch.ones(4, 6))
SCALE = nn.Parameter(torch.zeros(()))
OTHERS = {32: "the number of samples of the step", 8: "the number of micro-batches of the step"}

Loss = Callable[[Tensor], Tensor]


def no_warning(line: str) -> None:
    pytest.fail(line)


def check(loss: Loss, samples: int = 4, seen: LossCheck | None = None, step: int = 1, known: bool = True) -> None:
    """Check a loss of what a model returns for a micro-batch of so many samples, which is one of eight."""
    outputs = nn.Linear(3, 5)(torch.ones(samples, 3))
    microbatch = MicroBatch(0, None, samples, samples)
    (seen or LossCheck(warn=no_warning)).check(
        step, loss(outputs), microbatch, lambda: OTHERS, {outputs.grad_fn} if known else set()
    )


def entropy(x: Tensor, smoothing: float = 0.0) -> Tensor:
    return F.cross_entropy(x, TARGETS, reduction="sum", label_smoothing=smoothing)


def each_entropy(x: Tensor) -> Tensor:
    return F.cross_entropy(x, TARGETS, reduction="none")


def each_of(x: Tensor, reduction: str = "mean") -> list[Tensor]:
    pairs = zip(x, TARGETS.clamp(0), strict=True)
    return [F.cross_entropy(each[None], target[None], reduction=reduction) for each, target in pairs]


def penalty() -> Tensor:
    return WEIGHT.square().mean() / 4 + WEIGHT.abs().sum() / 8


@pytest.mark.parametrize(
    "loss",
    [
        entropy,
        lambda x: entropy(x, 0.1),
        lambda x: F.mse_loss(x, x.detach(), reduction="sum") / 2,
        lambda x: ((x - 1) ** 2).sum() / x.shape[1],
        lambda x: x.square().sum() / 2 + x.sum(),
        lambda x: 0.25 * entropy(x) + 0.1 * x.sum(),
        lambda x: entropy(x) + 0.125 * (x - 1).abs().sum(),
        lambda x: entropy(x) * 0.1,
        lambda x: entropy(x, 5 / 32),  # over five classes: 1/32 of each, beside 27/32
        lambda x: entropy(x, 0.75) * 3,  # of which a quarter stays
        lambda x: (entropy(x) + entropy(-x)) * 0.5,
        lambda x: 0.5 * (x - 1).square().sum(),
        lambda x: 0.5 * F.mse_loss(x, x.detach(), reduction="sum"),
        lambda x: (x * torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0])).sum() / 3,
        lambda x: entropy(x) / 7 + entropy(x) / 0.5,
        lambda x: (entropy(x) + entropy(-x)) / 2,
        lambda x: torch.stack([entropy(x), entropy(2 * x)]).mean(),
        lambda x: sum(entropy(number * x) for number in range(8)) / 8,
        lambda x: sum(entropy(number * x) for number in range(4)) / 4,  # and there are four samples
        lambda x: entropy(x).mean().squeeze(),
        lambda x: entropy(x) + penalty(),
        lambda x: torch.exp(-SCALE) * entropy(x) + SCALE / 4,
        lambda x: entropy(x) / torch.exp(SCALE),
        lambda x: x.mean(1).sum() + x.square().mean(-1).sum(),
        lambda x: (x.sum(1) / torch.tensor([1.0, 2.0, 4.0, 4.0])).sum(),
        lambda x: sum(F.cross_entropy(each, target) for each, target in zip(x, TARGETS.clamp(0), strict=True)),
        lambda x: x.repeat(3, 1, 1).mean(0).sum(),
        lambda x: (x.exp() / 4).log().sum(),
        lambda x: (x.mean(0) * x.softmax(1).mean(0)).sum(),
        # As papers have them: weighed classes, focal, entropy, SimSiam, triplets, a masked autoencoder.
        lambda x: F.cross_entropy(x, TARGETS, weight=torch.tensor([0.2, 0.3, 0.5, 0.1, 0.1]), reduction="sum"),
        lambda x: ((1 - torch.exp(-each_entropy(x))) ** 2 * each_entropy(x)).sum(),
        lambda x: entropy(x) + 0.1 * (x.softmax(1) * x.log_softmax(1)).sum(),
        lambda x: -F.cosine_similarity(x, x.detach().flip(0)).sum(),
        lambda x: F.triplet_margin_loss(x, 1.1 * x, x.flip(0), reduction="sum"),
        lambda x: ((x - 1).square().mean(-1, keepdim=True) * (x.detach() < 0).float()).sum(),
        lambda x: F.cross_entropy(x, TARGETS) * (TARGETS >= 0).sum(),
        lambda x: F.mse_loss(x, x.detach() + 1) * len(x),
        lambda x: each_entropy(x).mean() * len(x),
        lambda x: F.mse_loss(x, x.detach() + 1) * x.numel(),
    ],
)
def test_a_sum_is_taken(loss: Loss) -> None:
    check(loss)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda x: F.cross_entropy(x, TARGETS), "the loss is a mean"),
        (lambda x: x.square().mean(), "the loss is a mean"),
        (lambda x: x.square().mean((0, 1)), "the loss is a mean"),
        (lambda x: x.square().mean(0).sum(), "the loss is a mean"),
        (lambda x: x.square().mean().view(1).squeeze().double(), "the loss is a mean"),
        (lambda x: F.cross_entropy(x, TARGETS) / 8, "the loss is a mean"),
        (lambda x: F.cross_entropy(x, TARGETS, label_smoothing=0.1), "a part of the loss is a mean"),
        (lambda x: F.cross_entropy(x, TARGETS, label_smoothing=0.1) / 8, "a part of the loss is a mean"),
        (lambda x: F.cross_entropy(x, x.detach().softmax(1)), "the loss is divided by 4, the number of samples of the"),
        (lambda x: F.cross_entropy(x, TARGETS) * 4, "the loss is a mean"),
        (lambda x: each_entropy(x)[TARGETS >= 0].mean() * len(x), "the loss is a mean"),
        (lambda x: each_entropy(x).mean() * 3, "the loss is a mean"),
        (lambda x: 1 - F.cosine_similarity(x, x.detach()).mean(), "the loss is a mean"),
        (lambda x: F.cross_entropy(x, TARGETS) + penalty(), "the loss is a mean"),
        (lambda x: -F.mse_loss(x, x.detach()) + entropy(x), "a part of the loss is a mean"),
        (lambda x: torch.exp(-SCALE) * F.l1_loss(x, x.detach()) + SCALE, "the loss is a mean"),
        (lambda x: F.binary_cross_entropy_with_logits(x, x.detach().sigmoid()) / 3, "the loss is a mean"),
        (lambda x: F.smooth_l1_loss(x, x.detach()), "the loss is a mean"),
        (lambda x: F.cross_entropy(x, TARGETS, reduction="none")[TARGETS >= 0].mean(), "the loss is a mean"),
        (lambda x: F.kl_div(x, x.detach(), reduction="batchmean"), "the loss is divided by 4, the number of samples"),
        (lambda x: entropy(x) / len(x), "the loss is divided by 4, the number of samples of the micro-batch"),
        (lambda x: (F.cross_entropy(x, TARGETS, reduction="none") / 4).sum(), "the loss is divided by 4, the number"),
        (lambda x: entropy(x, 0.1) / 8, "the loss is divided by 8, the number of micro-batches of the step"),
        (lambda x: (entropy(x) + penalty()) / 8, "the loss is divided by 8, the number of micro-batches of the step"),
        (lambda x: 0.5 * (entropy(x).div_(32)), "the loss is divided by 32, the number of samples of the step"),
        (lambda x: entropy(x) / (TARGETS >= 0).sum(), "the loss is divided by 3, as many as were added up"),
        (lambda x: F.mse_loss(x, x.detach(), reduction="sum") / x.numel(), "the loss is divided by 20, as many as"),
        (lambda x: x.square().sum() / x.numel(), "the loss is divided by 20, as many as were added up"),
        (lambda x: (x * (TARGETS >= 0)[:, None]).sum() / 3, "the loss is divided by 3, as many as were added up"),
        (lambda x: sum(each_of(x)) / 4, "the loss is divided by 4, the number of samples of the micro-batch"),
        (lambda x: sum(each_of(x, "sum")) / 4, "the loss is divided by 4, the number of samples of the micro-batch"),
        (
            lambda x: torch.stack(each_of(x)).mean(),
            "the loss is divided by 4, the number of samples of the micro-batch",
        ),
        (lambda x: x.sum().detach(), "the loss has no graph that leads to the model"),
        (lambda x: x.sum(0), r"step.backward was given a tensor of shape \[5\]"),
        (lambda x: x.sum().item(), "step.backward was given a float"),
    ],
)
def test_what_is_no_sum_is_refused(loss: Loss, said: str) -> None:
    with pytest.raises(UsageError, match=f"step 1: {said}"):
        check(loss)


def test_a_factor_of_the_users_own_has_a_way() -> None:
    with pytest.raises(UsageError, match=r"divided by 8, .*; write a factor of your own as 0\.125 \* loss"):
        check(lambda x: entropy(x) / 8)


def test_a_mean_over_what_only_follows_from_the_model_is_taken_where_it_is_known() -> None:
    aux = nn.Linear(2, 2)(torch.ones(4, 2))  # such as a router's, within the model
    check(lambda x: entropy(x) + 0.01 * aux.mean())
    with pytest.raises(UsageError, match="a part of the loss is a mean"):
        check(lambda x: entropy(x) + 0.01 * aux.mean(), known=False)


@pytest.mark.parametrize("of", ["gradients", "activations"])
def test_a_mean_over_what_the_forward_computed_is_refused_though_it_was_not_returned(of: str) -> None:
    inputs, hidden = torch.ones(4, 3, requires_grad=True), nn.Linear(3, 6)
    activations = hidden(inputs).relu()
    outputs = nn.Linear(6, 5)(activations)
    (gradients,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    part = {"gradients": (gradients.norm(2, 1) - 1) ** 2, "activations": activations.square()}[of]
    microbatch, returned = MicroBatch(0, None, 4, 4), {outputs.grad_fn}
    LossCheck(warn=no_warning).check(1, entropy(outputs) + part.sum(), microbatch, dict, returned)
    with pytest.raises(UsageError, match="a part of the loss is a mean"):
        LossCheck().check(1, entropy(outputs) + part.mean(), microbatch, dict, returned)


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (lambda x: F.mse_loss(x, x.detach() + 1).sqrt(), "sqrt"),
        (lambda x: each_entropy(x).mean().exp() + entropy(x), "exp"),
        (lambda x: 1 - 2 * (x.exp() * x).sum() / (x.exp().sum() + x.sum()), "div"),
        (lambda x: each_entropy(x).median(), "median"),
    ],
)
def test_a_function_of_what_all_samples_give_is_taken_and_warned_of_once(loss: Loss, name: str) -> None:
    lines: list[str] = []
    seen = LossCheck(warn=lines.append)
    for step in (1, 2):
        check(loss, seen=seen, step=step)
    [line] = lines
    assert f"step 1: the loss has a part that is no sum over samples, but the {name} of what all samples" in line


@pytest.mark.parametrize("name", ["Mean", "Sum", "Mul", "Div", "Stack"])
def test_a_function_of_the_users_own_may_have_the_name_of_one_of_torchs(name: str) -> None:
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient.expand(4)

    methods = {"forward": staticmethod(lambda _, values: values.sum()), "backward": staticmethod(backward)}
    own: Any = type(name, (torch.autograd.Function,), methods)
    check(lambda x: own.apply(each_entropy(x)))


def test_a_mean_over_the_only_sample_is_a_sum() -> None:
    check(lambda x: x.mean(), samples=1)


def test_a_factor_that_follows_the_size_of_the_microbatch_is_found_once_there_are_two() -> None:
    seen = LossCheck()
    check(lambda x: x.sum() * (1 / len(x)), 3, seen)
    check(lambda x: x.sum() * (1 / len(x)), 3, seen)
    with pytest.raises(UsageError, match=r"step 2: the loss is multiplied by 0\.5 in a micro-batch of 2, by 0\.333333"):
        check(lambda x: x.sum() * (1 / len(x)), 2, seen, step=2)


def test_factors_may_change_with_the_step_and_the_microbatch_as_those_of_mixup_do() -> None:
    seen = LossCheck()
    for step, size in ((1, 4), (1, 3), (2, 4), (2, 2)):
        share = 0.3 + 0.1 * step / size
        check(lambda x, share=share: share * x.square().sum() + (1 - share) * x.sum(), size, seen, step)
        check(lambda x, step=step: x.square().sum() / (1.5 * step), size, seen, step + 10)


def test_a_divisor_that_changes_within_a_step_makes_a_mean_of_means() -> None:
    seen = LossCheck()
    check(lambda x: x.sum() / torch.tensor(2.5), 4, seen)
    with pytest.raises(UsageError, match=r"divided by 3\.5, and in the micro-batch before by 2\.5.*weight="):
        check(lambda x: x.sum() / torch.tensor(3.5), 4, seen)


@pytest.mark.parametrize(
    ("loss", "factor", "what"),
    [
        (lambda x: entropy(x) * (1 / 8), "0.125", "the number of micro-batches of the step"),
        (lambda x: 0.25 * entropy(x) + 0.1 * (0.25 * x).sum(), "0.25", "the number of samples of the micro-batch"),
        (lambda x: -(1 / 32) * x.log_softmax(1)[:, 0].sum(), "-0.03125", "the number of samples of the step"),
        (lambda x: entropy(x, 0.1) * torch.tensor(1 / 8), "0.125", "the number of micro-batches of the step"),
        (lambda x: x.exp().sum() * (1 / 20), "0.05", "as many as were added up"),
    ],
)
def test_a_product_with_the_inverse_of_a_count_is_taken_and_warned_of_once(loss: Loss, factor: str, what: str) -> None:
    lines: list[str] = []
    seen = LossCheck(warn=lines.append)
    for step in (3, 3, 4):
        check(loss, seen=seen, step=step)
    [line] = lines
    place = r"\(\S*test_run_own_loss\.py:\d+\)"
    assert re.match(rf"step 3: the loss is multiplied by {factor} {place}: if that divides by {what}, drop", line), line


def test_what_a_product_is_warned_of_says_by_how_much_the_gradient_is_too_small() -> None:
    lines: list[str] = []
    check(lambda x: entropy(x) * (1 / 8), seen=LossCheck(warn=lines.append))
    assert "the gradient is 8 times too small" in lines[0]


def test_a_factor_of_as_many_processes_is_taken_and_warned_of_once() -> None:
    lines: list[str] = []
    seen = LossCheck(processes=3, warn=lines.append)
    for factor in (2.5, 3, 3):
        check(lambda x, factor=factor: factor * entropy(x), seen=seen)
    [line] = lines
    assert "the loss is multiplied by 3 " in line
    assert "if that is the number of processes" in line


def test_the_factor_of_a_scaler_is_refused_and_one_like_it_is_the_users() -> None:
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(UsageError, match=r"multiplied by 65536, as torch\.amp\.GradScaler does.*precision="):
        check(lambda x: scaler.scale(entropy(x)))
    check(lambda x: 65536.0 * entropy(x) + 512 * x.sum() + torch.tensor(300.0) * x.sum())
