"""Windows of tokens: which there are, what is a target, and how many times."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data.text.windows import IGNORED, TokenArray, TrainingWindows, ValidationWindows, make_window_dataset
from lockstep.errors import UsageError


def _row(count: int) -> TokenArray:
    return TokenArray(np.arange(count, dtype=np.uint16))


@given(count=st.integers(2, 60), context=st.integers(1, 20), stride=st.integers(1, 25))
@settings(deadline=None)
def test_a_training_sample_starts_at_each_multiple_of_the_stride(count: int, context: int, stride: int) -> None:
    if count <= context:
        return
    split = TrainingWindows(_row(count), context, stride)
    expected = [start for start in range(0, count, stride) if start + context < count]
    assert len(split) == len(expected)
    inputs, targets = split.fetch(np.arange(len(split)), 7)
    assert inputs.tolist() == [[*range(start, start + context)] for start in expected]
    assert targets.tolist() == [[*range(start + 1, start + context + 1)] for start in expected]


@given(count=st.integers(2, 60), context=st.integers(1, 20))
@settings(deadline=None)
def test_in_validation_each_token_but_the_first_is_a_target_once(count: int, context: int) -> None:
    split = ValidationWindows(_row(count), context)
    inputs, targets = split.fetch(np.arange(len(split)), None)
    assert inputs.shape == targets.shape == (len(split), context)
    counted = targets != IGNORED
    assert targets[counted].tolist() == [*range(1, count)]
    assert (inputs[counted] + 1).tolist() == targets[counted].tolist()
    assert inputs[~counted].unique().tolist() in ([], [0])
    assert (counted.sum(1) > 0).all()


def test_no_samples_keep_their_shape() -> None:
    for split in (TrainingWindows(_row(9), 4, 4), ValidationWindows(_row(9), 4)):
        inputs, targets = split.fetch(np.array([], np.int64), None)
        assert inputs.shape == targets.shape == (0, 4)


def test_a_part_that_is_too_short_is_refused() -> None:
    with pytest.raises(UsageError, match=r"the training split has 4 tokens, but a window needs 5; use more"):
        make_window_dataset("text", _row(4), None, 4, None, {})
    with pytest.raises(UsageError, match=r"the validation split has 1 tokens, but a window needs 2"):
        make_window_dataset("text", _row(5), _row(1), 4, None, {})
    data = make_window_dataset("text", _row(5), None, 4, None, {"vocabulary": 9})
    assert (len(data.train), data.validation, data.facts) == (1, None, {"vocabulary": 9, "context": 4})
