"""A stage alone, without ranks: gradients of what crosses, of weights, and of what hangs on neither."""

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from lockstep.comm.canonical import CanonicalSum
from lockstep.comm.p2p import Values
from lockstep.core.mesh import DataRank
from lockstep.parallel.cooperative import CooperativeScheduler
from lockstep.parallel.pipeline.stage import BackwardInputs, Compute, ForwardPass, Stage

ALONE = CanonicalSum(0, [DataRank()], None)


def stage_of(model: nn.Module, recompute: bool = False) -> Stage:
    return Stage(model, CooperativeScheduler([]), recompute)


def forward(stage: Stage, number: int, inputs: Values, compute: Compute) -> list[Tensor | int]:
    """Compute a micro-batch of three samples, which is one leaf."""
    [outputs] = stage.forward([ForwardPass(number, inputs, compute)], 3, nn.Module())
    return outputs


def backward(stage: Stage, number: int, gradients: Values, split: bool = False) -> list[Tensor | None]:
    [back] = (stage.backward_input if split else stage.backward)(number, [BackwardInputs(gradients)])
    return back.input_gradients


class Uneven(nn.Module):
    """Two inputs, of which one is used at times, and an output that hangs on a weight alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.added = nn.Parameter(torch.randn(3, 4))
        self.turned = nn.Parameter(torch.randn(4, 3))
        self.alone = nn.Parameter(torch.randn(4))
        self.unused = nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor, y: Tensor, number: Tensor) -> list[Tensor]:
        z = (x + self.added + self.turned.t()) @ self.weight
        if number > 0:
            z = z + y.mul_(2.0).square()
        return [z, self.alone * 2, number + 1, y]


class Token(nn.Module):
    """A weight that meets the input twice, once through a computation with weights of its own, as class tokens do."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.norm = nn.LayerNorm(4)
        self.mix = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        token = self.token.expand(len(x), -1, -1)
        mixed = self.mix(self.norm(torch.cat([token, x], dim=1))).tanh()
        return token + self.scale * mixed.sum(1, keepdim=True)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_weight_that_meets_the_input_twice_can_wait_too(recompute: bool) -> None:
    torch.manual_seed(0)
    model = Token()
    inputs, gradient = torch.randn(3, 2, 4), torch.randn(3, 1, 4)
    found = []
    for split in (False, True):
        stage = stage_of(model, recompute)
        forward(stage, 0, [inputs.clone().requires_grad_()], lambda values: [model(*values)])
        back = backward(stage, 0, [gradient], split)
        assert all(parameter.grad is None for parameter in stage.parameters)
        if split:
            stage.backward_weight(0)
        stage.add_gradients(1, ALONE)
        found.append([*back, *[parameter.grad for parameter in stage.parameters]])
        model.zero_grad()
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))  # type: ignore[arg-type]


