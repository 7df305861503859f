"""Replicas of a model on several devices of one process give the bits of one device, and meet only where they must."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import toys
import worlds
from same_bits import alone
from test_same_bits import CASES
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from toys import Case

from lockstep.comm.world import World
from lockstep.common.rank import ALONE
from lockstep.core.mesh import Mesh
from lockstep.errors import UsageError
from lockstep.parallel.data_parallel import DataParallelEngine
from lockstep.parallel.layouts.replicated import replicated
from lockstep.parallel.replicas import Replicas
from lockstep.strategies.data_parallel import Strategy
from lockstep.strategies.single import Strategy as Single
from lockstep.tasks.base import Problem
from lockstep.tasks.classification import Classification

aten = torch.ops.aten

# The last has more replicas than there are micro-batches.
PLACED: list[dict[str, Any]] = [
    {},
    {"device_ids": (0, 1, 2), "output_device": 2},
    {"device_ids": (5,)},
    {"device_ids": tuple(range(9)), "output_device": 1},
]


def replicated_as(case: Case, options: dict[str, Any]) -> Case:
    return replace(case, alone="data_parallel", strategy="data_parallel", options=tuple(options.items()))


@pytest.mark.worlds
@pytest.mark.parametrize(("name", "options"), [(name, PLACED[at % len(PLACED)]) for at, name in enumerate(CASES)])
def test_the_bits_are_those_of_one_device(name: str, options: dict[str, Any]) -> None:
    [trace] = worlds.run(1, toys.whole_trace, replicated_as(CASES[name], options))
    assert trace == alone(CASES[name])


@pytest.mark.worlds
@pytest.mark.parametrize("options", PLACED)
def test_any_number_of_replicas_gives_these_bits(options: dict[str, Any]) -> None:
    case = CASES["six micro-batches, clipped, averaged"]
    [trace] = worlds.run(1, toys.whole_trace, replicated_as(case, options))
    assert trace == alone(case)


@pytest.mark.worlds
@pytest.mark.parametrize("first", ["single", "data_parallel"])
def test_a_run_goes_on_with_or_without_replicas(first: str) -> None:
    case = Case(optimizer="adamw", ema=True)
    placed = replicated_as(case, {"device_ids": (0, 1, 2), "output_device": 1})
    before, after = (placed, case) if first == "data_parallel" else (case, placed)
    [(state, trace)] = worlds.run(1, toys.states, replace(before, samples=case.samples[:2]), 0, None)
    [(_, rest)] = worlds.run(1, toys.states, after, 2, state)
    assert {**trace, **rest} == alone(case)


class Called(nn.Module):
    """BatchNorm that is called twice; an LSTM, which has a list of its weights; a buffer; weights used elsewhere."""

    calls = 2

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.rnn = nn.LSTM(8, 8, batch_first=True)
        self.register_buffer("scale", torch.full((8,), 0.5), persistent=False)
        self.head = nn.Linear(8, toys.CLASSES)
        self.weights = [self.head.weight]

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for _ in range(self.calls):
            x = self.norm(x).relu()
        x = x.flatten(2).transpose(1, 2)
        x = self.rnn(x)[0].mean(1) * self.scale
        outputs: Tensor = self.head(nn.functional.dropout(x, 0.3, self.training)) + 0.1 * self.weights[0].square().sum()
        return outputs


class CalledOnce(Called):
    calls = 1


@pytest.mark.worlds
@pytest.mark.parametrize("changes", [{}, {"recompute": 1}, {"offload_activations": True}])
def test_whatever_refers_to_a_parameter_has_that_of_the_replica(changes: dict[str, Any]) -> None:
    case = Case(5, optimizer="adamw", clip=0.5, model=Called)
    [trace] = worlds.run(1, toys.whole_trace, replicated_as(replace(case, **changes), PLACED[1]))
    assert trace == alone(case)


@pytest.mark.slow("compiles")
@pytest.mark.worlds
def test_compiled_blocks_compute_with_each_replica() -> None:
    case = Case(compile=True, model=toys.Plain)
    [trace] = worlds.run(1, toys.whole_trace, replicated_as(case, PLACED[1]))
    assert trace == alone(case)


class Devices(TorchDispatchMode):
    """Makes cpu:0 and cpu:1 as separate as CUDA devices are: what is on one of them is only copied to the other.

    A tensor is on the device that it is made on, or that its inputs are on. Some are on none, as numbers of the host.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copies = 0  # from one device to the other
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []  # so that no address gets another meaning

    def put(self, tensor: Tensor, number: int) -> None:
        storage = tensor.untyped_storage()
        self._numbers[storage.data_ptr()] = number
        self._kept.append(storage)

    def moved(self, replicas: Replicas, tensor: Tensor) -> Tensor:
        """Stands for `copy_to_home`: on the CPU, there is nothing to copy."""
        home = replicas._home
        self.copies += self.numbers(tensor) != {home}
        with _disable_current_modes():
            copy = tensor.clone()
        self.put(copy, home)
        return copy

    def numbers(self, values: Any) -> set[int]:
        tensors = [each for each in tree_leaves(values) if isinstance(each, Tensor) and each.numel()]
        found = {self._numbers.get(each.untyped_storage().data_ptr()) for each in tensors}
        return {number for number in found if number is not None}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        inputs = self.numbers((args, given))
        named = set() if (device := given.get("device")) is None or device.index is None else {device.index}
        made = named | inputs
        if func in (aten._to_copy.default, aten.copy_.default, aten._foreach_copy_.default):
            self.copies += len(made) > 1
            made = named or self.numbers(args[0])
        assert len(made) < 2, f"{func} computes with tensors of several devices"
        output = func(*args, **given)
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.numel() and made and not self.numbers(tensor):
                self.put(tensor, *made)
        return output


