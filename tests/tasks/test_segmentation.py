"""Pixels that count, and overlaps from a matrix of whole numbers."""

import pytest
import torch
from torch.nn import functional as F

from lockstep.core.batch import map_tensors
from lockstep.errors import UsageError
from lockstep.tasks.segmentation import Segmentation, segmentation

CLASSES = ("sky", "sea", "ship")
TARGETS = torch.tensor([[[0, 1], [255, 1]], [[-100, 0], [0, 0]]], dtype=torch.int64)
OUTPUTS = torch.randn(2, 3, 2, 2, generator=torch.Generator().manual_seed(1))
TASK = Segmentation(CLASSES)


def test_only_pixels_that_count_weigh_and_add() -> None:
    batch = (None, TARGETS)
    assert TASK.weight(batch) == 6
    seen = (TARGETS >= 0) & (TARGETS < 3)
    expected = F.cross_entropy(OUTPUTS.permute(0, 2, 3, 1)[seen], TARGETS[seen], reduction="sum")
    torch.testing.assert_close(TASK.loss(OUTPUTS, batch), expected)
    torch.testing.assert_close(TASK.loss({"out": OUTPUTS}, batch), expected)
    torch.testing.assert_close(TASK.loss({"out": OUTPUTS, "aux": OUTPUTS}, batch), 1.5 * expected)


def test_bytes_are_targets_too() -> None:
    batch = (None, TARGETS.to(torch.uint8))  # -100 is 156 then
    assert TASK.weight((None, batch[1][:1])) == 3


def test_overlaps_golden() -> None:
    guess = torch.tensor([[[0, 1], [0, 0]], [[2, 0], [0, 0]]])
    outputs = F.one_hot(guess, 3).permute(0, 3, 1, 2).float()
    sums = TASK.sums(outputs, (None, TARGETS))
    assert sums["confusion"].tolist() == [[4, 0, 0], [1, 1, 0], [0, 0, 0]]
    assert sums["confusion"].dtype == torch.int64
    assert TASK.figures(sums) == {"miou": pytest.approx((4 / 5 + 1 / 2) / 2), "pixel_accuracy": pytest.approx(5 / 6)}
    report = TASK.report(sums)
    assert report["iou"] == {"sky": 0.8, "sea": 0.5, "ship": None}


def test_confusions_need_no_values() -> None:
    """Meta tensors have none; a device would have to be waited for where Python needs one."""
    assert TASK.sums(OUTPUTS.to("meta"), (None, TARGETS.to("meta")))["confusion"].shape == (3, 3)


def test_nothing_to_count_is_legal() -> None:
    batch = (None, torch.full_like(TARGETS, 255))
    assert (TASK.weight(batch), TASK.loss(OUTPUTS, batch).item()) == (0, 0.0)
    assert TASK.figures(TASK.sums(OUTPUTS, batch)) == {"miou": 0.0, "pixel_accuracy": 0.0}


@pytest.mark.parametrize(
    ("outputs", "targets", "message"),
    [
        (OUTPUTS[..., :1], TARGETS, r"expected floats of shape \[2, 3, 2, 2\], got .* of shape \[2, 3, 2, 1\]"),
        (OUTPUTS, TARGETS.float(), "targets: expected integers of shape"),
        (OUTPUTS, torch.full_like(TARGETS, 3), "a pixel has the class 3; use 0 to 2, or 255"),
    ],
)
def test_what_does_not_fit_is_refused(outputs: torch.Tensor, targets: torch.Tensor, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TASK.check(outputs, (None, targets))


def test_options() -> None:
    assert segmentation("model", CLASSES, ignore=0).ignore == 0
    with pytest.raises(UsageError, match=r"recipe\.task\.auxiliary: must not be negative, got -1"):
        segmentation("model", CLASSES, auxiliary=-1.0)


@pytest.mark.parametrize("outputs", [OUTPUTS, {"out": OUTPUTS}, {"out": OUTPUTS, "auxiliary": OUTPUTS}])
def test_a_weight_of_auxiliary_outputs_that_are_not_there_is_refused(outputs: object) -> None:
    trained = map_tensors(lambda tensor: tensor.clone().requires_grad_(), outputs)
    message = r"recipe\.task\.auxiliary: 0\.4 has no effect, because net returns no outputs named aux in training mode"
    with pytest.raises(UsageError, match=message):
        segmentation("net", CLASSES, auxiliary=0.4).check(trained, (None, TARGETS))
    segmentation("net", CLASSES, auxiliary=0.4).check(outputs, (None, TARGETS))  # evaluation mode
    for weight in (0.0, 0.5):
        segmentation("net", CLASSES, auxiliary=weight).check(trained, (None, TARGETS))


def test_a_weight_of_auxiliary_outputs_that_are_there_is_accepted() -> None:
    trained = OUTPUTS.clone().requires_grad_()
    segmentation("net", CLASSES, auxiliary=0.4).check({"out": trained, "aux": trained}, (None, TARGETS))
