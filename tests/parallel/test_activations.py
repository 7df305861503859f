"""What a forward saves waits in the memory of the CPU, and the backward gets it back as it was, bit for bit."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pipeline_models
import pytest
import torch
import toys
import worlds
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from toys import Trace

from lockstep.comm.world import World
from lockstep.parallel import activations, data_parallel
from lockstep.parallel.activations import (
    ActivationOffload,
    DeviceTensor,
    HostElements,
    HostTensor,
    TensorPacker,
    training_forward_context,
)
from lockstep.parallel.blocks import enable_recomputation
from lockstep.parallel.pipeline import engine

CPU = torch.device("cpu")


class Block(nn.Module):
    """Saves activations, its parameters, views of them, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("scale", torch.full((2, 8), 0.5))

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.norm(self.linear(inputs) * self.frozen).tanh()
        return x * self.scale[1] * self.frozen.detach().view(1, 8)


class Stacked(nn.Sequential):
    """Blocks whose parameters are whole only while they compute, under zero3."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(108, 8), Block(), Block(), nn.Linear(8, toys.CLASSES))


# By strategy: processes, and a recipe that has some of the traps.
PLACED: dict[str, tuple[int, toys.Case]] = {
    "single": (1, toys.Case(channels_last=True)),
    "ddp": (2, toys.Case(precision="bf16", clip=0.5)),
    "zero1": (3, toys.Case(3, ema=True, recompute=1)),
    "zero2": (2, toys.Case(optimizer="adamw", clip=0.1)),
    "zero3": (2, toys.Case(3, model=Stacked)),
    "hsdp": (4, toys.Case(precision="bf16", recompute=1, options=(("replicate", 2),))),
}
PIPES: dict[str, tuple[toys.Case, dict[str, Any]]] = {
    "1f1b": (pipeline_models.recipe(clip=0.1), {"schedule": "1f1b"}),
    "split": (pipeline_models.recipe("vit", precision="bf16", samples=(11, 3)), {"schedule": "zero_bubble"}),
}


@contextmanager
def forced() -> Iterator[list[DeviceTensor | HostTensor]]:
    """Have an engine that is asked to move activations do so on a CPU too; give what is packed."""
    packed: list[DeviceTensor | HostTensor] = []
    pack = TensorPacker.pack

    def noted(packing: TensorPacker, tensor: Tensor) -> DeviceTensor | HostTensor:
        packed.append(pack(packing, tensor))
        return packed[-1]

    def always(inner: AbstractContextManager[None], model: nn.Module, device: torch.device, offload: bool) -> Any:
        return ActivationOffload(model, device, inner, 1) if offload else inner

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TensorPacker, "pack", noted)
        patch.setattr(data_parallel, "training_forward_context", always)
        patch.setattr(engine, "training_forward_context", always)
        yield packed


def moving(world: World, case: Any) -> tuple[Trace, int]:
    """Train as asked, and return all there is to compare and how many saved tensors were moved."""
    with forced() as packed:
        piped = case.strategy == "pipeline"
        trace = pipeline_models.own_trace(world, case) if piped else toys.whole_trace(world, case)
    return trace, sum(isinstance(each, HostTensor) for each in packed)


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
@pytest.mark.parametrize("strategy", PLACED)
def test_the_bits_stay(strategy: str) -> None:
    size, case = PLACED[strategy]
    case = replace(case, samples=(12, 7))
    [(plain, none)] = worlds.run(1, moving, replace(case, recompute=0))
    assert none == 0
    for trace, moved in worlds.run(size, moving, replace(case, strategy=strategy, offload_activations=True)):
        assert [key for key in plain if trace[key] != plain[key]] == []
        assert moved > (0 if case.recompute else 20)


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
@pytest.mark.parametrize("name", PIPES)
def test_the_bits_of_a_pipeline_stay(name: str) -> None:
    case, options = PIPES[name]
    [(plain, _)] = worlds.run(1, moving, case)
    offloading = replace(case, offload_activations=True)
    for trace, moved in worlds.run(2, moving, pipeline_models.in_pipeline(offloading, options)):
        assert [key for key in trace if trace[key] != plain[key]] == []
        assert moved > 20
    for trace, moved in worlds.run(2, moving, pipeline_models.in_pipeline(offloading, {**options, "recompute": True})):
        assert [key for key in trace if trace[key] != plain[key]] == []
        assert moved == 0  # what enters the stages is all that they hold


def test_a_cpu_has_nothing_to_move() -> None:
    """Engines are then given the very context that they have without."""
    inner: AbstractContextManager[None] = nullcontext()
    model = nn.Linear(2, 2)
    assert training_forward_context(inner, model, CPU, True) is inner
    assert training_forward_context(inner, model, torch.device("cuda", 0), False) is inner
    assert isinstance(training_forward_context(inner, model, torch.device("cuda", 0), True), ActivationOffload)


def blocks(count: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(count)))


def gradients(model: nn.Module, context: AbstractContextManager[None]) -> tuple[list[Tensor | None], list[bool]]:
    """Return the gradients, and for each block whether anybody holds its outputs once the forward is done."""
    outputs: list[StorageWeakRef] = []

    def note(_: nn.Module, __: Any, output: Tensor) -> None:
        outputs.append(StorageWeakRef(output.untyped_storage()))  # type: ignore[no-untyped-call]

    hooks = [block.register_forward_hook(note) for block in model.children()]
    with context:
        loss = model(torch.ones(16, 8).cumsum(0)).square().sum()
    held = [not output.expired() for output in outputs]  # type: ignore[no-untyped-call]
    loss.backward()  # type: ignore[no-untyped-call]
    for hook in hooks:
        hook.remove()
    return [parameter.grad for parameter in model.parameters()], held


def test_only_activations_leave() -> None:
    model = blocks(3)
    with forced() as packed:
        moved, held = gradients(model, ActivationOffload(model, CPU, nullcontext(), 1))
    kept = [each for each in packed if isinstance(each, DeviceTensor)]
    own = {each.untyped_storage().data_ptr() for each in [*model.parameters(), *model.buffers()]}
    assert {each.tensor.untyped_storage().data_ptr() for each in kept} <= own
    # In each block: the weight's transpose (not in the first, whose input needs no gradient), frozen, the norm's weight
    # and its two statistics, scale, and frozen once more.
    assert len(kept) == 3 * 7 - 1
    assert held == [False] * 3
    plain, held = gradients(blocks(3), nullcontext())
    assert held == [True] * 3
    assert_equal(moved, plain)


def test_recomputed_blocks_have_their_inputs_moved() -> None:
    model = enable_recomputation(blocks(3), 1)
    with forced() as packed:
        moved, held = gradients(model, ActivationOffload(model, CPU, nullcontext(), 1))
    assert [each.size for each in packed if isinstance(each, HostTensor)] == [(16, 8)] * 4  # the last one is the loss's
    assert held == [False] * 3
    assert_equal(moved, gradients(blocks(3), nullcontext())[0])


def test_each_forward_begins_anew() -> None:
    """Several may wait for their backward at once, and what was moved in one is no business of the next."""
    model = blocks(2)
    offload = ActivationOffload(model, CPU, nullcontext(), 1)
    losses, plain = [], []
    for step in range(3):
        inputs = torch.full((4, 8), step + 1.0).cumsum(0).sin()
        with offload:
            losses.append(model(inputs).square().sum())
        plain.append(model(inputs).square().sum())
    for left, right in zip(losses, plain, strict=True):
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        assert_equal(list(torch.autograd.grad(left, parameters)), list(torch.autograd.grad(right, parameters)))


def assert_equal(left: list[Any], right: list[Any]) -> None:
    for one, other in zip(left, right, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


def packing() -> TensorPacker:
    return TensorPacker(nn.Module(), CPU, 1)


BASE = torch.arange(4096.0).view(2, 8, 16, 16)
LAYINGS = {
    "whole": BASE,
    "channels last": BASE.contiguous(memory_format=torch.channels_last),
    "transposed": BASE.transpose(1, 3),
    "every second": BASE[:, ::2],
    "expanded": torch.arange(3.0).view(3, 1).expand(3, 5),
    "a small part": BASE.flatten()[130:150].view(4, 5).t(),
    "one number": BASE[1, 2, 3, 4],
    "truths": BASE > 7,
    "bytes as numbers": BASE.bfloat16().view(torch.int16)[1],
}


@pytest.mark.parametrize("name", LAYINGS)
def test_a_tensor_comes_back_as_it_lay(name: str) -> None:
    tensor = LAYINGS[name]
    moved = packing().pack(tensor)
    assert isinstance(moved, HostTensor)
    back = activations._unpack(moved)
    assert torch.equal(back, tensor)
    assert (back.dtype, back.stride()) == (tensor.dtype, tensor.stride())
    assert back.data_ptr() != tensor.data_ptr()
    assert (back.storage_offset() - tensor.storage_offset()) * tensor.itemsize % 512 == 0  # kernels look at alignment


def test_a_small_part_of_a_storage_travels_alone() -> None:
    moved = packing().pack(LAYINGS["a small part"])
    assert isinstance(moved, HostTensor)
    assert moved.elements.restore(torch.Size([1]), (1,), 0).untyped_storage().nbytes() == (130 % 128 + 20) * 4


def test_views_of_one_storage_travel_once_and_share_it_again() -> None:
    one = packing()
    parts = BASE.clone().unbind(1)[:3]
    moved = [one.pack(part) for part in [*parts, parts[0]]]
    assert len({id(each.elements) for each in moved if isinstance(each, HostTensor)}) == 1
    back = [activations._unpack(each) for each in moved]
    assert len({each.untyped_storage().data_ptr() for each in back}) == 1
    for part, again in zip([*parts, parts[0]], back, strict=True):
        assert torch.equal(part, again)
    del back, again
    assert torch.equal(activations._unpack(moved[1]), parts[1])  # and once more, when all of them are gone


def test_what_was_written_to_travels_again() -> None:
    one = packing()
    tensor = BASE.clone()
    before = one.pack(tensor)
    tensor += 1
    after = one.pack(tensor)
    assert torch.equal(activations._unpack(after), BASE + 1)
    assert isinstance(before, HostTensor)
    assert torch.equal(before.elements.restore(BASE.size(), BASE.stride(), 0), BASE)


def test_memory_that_is_used_again_is_not_taken_for_what_it_was() -> None:
    one = packing()
    numbers = [float(number) for number in range(200)]
    moved = [one.pack(torch.full((1000,), number)) for number in numbers]
    assert [activations._unpack(each)[999].item() for each in moved] == numbers


@pytest.mark.parametrize("tensor", [torch.ones(16383), torch.ones(70000, dtype=torch.complex64).conj(), torch.empty(0)])
def test_what_is_small_or_strange_stays(tensor: Tensor) -> None:
    one = TensorPacker(nn.Module(), CPU, activations._MIN_BYTES)
    assert isinstance(one.pack(torch.ones(16384)), HostTensor)
    assert isinstance(one.pack(tensor), DeviceTensor)


def test_views_of_parameters_stay_that_the_model_has_for_a_while() -> None:
    """fully_shard gives a block other parameters, which are whole, while it computes."""
    whole = nn.Parameter(torch.ones(8, 8))
    assert [type(packing().pack(each)) for each in (whole, whole.t(), whole[1:].view(-1), whole * 1)] == [
        *[DeviceTensor] * 3,
        HostTensor,
    ]


def test_what_lies_elsewhere_stays() -> None:
    assert isinstance(TensorPacker(nn.Module(), torch.device("cuda"), 1).pack(BASE), DeviceTensor)


@pytest.mark.parametrize("written", ["activation", "weight", "buffer"])
def test_writing_to_what_was_saved_is_an_error_as_ever(written: str) -> None:
    model = blocks(1)
    for context in (nullcontext(), ActivationOffload(model, CPU, nullcontext(), 1)):
        with context:
            hidden = model(torch.ones(2, 8)).exp()
            outputs = hidden * 2
        outputs.sum().backward()
        with context:
            hidden = model(torch.ones(2, 8)).exp()
            outputs = hidden * 2
        with torch.no_grad():
            {"activation": hidden, "weight": model[0].norm.weight, "buffer": model[0].scale}[written].add_(1)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*expected version"):
            outputs.sum().backward()


@pytest.mark.slow("needs a card")
@pytest.mark.gpu
def test_a_gpu_has_less_to_hold() -> None:
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())]
    model = nn.Sequential(*layers).to(device)
    inputs = torch.randn(8, 16, 128, 128, device=device)
    found = []
    for offload in (False, True):
        with training_forward_context(nullcontext(), model, device, offload):
            before = torch.cuda.memory_allocated()
            loss = model(inputs).square().sum()
        held = torch.cuda.memory_allocated() - before
        loss.backward()  # type: ignore[no-untyped-call]
        found.append((held, [parameter.grad for parameter in model.parameters()]))
        model.zero_grad()
    (plain, expected), (saving, gradients_again) = found
    assert_equal(gradients_again, expected)
    assert saving < plain / 10
    assert plain > 16 * inputs.nbytes


def test_elements_hold_nothing_of_what_they_came_from() -> None:
    tensor = torch.ones(1000)
    weak = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    elements = HostElements(tensor)
    del tensor
    assert weak.expired()  # type: ignore[no-untyped-call]
    assert torch.equal(elements.restore(torch.Size([1000]), (1,), 0), torch.ones(1000))