def stepped(split: bool, recompute: bool, alone: bool) -> tuple[list[list[Tensor | None]], list[Tensor]]:
    """Do two micro-batches, the second one's forward before the first one's backward."""
    torch.manual_seed(0)
    model = Uneven()
    stage = stage_of(model, recompute)

    def compute(values: Values) -> Sequence[Tensor]:
        return model(*values)

    for number in range(2):
        inputs: Values = [torch.randn(3, 4).requires_grad_(), torch.randn(3, 4).requires_grad_(), torch.tensor(number)]
        outputs = [each for each in forward(stage, number, inputs, compute) if isinstance(each, Tensor)]
        assert [output.requires_grad for output in outputs] == [True, True, False, True]
        assert all(output.is_leaf for output in outputs)
    back: list[list[Tensor | None]] = []
    for number in range(2):
        gradients: Values = [
            torch.randn(3, 4),
            torch.randn(4) if alone else None,
            None,
            None if number else torch.randn(3, 4),
        ]
        back.append(backward(stage, number, gradients, split))
    if split:
        for number in range(2):
            stage.backward_weight(number)
    stage.add_gradients(2, ALONE)
    sums = []
    for parameter in stage.parameters:
        assert parameter.grad is not None
        sums.append(parameter.grad)
    return back, sums


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(("split", "recompute"), [(True, False), (False, True), (True, True)])
def test_every_way_back_gives_the_same_gradients(split: bool, recompute: bool, alone: bool) -> None:
    expected_back, expected = stepped(False, False, alone)
    back, sums = stepped(split, recompute, alone)
    for expected_values, values in zip(expected_back, back, strict=True):
        for one, other in zip(expected_values, values, strict=True):
            assert (one is None) == (other is None)
            assert one is None or (torch.equal(one, other) and one.stride() == other.stride())
    for one, other in zip(expected, sums, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()


def test_the_gradients_are_those_of_autograd() -> None:
    back, sums = stepped(False, False, True)
    assert [[each is None for each in values] for values in back] == [[False, False, True], [False, False, True]]
    torch.manual_seed(0)
    model = Uneven()
    inputs = [[torch.randn(3, 4).requires_grad_(), torch.randn(3, 4).requires_grad_()] for _ in range(2)]
    for number, values in enumerate(inputs):
        entered = [value.clone() for value in values]
        outputs = model(*entered, torch.tensor(number))
        gradients = [torch.randn(3, 4), torch.randn(4), None if number else torch.randn(3, 4)]
        pairs = [(o, g) for o, g in zip([outputs[0], outputs[1], outputs[3]], gradients, strict=True) if g is not None]
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        for value, found in zip(values, back[number], strict=False):
            assert value.grad is not None
            assert found is not None
            torch.testing.assert_close(found, value.grad)
    for parameter, found in zip(model.parameters(), sums, strict=True):
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(found, expected)


def test_what_a_weight_adds_is_not_what_travels_back() -> None:
    """The gradient of a bias as large as the input is the very tensor that the stage before is given."""
    model = Uneven()
    stage = stage_of(model)

    def compute(values: Values) -> Sequence[Tensor]:
        (x,) = values
        return [x + model.added]

    given = []
    for number in range(2):
        forward(stage, number, [torch.randn(3, 4).requires_grad_()], compute)
        given += backward(stage, number, [torch.ones(3, 4)], split=True)
        stage.backward_weight(number)
    stage.add_gradients(2, ALONE)
    assert torch.equal(model.added.grad, torch.full((3, 4), 2.0))  # type: ignore[arg-type]
    assert all(torch.equal(each, torch.ones(3, 4)) for each in given if each is not None)


class Neighbors(nn.Module):
    """Leaves that see each other: each adds what the other has, by a weight that the stage has borrowed."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(4, 4)
        self.borrowed = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor, exchange: Callable[[Tensor], Tensor]) -> Tensor:
        x = self.own(x).tanh()
        other = exchange(x * self.borrowed)
        return x * x + other * torch.rand(4)


@pytest.mark.parametrize("recompute", [False, True])
def test_leaves_of_a_micro_batch_are_computed_together_and_kept_apart(recompute: bool) -> None:
    torch.manual_seed(0)
    model, generator = Neighbors(), torch.default_generator
    together = CooperativeScheduler([generator])
    stage = Stage(model.own, together, recompute, [model.borrowed])

    def compute(number: int, values: Values) -> Sequence[Tensor]:
        generator.manual_seed(number)
        [x] = values
        return [model(x, lambda given: together.exchange("here", lambda both: both[::-1], given))]

    inputs, gradients = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    work = [
        ForwardPass(number, [inputs[number].clone().requires_grad_()], partial(compute, number)) for number in range(2)
    ]
    outputs = [each for [each] in stage.forward(work, 3, model)]
    back = stage.backward(0, [BackwardInputs([each]) for each in gradients])

    entered = [each.clone().requires_grad_() for each in inputs]
    hidden = [model.own(x).tanh() for x in entered]
    draws = [torch.rand(4, generator=torch.Generator().manual_seed(number)) for number in range(2)]
    given = [model.borrowed.detach().clone().requires_grad_() for _ in hidden]
    pairs = zip(hidden, hidden[::-1], given[::-1], draws, strict=True)
    expected = [x * x + other * weight * drawn for x, other, weight, drawn in pairs]
    torch.autograd.backward(expected, [*gradients])
    for place, found in enumerate(back):
        torch.testing.assert_close(outputs[place], expected[place].detach().requires_grad_())
        torch.testing.assert_close(found.input_gradients, [entered[place].grad])
        torch.testing.assert_close(found.borrowed_gradients, [given[place].grad])
    whole = [parameter.grad for parameter in stage.parameters]
    stage.add_gradients(2, ALONE)
    torch.testing.assert_close([parameter.grad for parameter in stage.parameters], whole)


class MaybeSharded:
    """A tensor that autograd keeps; `count` says how many there are."""

    def __init__(self, count: list[int], tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # with its graph it would keep itself alive
        self._count = count
        count[0] += 1

    def __del__(self) -> None:
        self._count[0] -= 1


@pytest.mark.parametrize(("recompute", "some"), [(False, True), (True, False)])
def test_recomputation_holds_no_activations(recompute: bool, some: bool) -> None:
    count = [0]
    layer = nn.Linear(4, 4)
    stage = stage_of(layer, recompute)

    def compute(values: Values) -> Sequence[Tensor]:
        with torch.autograd.graph.saved_tensors_hooks(partial(MaybeSharded, count), lambda held: held.tensor):
            outputs: Tensor = layer(values[0]).relu()
        return [outputs]

    forward(stage, 0, [torch.randn(3, 4).requires_grad_()], compute)
    assert (count[0] > 0) is some
    backward(stage, 0, [torch.ones(3, 4)])
    assert count[0] == 0
