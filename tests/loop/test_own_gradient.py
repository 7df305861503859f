"""What stands in the places of gradients: it can be looked at, and each way to write to it is refused."""

import pytest
import torch
from torch import Tensor, nn

from lockstep.loop.guard import GradientStandIn


class RefusedError(Exception):
    """What a write raises; its argument says whether a backward did it."""


def parameter() -> nn.Parameter:
    own = nn.Parameter(torch.ones(4, 3))
    own.grad = GradientStandIn(own, RefusedError)
    return own


def gradient() -> Tensor:
    found = parameter().grad
    assert found is not None
    return found


WRITES = {
    "in place": lambda g: g.mul_(0.5),
    "through data": lambda g: g.data.clamp_(-1, 1),
    "by an operator": lambda g: g.__imul__(2),
    "an element": lambda g: g.__setitem__(0, 1.0),
    "a view of a view": lambda g: g.view(-1)[2:].fill_(3),
    "as out": lambda g: torch.mul(g, 2, out=g),
    "with others": lambda g: torch._foreach_mul_([torch.ones(2), g], 2.0),
    "zero": lambda g: g.zero_(),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_is_refused(write):
    with pytest.raises(RefusedError, match="False"):
        write(gradient())


def test_clipping_is_refused_and_so_is_a_backward():
    own = parameter()
    with pytest.raises(RefusedError, match="False"):
        nn.utils.clip_grad_norm_([own], 1.0)
    with pytest.raises(RefusedError, match="False"):
        nn.utils.clip_grad_value_([own], 1.0)
    with pytest.raises(RefusedError, match="True"):
        (own * 2).sum().backward()
    assert torch.autograd.grad((own * 2).sum(), own)[0].tolist() == [[2.0] * 3] * 4


def test_it_is_nan_to_who_looks_at_it():
    found = gradient()
    assert found.shape == (4, 3)
    assert found.norm().isnan()
    assert nn.utils.get_total_norm([found]).isnan()
    copy = found.clone()
    assert type(copy) is Tensor
    assert copy.mul_(2).isnan().all()
    assert str(found) == "GradientStandIn(shape=(4, 3))"
