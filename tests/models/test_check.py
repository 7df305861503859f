"""A model that does not fit the data is refused with what to do."""

import pytest
import torch
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.models.check import Summary, check_model
from lockstep.models.digits_convnet import digits_convnet


class _ReadsValues(nn.Linear):
    """Cannot run on the meta device: its forward looks at a value."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.sum().item() == 0
        return super().forward(x)


class _Two(nn.Linear):
    """Returns two tensors while it trains, as models with an auxiliary head do."""

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:  # type: ignore[override]
        outputs = super().forward(x)
        return (outputs, outputs) if self.training else outputs


def test_summary_counts_parameters() -> None:
    summary = check_model(digits_convnet, name="digits_convnet", shape=(1, 8, 8), classes=10)
    assert summary == Summary(parameters=151_274, dims=(1, 2, 4))


def test_values_are_read_on_the_cpu() -> None:
    assert check_model(lambda: _ReadsValues(4, 3), name="m", shape=(4,), classes=3).parameters == 15


def test_nothing_is_computed_where_meta_will_do() -> None:
    def build() -> nn.Module:
        assert torch.empty(0).device.type == "meta"
        return nn.Linear(4, 3)

    assert check_model(build, name="m", shape=(4,), classes=3).parameters == 15


def test_other_number_of_classes() -> None:
    with pytest.raises(UsageError, match=r"m gives outputs of shape \(2, 1000\).*10 classes; set.* to 10"):
        check_model(lambda: nn.Linear(4, 1000), name="m", shape=(4,), classes=10)


def test_several_outputs_in_training_only() -> None:
    with pytest.raises(UsageError, match="type tuple, not one tensor"):
        check_model(lambda: _Two(4, 3), name="m", shape=(4,), classes=3)


def test_inputs_that_do_not_fit() -> None:
    with pytest.raises(UsageError, match=r"cannot take inputs of shape \(2, 5\): RuntimeError"):
        check_model(lambda: nn.Linear(4, 3), name="m", shape=(5,), classes=3)


def test_single_sample_and_batchnorm() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))

    check_model(build, name="m", shape=(4,), classes=3, smallest=2)
    with pytest.raises(UsageError, match=r"1 sample, too few for BatchNorm; choose batch and microbatches"):
        check_model(build, name="m", shape=(4,), classes=3, smallest=1)


def test_single_sample_is_enough_with_more_than_one_position() -> None:
    check_model(digits_convnet, name="digits_convnet", shape=(1, 8, 8), classes=10, smallest=1)


def test_whole_numbers_as_inputs() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(20, 3))

    check_model(build, name="m", shape=(5,), classes=3, dtype=torch.int64)