@pytest.mark.parametrize("home", [0, 1])
def test_devices_meet_only_after_a_backward_and_after_an_update(home: int, monkeypatch: pytest.MonkeyPatch) -> None:
    devices, case = [torch.device("cpu", 0), torch.device("cpu", 1)], Case(model=CalledOnce)
    problem = Problem(Classification(topk=(1,)), partial(toys.build, case))
    before_backward: list[int] = []  # copies between devices
    use, come_home = Replicas.switch_to, Replicas.return_home

    def used(replicas: Replicas, index: int) -> None:
        seen.copies = 0
        use(replicas, index)

    def came_home(replicas: Replicas) -> None:
        before_backward.append(seen.copies)
        come_home(replicas)

    with Devices() as seen:
        monkeypatch.setattr(Replicas, "switch_to", used)
        monkeypatch.setattr(Replicas, "return_home", came_home)
        monkeypatch.setattr(Replicas, "copy_to_home", lambda replicas, tensor: seen.moved(replicas, tensor))
        world, mesh = World(ALONE, devices[home]), Mesh()
        engine = DataParallelEngine(
            *(problem, toys.making("adamw", 0.1), world, case.numerics(), mesh, replicated(world, mesh, 0)),
            devices=devices,
            home_index=home,
        )
        assert engine._replicas is not None
        for number, storages in enumerate(engine._replicas._storages):
            for storage in storages:
                seen.put(storage, number)
        for step, _, _ in toys.steps(case):
            own = [toys.fetch(case, step, index, dummy=False) for index in range(min(4, step.samples))]
            for microbatch in own:
                for tensor in microbatch.batch:
                    seen.put(tensor, microbatch.index % 2)
            sums = engine.forward_backward(own, step)
            assert seen.numbers([sums.total, *sums.local_losses, *engine.gradients().values()]) == {home}
            engine.update(0.1, 1.0)
            assert seen.copies  # of the weights
            assert seen.numbers(list(engine.state().model.values())) == {home}
        assert before_backward == [0] * 15
        engine.forward_backward(own, step, observe=True)  # what is reported crosses earlier, and is added at home
        engine.close()


def test_a_layer_counts_its_calls_on_every_replica() -> None:
    case = Case(samples=(8, 8, 8))
    problem = Problem(Classification(topk=(1,)), partial(toys.build, case))
    counts = []
    for strategy in (Single(), Strategy(), Strategy((0, 1, 2), 1)):
        world = World(ALONE, torch.device("cpu"))
        engine = strategy.start(problem, toys.making("sgd", 0.1), world, case.numerics())
        for step, _, _ in toys.steps(case):
            own = []
            for index in range(4):
                microbatch = toys.fetch(case, step, index, dummy=False)
                images = microbatch.batch[0].abs() * (
                    -1.0 if step.number == 1 else 1.0
                )  # whether `sometimes` is called
                own.append(replace(microbatch, batch=(images, microbatch.batch[1])))
            engine.forward_backward(own, step)
            engine.update(0.1, None)
        counts.append({name: toys.hashed(each) for name, each in engine.state().model.items()})
        engine.close()
    assert counts[1] == counts[0]
    assert counts[2] == counts[0]


def test_a_model_that_spans_devices_is_refused() -> None:
    split = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    problem = Problem(None, lambda: split, "model split")
    with pytest.raises(UsageError, match="data_parallel: model split is spread over cpu and meta, but each replica"):
        Strategy().start(problem, toys.making("sgd", 0.1), World(ALONE, torch.device("cpu")), Case().numerics())


def test_after_an_error_in_a_forward_the_model_is_home() -> None:
    case, world = Case(model=Called), World(ALONE, torch.device("cpu"))
    problem = Problem(Classification(topk=(1,)), partial(toys.build, case))
    engine: Any = Strategy().start(problem, toys.making("sgd", 0.1), world, case.numerics())
    (step, *_), *_ = toys.steps(case)
    at_home = [parameter.data_ptr() for parameter in engine._model.parameters()]
    forward = engine.forward(toys.fetch(case, step, 1, dummy=False), step)
    forward.__enter__()
    assert all(parameter.data_ptr() not in at_home for parameter in engine._model.parameters())
    forward.__exit__(ValueError, ValueError(), None)
    assert [parameter.data_ptr() for parameter in engine._model.parameters()] == at_home
