"""The loss is a sum and the counts are counts, whatever the targets look like."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from lockstep.errors import UsageError
from lockstep.tasks.classification import (
    SKIPPED,
    Classification,
    check_loss,
    check_targets,
    compute_confusion,
    find_loss,
)


def _task(**changes: object) -> Classification:
    return Classification(**changes)  # type: ignore[arg-type]


def per_sample(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a user's loss: one value for each sample."""
    return F.cross_entropy(outputs, targets, reduction="none")


def mean(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a user's loss that is a mean, which is wrong."""
    return F.cross_entropy(outputs, targets)


@pytest.fixture
def outputs() -> Tensor:
    """Return outputs for 4 samples of 5 classes."""
    torch.manual_seed(0)
    return torch.randn(4, 5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_sum_of_cross_entropies(outputs: Tensor, smoothing: float) -> None:
    targets = torch.tensor([0, 4, 2, 2])
    loss = _task(label_smoothing=smoothing).loss_sum(outputs, targets)
    mean_loss = F.cross_entropy(outputs, targets, label_smoothing=smoothing)
    torch.testing.assert_close(loss, 4 * mean_loss)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_skipped_samples_add_nothing(outputs: Tensor, smoothing: float) -> None:
    task = _task(label_smoothing=smoothing)
    skipping = task.loss_sum(outputs, torch.tensor([0, SKIPPED, 2, SKIPPED]))
    torch.testing.assert_close(skipping, task.loss_sum(outputs[[0, 2]], torch.tensor([0, 2])))
    assert task.loss_sum(outputs, torch.full((4,), SKIPPED)).item() == 0.0


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_mixtures_against_torch(outputs: Tensor, smoothing: float) -> None:
    targets = torch.softmax(torch.randn(4, 5), dim=1)
    loss = _task(label_smoothing=smoothing).loss_sum(outputs, targets)
    torch.testing.assert_close(loss, F.cross_entropy(outputs, targets, reduction="sum", label_smoothing=smoothing))


def test_mixtures_of_one_class_are_that_class(outputs: Tensor) -> None:
    targets = torch.tensor([0, 4, 2, 2])
    task = _task(label_smoothing=0.1)
    mixed = F.one_hot(targets, 5).to(torch.float64)
    torch.testing.assert_close(task.loss_sum(outputs, mixed), task.loss_sum(outputs, targets))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_mixture_of_nothing_adds_nothing(outputs: Tensor, smoothing: float) -> None:
    assert _task(label_smoothing=smoothing).loss_sum(outputs, torch.zeros(4, 5)).item() == 0.0


def test_half_precision_outputs_are_added_in_float32(outputs: Tensor) -> None:
    half = outputs.to(torch.bfloat16)
    loss = _task().loss_sum(half, torch.tensor([0, 4, 2, 2]))
    assert loss.dtype == torch.float32
    assert torch.equal(loss, _task().loss_sum(half.float(), torch.tensor([0, 4, 2, 2])))


@pytest.mark.parametrize(
    ("loss", "what"),
    [(per_sample, "one value for each sample"), (lambda o, t: per_sample(o, t).sum(), "a sum")],
)
def test_users_loss(outputs: Tensor, loss: object, what: str) -> None:
    targets = torch.tensor([0, 4, 2, 2])
    torch.testing.assert_close(_task(custom_loss=loss).loss_sum(outputs, targets), _task().loss_sum(outputs, targets))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda o, t: o, r"returned shape \(4, 5\) for 4 samples; return a sum of shape \(\), or"),
        (lambda o, t: 1.0, "returned float; return a tensor"),
    ],
)
def test_users_loss_of_another_kind(outputs: Tensor, loss: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _task(custom_loss=loss).loss_sum(outputs, torch.tensor([0, 4, 2, 2]))


def test_smoothing_of_a_users_loss_is_refused() -> None:
    with pytest.raises(UsageError, match=r"recipe\.loss\.label_smoothing: 0\.1 is not supported with a custom loss"):
        _task(custom_loss=per_sample, label_smoothing=0.1)


def test_find_loss() -> None:
    assert find_loss("cross_entropy") is None
    loss = find_loss(f"{__name__}:per_sample")
    assert loss(torch.zeros(2, 3), torch.tensor([0, 2])).shape == (2,)
    with pytest.raises(UsageError, match="cross_entropi: no such loss; use cross_entropy"):
        find_loss("cross_entropi")


@pytest.mark.parametrize("targets", [torch.tensor([SKIPPED, 1]), torch.tensor([[0.0, 0.0, 0.0], [0.5, 0.5, 0.0]])])
def test_check_loss(targets: Tensor) -> None:
    check_loss(per_sample, num_classes=3, targets=targets)
    check_loss(lambda outputs, targets: per_sample(outputs, targets).sum(), num_classes=3, targets=targets)
    with pytest.raises(UsageError, match="so it is a mean; return the sum"):
        check_loss(mean, num_classes=3, targets=targets)


@pytest.mark.parametrize(
    "targets",
    [
        torch.tensor([0, 2, SKIPPED]),
        torch.tensor([[0.25, 0.75, 0.0], [0.0, 0.0, 0.0]]),
        torch.tensor([[0.3, 0.3, 0.4]], dtype=torch.bfloat16),
    ],
)
def test_targets_of_a_classification(targets: Tensor) -> None:
    check_targets("data", targets, range(len(targets)), num_classes=3)


@pytest.mark.parametrize(
    ("targets", "found"),
    [
        (torch.tensor([0, 3]), "sample 8: target is 3;"),
        (torch.tensor([-1, 0]), "sample 7: target is -1;"),
        (torch.tensor([0.5, 1.5]), r"sample 7: target has shape \[\] and torch.float32;"),
        (torch.tensor([[1.0], [2.0]]), r"sample 7: target has shape \[1\] and torch.float32;"),
        (torch.tensor([[1, 0, 0]]), r"sample 7: target has shape \[3\] and torch.int64;"),
        (torch.tensor([[1.0, 0, 0], [2.0, -1, 0]]), r"sample 8: target is \[2, -1, 0\];"),
        (torch.tensor([[0.5, 0.4, 0]]), r"sample 7: target is \[0.5, 0.4, 0\];"),
        (torch.tensor([[float("nan"), 0, 0]]), r"sample 7: target is \[nan, 0, 0\];"),
        (torch.tensor([[float("inf"), 0, 0]]), r"sample 7: target is \[inf, 0, 0\];"),
        (torch.tensor([[-1.0, 1, 0]]), r"sample 7: target is \[-1, 1, 0\];"),
    ],
)
def test_targets_of_anything_else_are_refused(targets: Tensor, found: str) -> None:
    with pytest.raises(UsageError, match=rf"^data {found} for classification with 3 classes, use an integer"):
        check_targets("data", targets, [7, 8], num_classes=3)


def test_counts_golden() -> None:
    outputs = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [0.0, 0.0, 9.0]])
    counts = _task(topk=(1, 2)).sums(outputs, (None, torch.tensor([0, 1, 2, 2])))
    assert {name: count.item() for name, count in counts.items()} == {
        "correct1": 2,
        "correct2": 3,
        "counted": 4,
    }
    assert {count.dtype for count in counts.values()} == {torch.int64}
    assert {count.ndim for count in counts.values()} == {0}


