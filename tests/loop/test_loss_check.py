"""A loss that is evidently no mean, or no sum, is refused under that name; factors are the user's own."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_process import joined
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lockstep.errors import UsageError
from lockstep.loop.loss_check import LossCheck
from lockstep.tasks.base import MicroBatch

TARGETS = torch.tensor([0, 1, 2, -100])
WEIGHT = nn.Parameter(torch.ones(4, 6))
SCALE = nn.Parameter(torch.zeros(()))

Loss = Callable[[Tensor], Tensor]


def no_warning(line: str) -> None:
    pytest.fail(line)


def check(
    loss: Loss,
    samples: int = 4,
    seen: LossCheck | None = None,
    step: int = 1,
    known: bool = True,
    mean: bool = False,
    microbatches: int = 8,
    weight: int | None = None,
    batch: Any = None,
    step_weight: int = 0,
    careful: bool = False,
) -> bool:
    """Check a loss of what a model returns for a micro-batch of so many samples."""
    outputs = nn.Linear(3, 5)(torch.ones(samples, 3))
    microbatch = MicroBatch(0, batch, samples, samples if weight is None else weight)
    return (seen or LossCheck(warn=no_warning)).check(
        step,
        loss(outputs),
        microbatch,
        microbatches,
        {outputs.grad_fn} if known else set(),
        mean=mean,
        has_weights=weight is not None,
        step_weight=step_weight,
        careful=careful,
    )


def warnings_of(loss: Loss, **given: Any) -> list[str]:
    """Return what two steps with a loss are warned of."""
    lines: list[str] = []
    seen = LossCheck(warn=lines.append)
    for step in (1, 2):
        check(loss, seen=seen, step=step, **given)
    return lines


def entropy(x: Tensor, smoothing: float = 0.0) -> Tensor:
    return F.cross_entropy(x, TARGETS, reduction="sum", label_smoothing=smoothing)


def each_entropy(x: Tensor) -> Tensor:
    return F.cross_entropy(x, TARGETS, reduction="none")


def each_of(x: Tensor, reduction: str = "mean") -> list[Tensor]:
    pairs = zip(x, TARGETS.clamp(0), strict=True)
    return [F.cross_entropy(each[None], target[None], reduction=reduction) for each, target in pairs]


def squares(x: Tensor) -> Tensor:
    return (x - 1).square().sum(1)


def penalty() -> Tensor:
    return WEIGHT.square().mean() / 4 + WEIGHT.abs().sum() / 8


MASK = torch.tensor([1.0, 1.0, 1.0, 0.0])

SUMS: list[Loss] = [
    entropy,
    lambda x: entropy(x, 0.1),
    lambda x: squares(x).sum() / 2,
    lambda x: ((x - 1) ** 2).sum() / x.shape[1],
    lambda x: (x - 1).square().mean(1).sum(),
    lambda x: squares(x).sum() / 2 + x.sum(1).sum(),
    lambda x: 0.25 * entropy(x) + 0.1 * x.sum(),
    lambda x: entropy(x) + 0.125 * (x - 1).abs().sum(),
    lambda x: entropy(x) * 0.1,
    lambda x: entropy(x) * (1 / 8),  # a product is a factor of the user's own, whatever its value
    lambda x: entropy(x, 0.75) * 3,
    lambda x: (entropy(x) + entropy(-x)) * 0.5,
    lambda x: entropy(x) / 7 + entropy(x) / 0.5,
    lambda x: entropy(x) / 2.5,
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
    lambda x: sum(each_of(x)),
    lambda x: x.repeat(3, 1, 1).mean(0).sum(1).sum(),
    lambda x: (x.exp() / 4).log().sum(1).sum(),
    # As papers have them: weighed classes, focal, entropy, SimSiam, triplets, a masked autoencoder.
    lambda x: F.cross_entropy(x, TARGETS, weight=torch.tensor([0.2, 0.3, 0.5, 0.1, 0.1]), reduction="sum"),
    lambda x: ((1 - torch.exp(-each_entropy(x))) ** 2 * each_entropy(x)).sum(),
    lambda x: entropy(x) + 0.1 * (x.softmax(1) * x.log_softmax(1)).sum(),
    lambda x: -F.cosine_similarity(x, x.detach().flip(0)).sum(),
    lambda x: F.triplet_margin_loss(x, 1.1 * x, x.flip(0), reduction="sum"),
    lambda x: ((x - 1).square().mean(-1, keepdim=True) * (x.detach()[:, :1] < 0).float()).sum(),
    # Means that were made sums again.
    lambda x: F.cross_entropy(x, TARGETS) * (TARGETS >= 0).sum(),
    lambda x: F.mse_loss(x, x.detach() + 1) * len(x),
    lambda x: each_entropy(x).mean() * len(x),
    lambda x: 0.1 * F.mse_loss(x, x.detach() + 1) * len(x),
    lambda x: (0.1 * F.mse_loss(x, x.detach() + 1) + 0.7 * F.l1_loss(x, x.detach() + 1)) * len(x),
    lambda x: (each_entropy(x) * MASK).sum() / MASK.sum() * MASK.sum(),
    lambda x: F.cross_entropy(x, TARGETS) * len(x),  # the mean over three tokens of four samples
]


@pytest.mark.parametrize("loss", SUMS)
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
        (lambda x: F.cross_entropy(x, TARGETS, label_smoothing=0.1), "the loss is a mean"),
        (lambda x: F.cross_entropy(x, x.detach().softmax(1)), "the loss is a mean: a sum divided by 4"),
        (lambda x: 0.3 * F.cross_entropy(x, TARGETS), "the loss is a mean"),
        (lambda x: each_entropy(x).mean() * 3, "the loss is a mean"),
        (lambda x: 1 - F.cosine_similarity(x, x.detach()).mean(), "the loss is a mean"),
        (lambda x: F.cross_entropy(x, TARGETS) + penalty(), "the loss is a mean"),
        (lambda x: -F.mse_loss(x, x.detach()) + entropy(x), "a part of the loss is a mean, and another part is a sum"),
        (lambda x: torch.exp(-SCALE) * F.l1_loss(x, x.detach()) + SCALE, "the loss is a mean"),
        (lambda x: F.smooth_l1_loss(x, x.detach()), "the loss is a mean"),
        (lambda x: each_entropy(x)[TARGETS >= 0].mean(), "the loss is a mean"),
        (lambda x: F.kl_div(x, x.detach(), reduction="batchmean"), "the loss is a mean: a sum divided by 4"),
        (lambda x: entropy(x) / len(x), "the loss is a mean: a sum divided by 4"),
        (lambda x: (each_entropy(x) / 4).sum(), "the loss is a mean: a sum divided by 4"),
        (lambda x: entropy(x) / (TARGETS >= 0).sum(), "the loss is a mean: a sum divided by 3"),
        (lambda x: x.square().sum() / x.numel(), "the loss is a mean: a sum divided by 20"),
        (lambda x: (x * (TARGETS >= 0)[:, None]).sum() / 3, "the loss is a mean: a sum divided by 3"),
        (lambda x: (each_entropy(x) * MASK / 2.5).sum() / MASK.sum(), "the loss is a mean: a sum divided by 3"),
        (lambda x: sum(each_of(x)) / 4, "the loss is a mean: a sum divided by 4"),
        (lambda x: sum(each_of(x, "sum")) / 4, "the loss is a mean: a sum divided by 4"),
        (lambda x: torch.stack(each_of(x)).mean(), "the loss is a mean: a sum divided by 4"),
    ],
)
def test_a_mean_that_is_given_as_a_sum_is_refused(loss: Loss, said: str) -> None:
    with pytest.raises(UsageError, match=f"step 1: {said}"):
        check(loss)
    if "part" not in said:
        with pytest.raises(UsageError, match=r"pass it as step\.backward\(mean=loss\)"):
            check(loss)
        check(loss, mean=True, microbatches=1)


MEANS: list[Loss] = [
    lambda x: F.cross_entropy(x, TARGETS.clamp(0)),
    lambda x: 4 * F.cross_entropy(x, TARGETS.clamp(0)),
    lambda x: F.cross_entropy(x, TARGETS.clamp(0), label_smoothing=0.1),
    lambda x: F.cross_entropy(x, x.detach().softmax(1)),
    lambda x: F.mse_loss(x, x.detach()),  # over five outputs of each sample
    lambda x: 0.3 * F.mse_loss(x, x.detach()) + 0.7 * F.l1_loss(x, x.detach()),
    lambda x: F.mse_loss(x, x.detach()) / 2,
    lambda x: (F.l1_loss(x, x.detach()) + F.l1_loss(-x, x.detach())) / 2,
    lambda x: squares(x).mean(),
    lambda x: squares(x).sum() / len(x),
    lambda x: (x - 1).square().sum() / x.numel(),
    lambda x: each_entropy(x).view(2, 2).mean(1).mean(),
    lambda x: F.kl_div(x, x.detach(), reduction="batchmean"),
    lambda x: F.mse_loss(x, x.detach()) + penalty(),
    lambda x: 1 - F.cosine_similarity(x, x.detach()).mean(),
    lambda x: sum(each_of(x)) / 4,
]


@pytest.mark.parametrize("loss", MEANS)
@pytest.mark.parametrize("microbatches", [1, 8])
def test_a_mean_is_taken(loss: Loss, microbatches: int) -> None:
    check(loss, mean=True, microbatches=microbatches)


@pytest.mark.parametrize(
    "loss",
    [
        entropy,
        lambda x: 0.3 * entropy(x) + 2 * squares(x).sum(),
        lambda x: squares(x).sum() / 2,
        lambda x: (entropy(x) + entropy(-x)) / 2,
        lambda x: each_entropy(x).sum(),
        lambda x: sum(each_of(x)),
        lambda x: F.mse_loss(x, x.detach(), reduction="sum"),
    ],
)
def test_a_sum_that_is_given_as_a_mean_is_refused(loss: Loss) -> None:
    for microbatches in (1, 8):
        with pytest.raises(
            UsageError, match=r"the loss is a sum over \d+ values.*pass it as step\.backward\(sum=loss\)"
        ):
            check(loss, mean=True, microbatches=microbatches)


def value_of(x: Tensor) -> Tensor:
    """Return one value per sample, as a regression does."""
    return x[:, 0] - 1


def each_value(x: Tensor, loss: Loss) -> list[Tensor]:
    return [loss(value) for value in value_of(x)]


ONE_VALUE_EACH: list[Loss] = [
    lambda x: sum(each_value(x, torch.square)),  # type: ignore[arg-type,return-value]
    lambda x: sum(each_value(x, lambda value: value.square().mean())),
    lambda x: sum(value.square().mean() for value in value_of(x)[:, None]),
    lambda x: sum(value_of(x)[number].abs() for number in range(len(x))),
    lambda x: torch.stack(each_value(x, torch.square)).sum(),
    lambda x: torch.stack(each_value(x, lambda value: value.square().sum())).sum(),
    lambda x: torch.stack([*value_of(x).square()]).sum(),
    lambda x: sum((each - 1).square().sum() for each in x),  # five values
    lambda x: torch.stack([(each - 1).square().sum() for each in x]).sum(),
]


@pytest.mark.parametrize("samples", [2, 4, 7])
@pytest.mark.parametrize("loss", ONE_VALUE_EACH)
def test_a_list_of_the_losses_of_single_samples_is_a_sum_and_a_mean_once_divided(loss: Loss, samples: int) -> None:
    def mean(x: Tensor) -> Tensor:
        return loss(x) / len(x)

    check(loss, samples)
    check(mean, samples, mean=True)
    with pytest.raises(
        UsageError, match=rf"the loss is a mean: a sum divided by {samples}; pass it|the loss is a mean"
    ):
        check(mean, samples)
    with pytest.raises(UsageError, match=rf"the loss is a sum over {samples} values"):
        check(loss, samples, mean=True, microbatches=1)


@pytest.mark.parametrize("samples", [2, 4, 7])
@pytest.mark.parametrize(
    "loss", [lambda x: torch.stack(each_value(x, torch.square)).mean(), lambda x: value_of(x).square().nanmean()]
)
def test_a_mean_over_one_value_per_sample_is_one(loss: Loss, samples: int) -> None:
    check(loss, samples, mean=True)
    with pytest.raises(UsageError, match="the loss is a mean"):
        check(loss, samples)


def test_values_that_a_mean_skips_are_not_counted() -> None:
    def loss(x: Tensor) -> Tensor:
        return (value_of(x) * torch.tensor([1.0, torch.nan, 1.0, 1.0])).nanmean()

    check(loss, mean=True, weight=3)
    with pytest.raises(UsageError, match="the loss is a mean: a sum divided by 3"):
        check(loss)


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: torch.dot(value_of(x), value_of(x)) / len(x),
        lambda x: torch.einsum("i,i->", value_of(x), value_of(x)) / len(x),
        lambda x: torch.einsum("ij,ij->", x, x) / x.numel(),
    ],
)
def test_a_product_over_samples_may_be_divided_by_their_number(loss: Loss) -> None:
    check(loss, mean=True)


def test_a_loss_per_time_is_none_of_a_sample_although_there_are_as_many_times() -> None:
    def loss(x: Tensor) -> Tensor:
        times = x.T[:4]  # of four samples each
        return sum((each - 1).square().mean() for each in times)  # type: ignore[return-value]

    check(loss, mean=True)


def test_a_function_over_features_is_no_sum_over_samples() -> None:
    def decorrelated(x: Tensor) -> Tensor:
        return (x.T @ x - torch.eye(5)).square().sum()  # as Barlow Twins has it

    check(decorrelated, mean=True, microbatches=1)
    [line] = warnings_of(decorrelated, mean=True)
    assert "the loss is a sum over 25 values" in line
    assert "in one of 8 micro-batches" in line


def test_a_part_that_is_a_sum_beside_a_mean_is_asked_about_once_in_several_microbatches() -> None:
    def loss(x: Tensor) -> Tensor:
        return F.mse_loss(x, x.detach()) + 0.1 * x.abs().sum(1).sum()

    check(loss, mean=True, microbatches=1)
    [line] = warnings_of(loss, mean=True)
    assert re.match(r"step 1: a part of the loss is a sum over 4 values \(\S*test_loss_check\.py:\d+\), in one", line)


def test_a_sum_that_is_divided_by_the_batch_of_all_is_no_mean_over_the_microbatch() -> None:
    [line] = warnings_of(lambda x: entropy(x) / 32.5, mean=True)
    assert "the loss is a sum over 3 values, divided by 32.5" in line


@pytest.mark.parametrize(
    ("loss", "count"),
    [
        (lambda x: F.mse_loss(x, x.detach(), reduction="sum"), 20),
        (lambda x: F.binary_cross_entropy_with_logits(x, x.detach().sigmoid(), reduction="sum"), 20),
        (lambda x: F.cross_entropy(x[:, :, None].expand(4, 5, 64), torch.zeros(4, 64).long(), reduction="sum"), 256),
    ],
)
def test_a_sum_over_more_values_than_samples_is_asked_about_once(loss: Loss, count: int) -> None:
    [line] = warnings_of(loss)
    assert f"step 1: the loss sums {count} values of a micro-batch of 4 samples" in line
    assert "step.backward(mean=loss)" in line
    check(loss, weight=4)  # whoever counts samples by weight= has said what the sum is divided by
    [line] = warnings_of(loss, weight=3)
    assert "of a micro-batch of weight 3" in line


def test_a_sum_times_the_weight_of_the_step_is_not_asked_about() -> None:
    def vae(x: Tensor) -> Tensor:
        """Return the two sums of a VAE, which its script never divides."""
        likeness = F.binary_cross_entropy_with_logits(x, x.detach().sigmoid(), reduction="sum")
        return likeness - 0.5 * torch.sum(1 + x - x.pow(2) - x.exp())

    assert not warnings_of(lambda x: 32 * vae(x), step_weight=32)
    [line] = warnings_of(vae, step_weight=32)
    assert "if it never divides the sum, use step.backward(sum=step.weight * loss)" in line


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("divisor", [2, 3, 8])
def test_a_division_that_looks_like_gradient_accumulation_is_refused_and_has_a_way(divisor: int, mean: bool) -> None:
    def loss(x: Tensor) -> Tensor:
        return F.cross_entropy(x, TARGETS.clamp(0), reduction="mean" if mean else "sum")

    with pytest.raises(
        UsageError, match=rf"the loss is divided by {divisor} .*microbatches=.*write {1 / divisor:.6g} \* loss"
    ):
        check(lambda x: (loss(x) + penalty()) / divisor, mean=mean)
    check(lambda x: 1 / divisor * loss(x), mean=mean)


def test_a_division_is_only_warned_of_in_a_later_step_as_after_a_resume() -> None:
    lines: list[str] = []
    seen = LossCheck(warn=lines.append)
    for step in (7, 8):
        check(lambda x, step=step: F.cross_entropy(x, TARGETS.clamp(0)) / (step - 5), seen=seen, step=step, mean=True)
    [line] = lines
    assert line.startswith("step 7: the loss is divided by 2 (")


def test_factors_may_change_with_the_step_and_the_microbatch_as_those_of_mixup_do() -> None:
    for mean, reduction in ((True, "mean"), (False, "sum")):
        seen = LossCheck(warn=no_warning)
        for step in range(1, 5):
            for size in (4, 2):
                share = 1 / (step * size)  # inverse to the size of the micro-batch, by chance

                def loss(x: Tensor, share: float = share, step: int = step, reduction: str = reduction) -> Tensor:
                    targets = TARGETS.clamp(0)[: len(x)]
                    both = [F.cross_entropy(x, each, reduction=reduction) for each in (targets, targets.flip(0))]
                    return (share * both[0] + (1 - share) * both[1]) * (0.5 / step)

                check(loss, size, seen, step, mean=mean)


def test_a_mean_over_other_counts_than_samples_is_asked_for_a_weight_once() -> None:
    targets = torch.tensor([0, 1, 2, -100])

    def loss(x: Tensor) -> Tensor:
        return F.cross_entropy(x, targets)

    check(loss, mean=True, microbatches=1)
    check(loss, mean=True, weight=3)
    [line] = warnings_of(loss, mean=True, batch=(torch.ones(4, 3), targets))
    assert re.match(
        r"step 1: the loss is a mean over 3 values of a micro-batch of 4 samples \(\S+\); .* pass it to "
        r"run\.steps: weight=lambda batch: int\(\(batch\[1\] != -100\)\.sum\(\)\)",
        line,
    )
    [line] = warnings_of(loss, mean=True, batch={"labels": targets})
    assert "int((batch['labels'] != -100).sum())" in line
    [line] = warnings_of(lambda x: (each_entropy(x) * MASK).sum() / MASK.sum(), mean=True)
    assert "a mean over 3 values" in line


def test_means_over_counts_that_are_not_proportional_to_the_samples_are_asked_for_a_weight() -> None:
    lines: list[str] = []
    seen = LossCheck(warn=lines.append)
    for samples, length in ((4, 2), (2, 2), (4, 3)):
        check(lambda x, length=length: x[:, None].repeat(1, length, 1).mean(), samples, seen, mean=True)
    [line] = lines
    assert "a mean over 60 values" in line
    assert "and over 20 values in the previous one" in line


def test_counts_that_differ_only_in_a_later_step_are_warned_of_once_in_a_careful_one() -> None:
    lines: list[str] = []
    seen = LossCheck(warn=lines.append)

    def of(length: int, step: int, *, careful: bool = False) -> None:
        check(lambda x: x[:, None].repeat(1, length, 1).mean(), seen=seen, step=step, mean=True, careful=careful)

    for step, lengths, careful in [(1, (2, 2), True), (2, (2, 3), False), (3, (2, 2), True), (4, (3, 3), True)]:
        for length in lengths:
            of(length, step, careful=careful)
    assert not lines
    for step in (5, 6):
        for length in (2, 3):
            of(length, step, careful=True)
    [line] = lines
    assert line.startswith("step 5: the loss is a mean over 60 values")
    assert "and over 40 values in the previous one" in line


def test_a_loop_is_warned_of_counts_that_first_differ_in_its_second_step(capsys: pytest.CaptureFixture[str]) -> None:
    targets = torch.arange(32) % 3
    targets[17:20] = -100
    with joined() as run:
        model = nn.Linear(3, 5)
        model, _ = run.place(model, torch.optim.SGD(model.parameters(), lr=0.1))
        dataset = TensorDataset(torch.ones(32, 3), targets)
        for step in run.steps(dataset, batch=16, microbatches=2, epochs=2, order="sequential"):
            for x, y in step:
                step.backward(mean=F.cross_entropy(model(x), y))
            step.update()
    [line] = [line for line in capsys.readouterr().err.splitlines() if "values of a micro-batch" in line]
    assert line.startswith("warning: step 2: the loss is a mean over 5 values of a micro-batch of 8 samples")


def test_a_mean_over_what_a_mask_keeps_is_not_advised_to_count_targets() -> None:
    [line] = warnings_of(
        lambda x: (each_entropy(x) * MASK).sum() / MASK.sum(), mean=True, batch=(torch.ones(4, 3), TARGETS)
    )
    assert line.endswith("weight= with a function of a batch that returns an integer proportional to the count")


def test_a_form_is_new_once() -> None:
    seen = LossCheck(warn=no_warning)
    assert [check(entropy, seen=seen, step=step) for step in (1, 1, 2)] == [True, False, False]
    assert check(lambda x: entropy(x) + entropy(-x), seen=seen, step=3)


def test_a_loss_of_another_form_is_looked_at_in_any_step() -> None:
    seen = LossCheck(warn=no_warning)
    check(entropy, seen=seen)
    check(entropy, seen=seen, step=2)
    with pytest.raises(UsageError, match="step 3: the loss is a mean"):
        check(lambda x: F.mse_loss(x, x.detach()), seen=seen, step=3)
    with pytest.raises(UsageError, match="step 4: the loss is a sum"):
        check(entropy, seen=seen, step=4, mean=True)


def test_a_loss_of_a_known_form_is_not_taken_apart_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = LossCheck(warn=no_warning)
    check(entropy, seen=seen)
    monkeypatch.setattr("lockstep.loop.loss_check.find_terms", lambda *_: pytest.fail("a walk through the graph"))
    check(entropy, seen=seen, step=2)


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda x: x.sum().detach(), "the loss has no autograd graph that leads to the model"),
        (lambda x: x.sum(0), r"step.backward received a tensor of shape \[5\] and dtype torch.float32"),
        (lambda x: x.sum().item(), "step.backward received a float"),
    ],
)
def test_what_is_no_loss_is_refused(loss: Loss, said: str, mean: bool) -> None:
    with pytest.raises(UsageError, match=f"step 1: {said}"):
        check(loss, mean=mean)


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
    LossCheck(warn=no_warning).check(1, entropy(outputs) + part.sum(), microbatch, 8, returned, mean=False)
    with pytest.raises(UsageError, match="a part of the loss is a mean"):
        LossCheck().check(1, entropy(outputs) + part.mean(), microbatch, 8, returned, mean=False)


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
    check(loss, mean=True, microbatches=1)
    [line] = warnings_of(loss)
    assert f"step 1: a part of the loss is not a sum over samples, but a function ({name}) of all samples" in line


def views(x: Tensor) -> Tensor:
    return torch.cat([x, -x]).repeat(1, 3)


def normal(x: Tensor) -> Tensor:
    return (1 - x).relu()


@pytest.mark.parametrize("samples", [4, 5, 30])
@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (lambda x: torch.exp(-torch.cdist(x, x)).mean(), "cdist"),
        (lambda x: torch.cdist(x, 2 * x, p=1).mean(), "cdist"),
        (lambda x: F.pdist(x).square().mean(), "pdist"),
        (lambda x: torch.cov(x.T).square().mean(), "cov"),
        (lambda x: torch.corrcoef(x.T).square().mean(), "cov"),
        (lambda x: torch.corrcoef(x).square().mean(), "cov"),
        (lambda x: 1 - torch.corrcoef(torch.stack([x[:, 0], x[:, 1].detach()]))[0, 1], "cov"),
        (lambda x: ((x - x.mean(0)).T @ (x - x.mean(0))[:, :3]).square().mean(), ""),  # not the same tensor twice
        (lambda x: (lambda centered: (centered.T @ centered).square().mean())(x - x.mean(0)), "cov"),
        (lambda x: F.cross_entropy(x @ (2 * x).T, torch.arange(len(x))), "matmul"),  # CLIP
        (lambda x: (views(x) @ views(x).T).log_softmax(1).diagonal().mean(), "matmul"),  # SimCLR
        (lambda x: F.cross_entropy(torch.einsum("ic,jc->ij", x, 2 * x), torch.arange(len(x))), "matmul"),
        (lambda x: -F.logsigmoid((x @ x.T) * (2 * torch.eye(len(x)) - 1)).sum() / len(x), "matmul"),  # SigLIP
        (lambda x: F.mse_loss(x, x.detach()) + normal(x.std(0)).mean(), "std"),
        (lambda x: normal(torch.var_mean(x, 0)[0]).mean(), "var"),
        # Functions of each sample alone.
        (lambda x: x.std(1).mean() + x.var(-1).mean(), ""),
        (lambda x: torch.cdist(x, torch.zeros(len(x), 5)).mean(), ""),
        (lambda x: torch.cdist(x, nn.Parameter(torch.zeros(len(x), 5))).mean(), ""),
        (lambda x: torch.cdist(x[:, :, None], x[:, :, None]).mean(), ""),
        (lambda x: (x[:, :, None] @ x[:, None]).softmax(-1).mean(), ""),  # attention
        (lambda x: F.cross_entropy(x @ torch.randn(5, len(x)), torch.arange(len(x))), ""),  # constant classes
        (lambda x: F.cross_entropy(x @ nn.Parameter(torch.randn(5, len(x))), torch.arange(len(x))), ""),
        (lambda x: (x - x.mean(1, keepdim=True)).square().mean() + F.layer_norm(x, (5,)).mean(), ""),
        (lambda x: (WEIGHT @ WEIGHT.T).square().mean() + torch.cdist(WEIGHT, WEIGHT).mean() + x.mean(), ""),
    ],
)
def test_a_function_of_all_samples_is_warned_of_by_its_operation(loss: Loss, name: str, samples: int) -> None:
    found = [line for line in warnings_of(loss, mean=True, samples=samples) if "is not a sum over samples" in line]
    assert [f"but a function ({name}) of all samples of a micro-batch" in line for line in found] == [True] * bool(name)
    check(loss, samples, mean=True, microbatches=1)


@pytest.mark.parametrize("name", ["Mean", "Sum", "Mul", "Div", "Stack"])
def test_a_function_of_the_users_own_may_have_the_name_of_one_of_torchs(name: str) -> None:
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient.expand(4)

    methods = {"forward": staticmethod(lambda _, values: values.sum()), "backward": staticmethod(backward)}
    own: Any = type(name, (torch.autograd.Function,), methods)
    check(lambda x: own.apply(each_entropy(x)))


def test_a_mean_over_the_only_sample_is_a_sum() -> None:
    check(lambda x: x.mean(), samples=1)


def test_a_factor_of_as_many_processes_is_taken_and_warned_of_once() -> None:
    lines: list[str] = []
    seen = LossCheck(world_size=7, warn=lines.append)
    for factor in (2.5, 7, 7):
        check(lambda x, factor=factor: factor * entropy(x), seen=seen)
    [line] = lines
    assert "the loss is multiplied by 7 " in line
    assert "the number of processes; remove the factor" in line


def test_the_factor_of_a_scaler_is_refused_and_one_like_it_is_the_users() -> None:
    scaler = torch.amp.GradScaler("cpu")
    for mean in (True, False):
        with pytest.raises(
            UsageError, match=r"multiplied by 65536, which is what torch\.amp\.GradScaler does.*precision="
        ):
            check(lambda x, mean=mean: scaler.scale(F.l1_loss(x, 2 * x.detach()) if mean else entropy(x)), mean=mean)
    check(lambda x: 65536.0 * entropy(x) + 512 * x.sum() + torch.tensor(300.0) * x.sum())
