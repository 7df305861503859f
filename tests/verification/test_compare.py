"""Comparing what cases saw: everything that differs is found, the first to come about first."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.verification import compare, trace
from lockstep.verification.compare import NOT_THERE, Difference, differences
from lockstep.verification.trace import StepTrace, Trace, Wanted
from lockstep.verification.values import farthest, largest, values, wanted


def reference() -> Trace:
    """What one process saw of two steps with four micro-batches."""
    return Trace(0, [_step(0), _step(6)], {"loss": 2.5, "correct1": 40.0}, 0.1, 1)


def _step(number: int) -> StepTrace:
    tensors = {
        trace.GRADIENT: {"a": "ga:8", "b": "gb:8"},
        trace.MODEL: {"a": "wa:8", "b": "wb:8", "mean": "m:8"},
        trace.OPTIMIZER: {"a/momentum": "ma:8"},
        trace.AVERAGE: {"a": "ea:8"},
    }
    own = {str(index): float(index) for index in range(4)}
    return StepTrace(number, {str(index): f"d{index}:8" for index in range(4)}, own, 6.0, 1.5, tensors, "{}")


def shared() -> list[Trace]:
    """What two processes see of it that have two micro-batches each, where all is right."""
    ranks = [reference(), reference()]
    for rank, seen in enumerate(ranks):
        seen.rank = rank
        for step in seen.steps:
            step.data = {index: value for index, value in step.data.items() if int(index) // 2 == rank}
            step.own_losses = {index: value for index, value in step.own_losses.items() if int(index) // 2 == rank}
    ranks[1].steps[0].scalars = ranks[1].steps[1].scalars = ""  # which rank 0 alone tells
    del ranks[1].steps[0].tensors[trace.MODEL]["b"]  # cut, so that rank 0 alone has the whole
    return ranks


def test_what_agrees_has_no_differences():
    assert differences(reference(), [reference()]) == []
    assert differences(reference(), shared()) == []


def test_every_figure_and_tensor_is_compared_in_the_order_of_a_step():
    ranks = shared()
    for rank in ranks:
        for step in rank.steps:
            step.data = dict.fromkeys(step.data, "x:8")
            step.own_losses = dict.fromkeys(step.own_losses, 9.0)
            step.loss, step.norm, step.scalars = 9.0, 9.0, "x"
            step.tensors = {kind: dict.fromkeys(tensors, "x:8") for kind, tensors in step.tensors.items()}
        rank.evaluation = dict.fromkeys(rank.evaluation, 9.0)
    found = differences(reference(), ranks)
    a_step = [
        *[(compare.DATA, str(index)) for index in range(4)],
        *[(compare.OWN_LOSS, str(index)) for index in range(4)],
        (compare.LOSS, ""),
        (trace.GRADIENT, "a"),
        (trace.GRADIENT, "b"),
        (compare.NORM, ""),
        (trace.MODEL, "a"),
        (trace.MODEL, "b"),
        (trace.MODEL, "mean"),
        (trace.OPTIMIZER, "a/momentum"),
        (trace.AVERAGE, "a"),
        (compare.SCALARS, ""),
    ]
    evaluation = [(compare.EVALUATION, "loss"), (compare.EVALUATION, "correct1")]
    assert [(each.what, each.name) for each in found] == [*a_step, *a_step, *evaluation]
    assert [each.step for each in found] == [1] * len(a_step) + [7] * len(a_step) + [None] * 2


def test_the_rank_that_departs_is_named():
    ranks = shared()
    ranks[1].steps[1].own_losses["3"] = 3.0000001
    ranks[1].steps[1].tensors[trace.GRADIENT]["b"] = "other:8"
    one, two = differences(reference(), ranks)
    assert one == Difference(1, 7, compare.OWN_LOSS, "3", (1,), (3.0).hex(), (3.0000001).hex())
    assert (two.name, two.ranks, two.found) == ("b", (1,), "other:8")


def test_what_is_missing_or_left_over_is_a_difference():
    ranks = shared()
    del ranks[1].steps[0].own_losses["2"]
    del ranks[0].steps[0].tensors[trace.MODEL]["mean"]
    ranks[0].steps[0].tensors[trace.OPTIMIZER]["more"] = "x:8"
    found = [(each.name, each.reference, each.found) for each in differences(reference(), ranks)]
    assert found == [("2", (2.0).hex(), NOT_THERE), ("mean", "m:8", NOT_THERE), ("more", NOT_THERE, "x:8")]


def test_a_resumed_run_is_compared_from_where_it_began():
    resumed = reference()
    del resumed.steps[0]
    assert differences(reference(), [resumed], first=1) == []
    resumed.steps[0].tensors[trace.MODEL]["a"] = "other:8"
    (found,) = differences(reference(), [resumed], first=1)
    assert (found.position, found.step, found.wanted) == (1, 7, Wanted(1, trace.MODEL, "a"))


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_the_next_number_is_another_loss_and_nan_is_like_nan(loss):
    expected = reference()
    expected.steps[0].loss = loss
    other = copy.deepcopy(expected)
    assert differences(expected, [other]) == []
    other.steps[0].loss = math.nextafter(loss, math.inf)
    assert [each.what for each in differences(expected, [other])] == [compare.LOSS]
    expected.steps[0].loss = other.steps[0].loss = math.nan
    assert differences(expected, [other]) == []


def test_the_pair_that_lies_farthest_apart():
    one = torch.tensor([[1.0, 2.0], [-4.0, 0.0]])
    other = torch.tensor([[1.0, 2.5], [-4.25, 0.0]])
    found = farthest(one, other)
    assert found is not None
    assert (found.index, found.reference, found.found) == ((0, 1), "2", "2.5")
    assert (found.apart, found.scale) == (0.5, 4.0)
    assert farthest(one, one.clone()) is None
    nan = torch.tensor([math.nan, 1.0])
    assert farthest(nan, nan.clone()) is None
    assert farthest(torch.ones(2), nan).apart == math.inf
    assert farthest(torch.ones(2), torch.ones(3)).apart is None
    assert farthest(torch.empty(0), torch.empty(0)) is None


def test_differences_are_measured_by_the_largest_magnitude_of_their_kind(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    pairs = {"a": (torch.tensor([8.0]), torch.tensor([8.5])), "b": (torch.tensor([1e-9]), torch.tensor([2e-9]))}
    found = [Difference(0, 1, trace.GRADIENT, name, (1,), "g:4", "h:4") for name in pairs]
    for name, (one, other) in pairs.items():
        trace.keep(tmp_path / "one", 0, Wanted(0, trace.GRADIENT, name), one)
        trace.keep(tmp_path / "two", 1, Wanted(0, trace.GRADIENT, name), other)
    seen = [(each, values(each, tmp_path / "one", tmp_path / "two")) for each in found]
    assert largest([(each, value) for each, value in seen if value is not None]) == 0.5 / 8
    gone = Difference(0, 1, trace.GRADIENT, "gone", (0,), "g:4", "h:4")
    assert values(gone, tmp_path / "one", tmp_path / "two") is None


def test_figures_are_measured_and_what_is_no_figure_is_not(tmp_path):
    loss = values(Difference(0, 1, compare.LOSS, "", (0,), (2.0).hex(), (1.5).hex()), tmp_path, tmp_path)
    assert (loss.reference, loss.found, loss.apart, loss.scale) == ("2.0", "1.5", 0.5, 2.0)
    data = values(Difference(0, 1, compare.DATA, "0", (0,), "d:8", "e:8"), tmp_path, tmp_path)
    assert (data.apart, data.reference) == (None, "d:8")


def test_the_first_tensors_are_looked_at_as_long_as_there_is_room():
    sizes = [600 << 20, 1, 1]
    found = [
        Difference(0, 1, trace.GRADIENT, str(number), (0,), f"a:{size}", f"b:{size}")
        for number, size in enumerate(sizes)
    ]
    assert [each.name for each in wanted(found)] == ["0"]
    assert {each.name for each in wanted(found[1:])} == {"1", "2"}
    assert wanted([Difference(0, 1, compare.LOSS, "", (0,), "x", "y")]) == frozenset()


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int64])
def test_digests_are_of_values_dtype_and_shape(kind):
    tensor = torch.arange(6).reshape(2, 3).to(kind)
    found = trace.digest([tensor])
    assert trace.size_of(found) == tensor.nbytes
    assert found == trace.digest([tensor.T.contiguous().T])
    others = [tensor.reshape(3, 2), tensor.view(torch.uint8), tensor + 1]  # the first two of the same bytes
    assert found not in [trace.digest([other]) for other in others]


def test_what_is_seen_is_read_as_it_was_written(tmp_path):
    for seen in shared():
        trace.write(tmp_path, seen)
    assert trace.read(tmp_path, 2) == shared()
