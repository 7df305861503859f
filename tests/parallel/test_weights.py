"""Copies of the weights in bf16 compute; the weights themselves, gradients' sums and the optimizer stay in fp32."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import toys
import worlds
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from toys import Case

from lockstep.comm.world import World
from lockstep.common.rank import ALONE
from lockstep.core.order import split_range
from lockstep.core.precision import Precision
from lockstep.core.shard import get_local_tensor
from lockstep.parallel.weights import ReplicatedLayout, convert_compute_dtype

BF16 = torch.bfloat16
CASE = Case(precision="bf16-compute", model=toys.Plain)


def by_hand(case: Case) -> dict[str, Tensor]:
    """Train with nothing but PyTorch: a copy of the weights for each micro-batch, and sums in fp32 by twos."""
    weights = toys.build(case)
    optimizer = torch.optim.SGD(weights.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=0.01, foreach=True)
    for step, images, targets in toys.steps(case):
        leaves = []
        for part in split_range(step.samples, min(case.microbatches, step.samples)):
            copy = toys.build(case).to(BF16)
            copy.load_state_dict(weights.state_dict())
            copy.dropout.p = 0.0  # type: ignore[union-attr]
            outputs = copy(images[list(part)].to(BF16)).float()
            loss = F.cross_entropy(outputs, targets[list(part)], reduction="sum")
            loss.backward(torch.tensor(1.0 / step.samples))  # type: ignore[no-untyped-call]
            leaves.append(
                [torch.zeros_like(p).float() if p.grad is None else p.grad.float() for p in copy.parameters()]
            )
        while len(leaves) > 1:
            pairs = [leaves[start : start + 2] for start in range(0, len(leaves), 2)]
            leaves = [[sum(each[1:], each[0]) for each in zip(*pair, strict=True)] for pair in pairs]
        for parameter, gradient in zip(weights.parameters(), leaves[0], strict=True):
            parameter.grad = gradient
        optimizer.param_groups[0]["lr"] = toys.rate(step)
        optimizer.step()
    return weights.state_dict()


class Sure(toys.Plain):
    """Without dropout, whose random numbers a plain loop would not draw."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout.p = 0.0


def test_the_engine_does_what_a_plain_loop_with_master_weights_does() -> None:
    case = replace(CASE, model=Sure)
    engine, _ = toys.trained(World(ALONE, torch.device("cpu")), case)
    state, expected = engine.state(), by_hand(case)
    assert {name for name in expected if not torch.equal(state.model[name], expected[name])} == set()
    assert {held.dtype for held in state.model.values()} == {torch.float32}  # type: ignore[union-attr]


def test_it_is_another_recipe_than_autocast_and_learns_as_well() -> None:
    world = World(ALONE, torch.device("cpu"))
    states = {
        p: toys.trained(world, replace(CASE, precision=p))[0].state().model for p in ("fp32", "bf16", "bf16-compute")
    }
    heads: dict[str, Any] = {name: state["head.weight"] for name, state in states.items()}
    assert not torch.equal(heads["bf16"], heads["bf16-compute"])
    assert torch.allclose(heads["fp32"], heads["bf16-compute"], atol=2e-3)


class Gathered(TorchDispatchMode):
    """Counts the elements of all-gathers by dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "allgather_base" in str(func):
            name = str(args[0].dtype)
            self.elements[name] = self.elements.get(name, 0) + args[0].numel()
        return func(*args, **(kwargs or {}))


def gathered(world: World, case: Case) -> dict[str, int]:
    with Gathered() as found:
        toys.trained(world, case)[0].close()
    return found.elements


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
def test_sharded_strategies_gather_half_the_bytes() -> None:
    wide, narrow = (
        worlds.run(2, gathered, replace(CASE, precision=precision, strategy="zero3"))[0]
        for precision in ("bf16", "bf16-compute")
    )
    assert list(wide) == ["torch.float32"]
    assert narrow == {"torch.bfloat16": wide["torch.float32"]}


def rows_kept(world: World, case: Case) -> tuple[int, int]:
    """Return the bytes of the fp32 weights on this rank, and of all."""
    engine, _ = toys.trained(world, case)
    held: Any = engine.state().model.values()
    parts = sum(each.tensor.nbytes for each in held), sum(each.shape.numel() * 4 for each in held)
    engine.close()
    return parts


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
def test_zero1_keeps_the_weights_themselves_in_rows() -> None:
    kept = worlds.run(2, rows_kept, replace(CASE, strategy="zero1"))
    assert sum(own for own, _ in kept) == kept[0][1]
    assert max(own for own, _ in kept) < 0.6 * kept[0][1]


def test_a_batchnorm_of_any_class_takes_narrow_parameters() -> None:
    model = convert_compute_dtype(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), BF16)
    model(torch.randn(5, 3, dtype=BF16)).sum().backward()
    layer: Any = model[1]
    assert layer.weight.dtype == layer.weight.grad.dtype == BF16
    assert layer.running_mean.dtype == torch.float32


def test_batchnorm_has_no_copies_in_fp16_nor_a_buffer_another_dtype() -> None:
    model = convert_compute_dtype(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), torch.float16)
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    assert {name for name, dtype in dtypes.items() if dtype == torch.float16} == {"0.weight", "0.bias"}
    model(torch.randn(5, 3, dtype=torch.float16)).sum().backward()
    assert model[1].weight.grad.dtype == torch.float32  # type: ignore[union-attr, index]


@pytest.mark.parametrize(("precision", "kept"), [("fp16-compute", torch.float32), ("fp16-true", torch.float16)])
def test_weights_and_state_are_in_fp32_or_all_in_fp16(precision: Precision, kept: torch.dtype) -> None:
    case = Case(precision=precision, ema=True, initial_scale=1.0)
    engine, _ = toys.trained(World(ALONE, torch.device("cpu")), case)
    state = engine.state()
    parameters = {name for name, _ in toys.build(case).named_parameters()}
    assert {get_local_tensor(state.model[name]).dtype for name in parameters} == {kept}
    assert {get_local_tensor(each).dtype for each in state.optimizer.values()} == {kept}
    assert {get_local_tensor(each).dtype for each in (state.ema or {}).values()} == {torch.float32, torch.int64}
    wide, _ = toys.trained(World(ALONE, torch.device("cpu")), replace(case, precision="fp32"))
    for name in parameters:
        one, other = get_local_tensor(state.model[name]).float(), get_local_tensor(wide.state().model[name])
        assert torch.allclose(one, other, atol=1e-2), name


def test_frozen_weights_are_kept_and_shared_ones_stay_shared() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    model.append(nn.Linear(3, 3).requires_grad_(False))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights = ReplicatedLayout(model, BF16)
    assert {each.dtype for each in model.parameters()} == {BF16}
    assert model[1].weight is model[0].weight
    assert [name for name, _ in weights.trained] == ["0.weight"]
    assert {
        name: (each.dtype, torch.equal(each, before[name])) for name, each in weights.state().items()
    } == dict.fromkeys(before, (torch.float32, True))
