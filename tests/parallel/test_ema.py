"""The average follows its formula, and the model gets its own weights back."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.parallel.ema import WeightAverage
from lockstep.parallel.layouts.base import load_local_rows


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


def _move(model: nn.Module, by: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(by)
    model(torch.rand(4, 2))


def _copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_formula_over_two_updates() -> None:
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
        ema = WeightAverage(model.state_dict(), decay=0.75)
        for weight in (5.0, 9.0):
            model.weight.fill_(weight)
            ema.update()
    # 0.75 * 1 + 0.25 * 5 = 2; 0.75 * 2 + 0.25 * 9 = 3.75
    assert ema.state()["weight"].item() == 3.75


def test_buffers_are_averaged_and_counters_copied() -> None:
    model = _model()
    before = _copied(model)
    ema = WeightAverage(model.state_dict(), decay=0.5)
    _move(model, 1.0)
    ema.update()
    now, average = model.state_dict(), ema.state()
    assert average.keys() == now.keys()
    assert average["1.num_batches_tracked"].item() == 1
    for name in ("0.weight", "1.running_mean"):
        torch.testing.assert_close(average[name], (before[name] + now[name]) / 2)
        assert not torch.equal(average[name], now[name])


def test_the_average_of_low_precision_is_kept_in_float32() -> None:
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
        ema = WeightAverage(model.state_dict(), decay=0.999)
        model.weight.fill_(2.0)
        ema.update()
    assert ema.state()["weight"].dtype == torch.float32
    assert ema.state()["weight"].item() == pytest.approx(1.001)


@pytest.mark.parametrize("fails", [False, True])
def test_swapped_and_back_in_the_same_tensors_also_after_an_error(fails: bool) -> None:
    model = _model()
    ema = WeightAverage(model.state_dict(), decay=0.5)
    _move(model, 1.0)
    ema.update()
    own, places = _copied(model), [parameter.data_ptr() for parameter in model.parameters()]
    with pytest.raises(ZeroDivisionError) if fails else nullcontext(), ema.swap(lambda: None):
        inside = _copied(model)
        assert all(torch.equal(inside[name], average) for name, average in ema.state().items())
        assert not torch.equal(inside["0.weight"], own["0.weight"])
        assert [parameter.data_ptr() for parameter in model.parameters()] == places
        assert 1 / (not fails)
    assert all(torch.equal(tensor, own[name]) for name, tensor in model.state_dict().items())


def test_a_state_goes_into_another_average() -> None:
    model = _model()
    ema = WeightAverage(model.state_dict(), decay=0.5)
    saved = {name: tensor.clone() for name, tensor in ema.state().items()}
    _move(model, 1.0)
    other = WeightAverage(model.state_dict(), decay=0.5)
    load_local_rows(saved, other.shards(model.state_dict()))
    ema.update()
    other.update()
    assert all(torch.equal(tensor, other.state()[name]) for name, tensor in ema.state().items())


def test_a_state_of_another_model_is_refused() -> None:
    own, other = (WeightAverage(each.state_dict(), decay=0.5) for each in (nn.Linear(2, 3), _model()))
    with pytest.raises(UsageError, match=r"does not match the model: only one of them has 0\.bias"):
        load_local_rows(other.state(), own.state())


def test_shared_weights_have_all_their_names() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    ema = WeightAverage(model.state_dict(), decay=0.5)
    moved = model[0].weight.detach().add_(1.0)
    ema.update()
    assert ema.state().keys() == model.state_dict().keys()
    torch.testing.assert_close(ema.state()["0.weight"], moved - 0.5)
    assert torch.equal(ema.state()["1.weight"], ema.state()["0.weight"])


def test_masks_that_are_not_saved_stay_out() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.full((2,), -torch.inf), persistent=False)
    ema = WeightAverage(model.state_dict(), decay=0.5)
    ema.update()
    assert set(ema.state()) == {"weight", "bias"}
