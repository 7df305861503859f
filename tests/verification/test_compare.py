"""Comparing what cases saw: everything that differs is found, the first to come about first."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.training.checkpoint.tensorfile import digest_tensors
from lockstep.verification import compare, trace
from lockstep.verification.compare import (
    MISSING_VALUE,
    Difference,
    compute_max_relative_distance,
    find_differences,
    find_largest_difference,
    load_values,
    make_tensor_requests,
)
from lockstep.verification.trace import StepTrace, TensorRequest, Trace


def reference() -> Trace:
    """What one process saw of two steps with four micro-batches."""
    return Trace(0, [_step(0), _step(6)], {"loss": (2.5).hex(), "correct1": "40"}, 0.1, 1)


def _step(number: int) -> StepTrace:
    names = {
        trace.DATA: "0123",
        trace.MICROBATCH_LOSS: "0123",
        trace.LOSS: ("",),
        trace.GRADIENT: "ab",
        trace.NORM: ("",),
        trace.MODEL: ("a", "b", "mean"),
        trace.OPTIMIZER: ("a/momentum",),
        trace.AVERAGE: "a",
        trace.SCALARS: ("",),
    }
    return StepTrace(number, {kind: {each: f"{kind} {each}:8" for each in own} for kind, own in names.items()})


def shared() -> list[Trace]:
    """What two processes see of it that have two micro-batches each, where all is right."""
    ranks = [reference(), reference()]
    for rank, seen in enumerate(ranks):
        seen.rank = rank
        for step in seen.steps:
            for kind in (trace.DATA, trace.MICROBATCH_LOSS):
                step.observations[kind] = {
                    index: each for index, each in step.observations[kind].items() if int(index) // 2 == rank
                }
    del (
        ranks[1].steps[0].observations[trace.SCALARS],
        ranks[1].steps[1].observations[trace.SCALARS],
    )  # which rank 0 alone has
    del ranks[1].steps[0].observations[trace.MODEL]["b"]  # cut, so that rank 0 alone has the whole
    return ranks


def test_what_agrees_has_no_differences():
    assert find_differences(reference(), [reference()]) == []
    assert find_differences(reference(), shared()) == []


def test_every_figure_and_tensor_is_compared_in_the_order_of_a_step():
    ranks = shared()
    for rank in ranks:
        for step in rank.steps:
            step.observations = {kind: dict.fromkeys(names, "x:8") for kind, names in step.observations.items()}
        rank.evaluation = dict.fromkeys(rank.evaluation, "x")
    found = find_differences(reference(), ranks)
    a_step = [(kind, name) for kind, names in _step(0).observations.items() for name in names]
    evaluation = [(compare.EVALUATION, "loss"), (compare.EVALUATION, "correct1")]
    assert [(each.kind, each.name) for each in found] == [*a_step, *a_step, *evaluation]
    assert [each.step for each in found] == [1] * len(a_step) + [7] * len(a_step) + [None] * 2


def test_the_rank_that_departs_is_named():
    ranks = shared()
    ranks[1].steps[1].observations[trace.MICROBATCH_LOSS]["3"] = "3.0000001"
    ranks[1].steps[1].observations[trace.GRADIENT]["b"] = "other:8"
    one, two = find_differences(reference(), ranks)
    assert one == Difference(1, 7, trace.MICROBATCH_LOSS, "3", (1,), f"{trace.MICROBATCH_LOSS} 3:8", "3.0000001")
    assert (two.name, two.ranks, two.actual) == ("b", (1,), "other:8")


def test_what_is_missing_or_left_over_is_a_difference():
    ranks = shared()
    del ranks[1].steps[0].observations[trace.MICROBATCH_LOSS]["2"]
    del ranks[0].steps[0].observations[trace.MODEL]["mean"]
    ranks[0].steps[0].observations[trace.OPTIMIZER]["more"] = "x:8"
    found = [(each.name, each.ranks, each.reference, each.actual) for each in find_differences(reference(), ranks)]
    assert found == [
        ("2", (), f"{trace.MICROBATCH_LOSS} 2:8", MISSING_VALUE),
        ("mean", (0,), f"{trace.MODEL} mean:8", MISSING_VALUE),
        ("more", (0,), MISSING_VALUE, "x:8"),
    ]


def test_a_resumed_run_is_compared_from_where_it_began():
    resumed = reference()
    del resumed.steps[0]
    assert find_differences(reference(), [resumed], start_position=1) == []
    resumed.steps[0].observations[trace.MODEL]["a"] = "other:8"
    (found,) = find_differences(reference(), [resumed], start_position=1)
    assert (found.position, found.step, found.request) == (1, 7, TensorRequest(1, trace.MODEL, "a"))


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_the_next_number_is_another_text_and_nan_is_like_nan(loss):
    assert trace.to_text(loss) == trace.to_text(float(loss))
    assert trace.to_text(math.nextafter(loss, math.inf)) != trace.to_text(loss)
    assert trace.to_text(math.nan) == trace.to_text(-math.nan)


def test_the_pair_that_lies_farthest_apart():
    one = torch.tensor([[1.0, 2.0], [-4.0, 0.0]])
    other = torch.tensor([[1.0, 2.5], [-4.25, 0.0]])
    found = find_largest_difference(one, other)
    assert (found.index, found.reference, found.actual) == ((0, 1), "2", "2.5")
    assert (found.distance, found.scale) == (0.5, 4.0)
    assert find_largest_difference(one, one.clone()) is None
    nan = torch.tensor([math.nan, 1.0])
    assert find_largest_difference(nan, nan.clone()) is None
    assert find_largest_difference(torch.ones(2), nan).distance == math.inf
    assert find_largest_difference(torch.ones(2), torch.ones(3)).distance is None
    assert find_largest_difference(torch.empty(0), torch.empty(0)) is None


def test_differences_are_measured_by_the_largest_magnitude_of_their_kind(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    pairs = {"a": (torch.tensor([8.0]), torch.tensor([8.5])), "b": (torch.tensor([1e-9]), torch.tensor([2e-9]))}
    found = [Difference(0, 1, trace.GRADIENT, name, (1,), "g:4", "h:4") for name in pairs]
    for name, (one, other) in pairs.items():
        trace.save_tensor(tmp_path / "one", 0, TensorRequest(0, trace.GRADIENT, name), one)
        trace.save_tensor(tmp_path / "two", 1, TensorRequest(0, trace.GRADIENT, name), other)
    seen = [(each, load_values(each, tmp_path / "one", tmp_path / "two")) for each in found]
    assert compute_max_relative_distance([(each, value) for each, value in seen if value is not None]) == 0.5 / 8
    gone = Difference(0, 1, trace.GRADIENT, "gone", (0,), "g:4", "h:4")
    assert load_values(gone, tmp_path / "one", tmp_path / "two") is None


def test_figures_are_measured_and_what_is_no_figure_is_not(tmp_path):
    loss = load_values(Difference(0, 1, trace.LOSS, "", (0,), (2.0).hex(), (1.5).hex()), tmp_path, tmp_path)
    assert (loss.reference, loss.actual, loss.distance, loss.scale) == ("2.0", "1.5", 0.5, 2.0)
    data = load_values(Difference(0, 1, trace.DATA, "0", (0,), "d:8", "e:8"), tmp_path, tmp_path)
    assert (data.distance, data.reference) == (None, "d:8")


def test_the_first_tensors_are_looked_at_as_long_as_there_is_room():
    sizes = [600 << 20, 1, 1]
    found = [
        Difference(0, 1, trace.GRADIENT, str(number), (0,), f"a:{size}", f"b:{size}")
        for number, size in enumerate(sizes)
    ]
    assert [each.name for each in make_tensor_requests(found)] == ["0"]
    assert {each.name for each in make_tensor_requests(found[1:])} == {"1", "2"}
    assert make_tensor_requests([Difference(0, 1, trace.LOSS, "", (0,), "x", "y")]) == frozenset()


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int64])
def test_digests_are_of_values_dtype_and_shape(kind):
    tensor = torch.arange(6).reshape(2, 3).to(kind)
    found = digest_tensors([tensor])
    assert trace.parse_num_bytes(found) == tensor.nbytes
    assert found == digest_tensors([tensor.T.contiguous().T])
    others = [tensor.reshape(3, 2), tensor.view(torch.uint8), tensor + 1]  # the first two of the same bytes
    assert found not in [digest_tensors([other]) for other in others]


def test_what_is_seen_is_read_as_it_was_written(tmp_path):
    for seen in shared():
        trace.write_json(tmp_path / "seen", seen)
        assert trace.read_json(tmp_path / "seen", Trace) == seen