def test_figures_are_of_the_samples_that_count() -> None:
    sums = {"loss": 6.0, "weight": 9, "counted": 4, "correct1": 2, "correct5": 3}
    figures = _task(topk=(1, 5)).figures({name: torch.tensor(value) for name, value in sums.items()})
    assert figures == {"loss": 1.5, "top1": 0.5, "top5": 0.75}


def test_more_guesses_than_classes() -> None:
    counts = _task(topk=(1, 5)).sums(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), (None, torch.tensor([1, SKIPPED])))
    assert {name: count.item() for name, count in counts.items()} == {
        "correct1": 0,
        "correct5": 1,
        "counted": 1,
    }


def test_counts_of_mixtures_take_the_heaviest() -> None:
    targets = torch.tensor([[0.3, 0.7], [0.0, 0.0]])
    counts = _task(topk=(1,)).sums(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), (None, targets))
    assert {name: count.item() for name, count in counts.items()} == {"correct1": 1, "counted": 1}


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 2**31))
def test_counts_of_cuts_add_up(samples: int, classes: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(samples, classes, generator=generator)
    targets = torch.randint(0, classes, (samples,), generator=generator)
    task, half = _task(topk=(1, 3)), samples // 2
    whole = task.sums(outputs, (None, targets))
    parts = [task.sums(outputs[cut], (None, targets[cut])) for cut in (slice(half), slice(half, None))]
    assert {name: int(count) for name, count in whole.items()} == {
        name: int(parts[0][name] + parts[1][name]) for name in whole
    }


@pytest.mark.parametrize("mixed", [False, True])
def test_weights_of_classes_against_torch(outputs: Tensor, mixed: bool) -> None:
    targets = torch.softmax(torch.randn(4, 5), dim=1) if mixed else torch.tensor([0, 4, SKIPPED, 2])
    weights = (1.0, 2.0, 3.0, 4.0, 5.0)
    task = _task(classes=tuple("abcde"), class_weights=weights)
    expected = F.cross_entropy(outputs, targets, weight=torch.tensor(weights), reduction="sum")
    torch.testing.assert_close(task.loss_sum(outputs, targets), expected)


def test_a_loss_of_the_users_weighs_the_classes_itself() -> None:
    with pytest.raises(UsageError, match="weight the classes in your function"):
        _task(custom_loss=per_sample, classes=("a", "b"), class_weights=(1.0, 2.0))


def test_report_golden() -> None:
    task = _task(classes=("a", "b", "c"))
    found = torch.eye(3)[[0, 1, 1, 2]]
    details = task.details(found, (found, torch.tensor([0, 0, 1, SKIPPED])))
    assert details["confusion"].tolist() == [[1, 1, 0], [0, 1, 0], [0, 0, 0]]
    assert task.report(details) == {
        "accuracy": {"a": 0.5, "b": 1.0, "c": None},
        "confusion": [[1, 1, 0], [0, 1, 0], [0, 0, 0]],
    }


@pytest.mark.parametrize("targets", [torch.tensor([0, 0, 1, SKIPPED]), torch.rand(4, 3)])
def test_nothing_of_an_evaluation_waits_for_its_values(targets: Tensor) -> None:
    """Meta tensors have none; a device would have to be waited for where Python needs one."""
    found, truth = torch.empty(4, 3, device="meta"), targets.to("meta")
    task = _task(classes=("a", "b", "c"))
    shapes = {name: each.shape for name, each in task.details(found, (found, truth)).items()}
    assert shapes == {"confusion": (3, 3)}
    assert {each.device.type for each in task.sums(found, (found, truth)).values()} == {"meta"}


@given(st.integers(1, 6), st.integers(0, 50), st.integers(0, 9))
def test_confusions_are_those_counted_one_by_one(classes: int, samples: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    truth, guess = torch.randint(classes, (2, samples), generator=generator)
    counted = torch.rand(samples, generator=generator) < 0.7
    expected = torch.zeros(classes, classes, dtype=torch.int64)
    for one, other in zip(truth[counted].tolist(), guess[counted].tolist(), strict=True):
        expected[one, other] += 1
    found = compute_confusion(torch.where(counted, truth, SKIPPED), guess, classes, counted)
    assert torch.equal(found, expected)


def test_a_batch_may_have_names(outputs: Tensor) -> None:
    batch = {"pixel_values": torch.zeros(4, 1), "labels": torch.tensor([0, 4, 2, 2])}
    assert [*_task().inputs(batch)] == ["pixel_values"]
    assert torch.equal(_task().loss({"logits": outputs}, batch), _task().loss_sum(outputs, batch["labels"]))
