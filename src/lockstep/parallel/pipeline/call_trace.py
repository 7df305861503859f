"""A model's forward as a row of calls, found by running its code without values, where it cannot be traced.

Code between modules may then look at shapes, at Python values, and at what follows from the inputs alone, such as a
mask of padding; each stage runs it again. What it may not look at are values that modules have computed.

It runs on a meta model, whose tensors have shape, dtype and device alone. A stage of such a model runs the model's own
forward, and calls the meta model's modules in the place of those that other ranks hold (replay.py).
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from lockstep.common.own_code import describe_error
from lockstep.core import batch as batches
from lockstep.core.batch import Inputs, map_tensors
from lockstep.errors import LockstepError
from lockstep.parallel.pipeline.graph_trace import PipelineCut, UntraceableError, generators
from lockstep.parallel.pipeline.part import tensors_in_attributes, tensors_of


@dataclass
class _TracedCall:
    """A call of a module that stays whole, and what is computed behind it up to the next call."""

    name: str
    arguments: dict[str, int] = field(default_factory=dict)  # what has no value of them: its identity, by its path
    made: set[int] = field(default_factory=set)  # identities of tensors without values
    read_behind: set[int] = field(default_factory=set)  # by code that is in no module
    operations: int = 0


@final
class CallTrace:
    """A forward that was run; see GraphTrace for its methods. `crossing` are the arguments that the meta model gave.

    The model is put into the mode that `training` says. Code that cannot be run so raises UsageError.
    """

    def __init__(self, model: nn.Module, cut: PipelineCut, training: bool) -> None:
        assert cut.example is not None
        model.train(training)
        self._modules = dict(model.named_modules())
        self._meta = MetaModel(model, torch.device("cpu"))
        self._leaves = dict(leaf_modules(self._meta.model, cut))
        self._names = {id(fake): name for name, fake in self._meta.tensors.items()}
        self._own = dict(tensors_of(model))
        self._alive: list[Any] = []  # so that no identity is given twice
        self._calls: list[_TracedCall] = []
        self._inside = False
        # Row numbers that every table has, and masks that leave nothing out.
        ones = batches.map_tensors(lambda each: torch.ones(each.shape, dtype=each.dtype), cut.example)
        self.outputs: Any = self._run(ones)
        self.used = [self._tensors_of_call(call) for call in self._calls]
        self.calls: dict[str, int] = {}
        for place, call in enumerate(self._calls):
            self.calls.setdefault(call.name, place)

    def obstacle(self, place: int) -> str | None:
        """See GraphTrace."""
        before = {key: call.name for call in self._calls[:place] for key in call.made}
        entering = {*self._calls[place].arguments.values()}
        for call in self._calls[place:]:
            for key in call.read_behind:
                if key in before:
                    return f"code between modules uses what {before[key]} gave, behind {call.name} too"
            for key in call.arguments.values():
                if key in before and key not in entering:
                    return f"{call.name} takes what {before[key]} gave"
        return None

    def crossing(self, place: int) -> tuple[str, ...]:
        """Return the paths of those arguments of a call which depend on modules before it."""
        return tuple(self._calls[place].arguments)

    def measure(self, example: Inputs) -> list[int]:
        """See GraphTrace; it was done as the forward ran."""
        return [call.operations // 2 for call in self._calls]

    def _tensors_of_call(self, call: _TracedCall) -> dict[int, Tensor]:
        direct = [self._own[self._names[key]] for key in call.read_behind if key in self._names]
        of_module = [tensor for _, tensor in tensors_of(self._modules[call.name])]
        return {id(tensor): tensor for tensor in (*direct, *of_module)}

    def _run(self, inputs: Inputs) -> Any:
        for name, leaf in self._leaves.items():
            intercept(leaf, partial(self._note_call, name))
        before = generators()
        try:
            with torch.no_grad(), _Reading(self):
                outputs = batches.call(self._meta.model, inputs)
        except LockstepError:
            raise
        except Exception as error:  # a stranger's code may raise anything without values
            found = describe_error(error, UntraceableError.advice)
            why = f"its code between modules depends on values that modules compute: {found}"
            raise UntraceableError(why) from error
        if generators() != before:
            raise UntraceableError(f"its own forward draws random numbers; {UntraceableError.advice}")
        if not self._calls:
            raise UntraceableError("its forward calls no modules")
        self._read(outputs)
        return outputs

    def _note_call(self, name: str, forward: "Forward", args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Stand for the forward of a module that stays whole."""
        if self._inside:
            return forward(*args, **kwargs)
        fakes = [(path, leaf) for path, leaf in paths_of((args, kwargs)) if isinstance(leaf, FakeTensor)]
        self._calls.append(_TracedCall(name, {path: id(leaf) for path, leaf in fakes}))
        self._alive += [leaf for _, leaf in fakes]
        self._inside = True
        try:
            with torch.random.fork_rng([]), FlopCounterMode(display=False) as counter:
                outputs = batches.map_tensors(self._meta.without_values, forward(*args, **kwargs))
        finally:
            self._inside = False
        self._calls[-1].operations = counter.get_total_flops()
        self._record_made(outputs)
        return outputs

    def _read(self, values: Any) -> None:
        """Note what code between modules, or the end of the forward, makes use of."""
        if self._calls:
            self._calls[-1].read_behind |= {
                id(each) for each in pytree.tree_leaves(values) if isinstance(each, FakeTensor)
            }

    def _record_made(self, values: Any) -> None:
        found = [each for each in pytree.tree_leaves(values) if isinstance(each, FakeTensor)]
        self._alive += found
        if self._calls:
            known = set().union(*(call.made for call in self._calls))
            self._calls[-1].made |= {id(each) for each in found} - known


@final
class _Reading(TorchFunctionMode):
    """Notes what code between modules computes, and from what; to look at a shape is no use of a tensor."""

    def __init__(self, line: CallTrace) -> None:
        super().__init__()
        self._line = line

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._line._inside and (result is None or batches.tensors_of(result)):
            self._line._read((args, kwargs))
            self._line._record_made(result)
        return result


def paths_of(arguments: Any) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a call's arguments by their paths."""
    for path, leaf in pytree.tree_flatten_with_path(arguments)[0]:
        yield pytree.keystr(path), leaf


Forward = Callable[..., Any]


@final
class MetaModel:
    """A copy of `model` whose tensors have no values, and seem to lie on `device`."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._device = device
        self.tensors: dict[str, Tensor] = {}
        by_identity: dict[int, Any] = {}
        for name, tensor in tensors_of(model):
            if id(tensor) not in by_identity:
                by_identity[id(tensor)] = self.tensors[name] = self._empty(tensor)
        by_identity |= {id(tensor): self._empty(tensor) for tensor in tensors_in_attributes(model)}
        self.model: nn.Module = copy.deepcopy(model, by_identity)
        self._modules = dict(self.model.named_modules())
        self._known: dict[Any, Any] = {}

    def call(self, name: str, training: bool, args: Any, kwargs: Any) -> Any:
        """Return what the module `name` gives for these arguments, each tensor of it without values and new."""
        key = name, training, torch.is_autocast_enabled(self._device.type), _signature((args, kwargs))
        if key not in self._known:
            with torch.no_grad(), torch.random.fork_rng([]):
                outputs = self._modules[name].train(training)(*args, **kwargs)
            self._known[key] = map_tensors(self.without_values, outputs)
        return map_tensors(self._copy, self._known[key])

    def without_values(self, tensor: Tensor) -> Tensor:
        """Return a tensor of that form."""
        return tensor if isinstance(tensor, FakeTensor) else self._mode.from_tensor(tensor)

    def _copy(self, tensor: Tensor) -> Tensor:
        with self._mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)

    def _empty(self, tensor: Tensor) -> Tensor:
        with self._mode:
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device)
        return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def intercept(module: nn.Module, instead: Callable[[Forward, tuple[Any, ...], dict[str, Any]], Any]) -> None:
    """Let each call of a module go to `instead`, which is given the module's own forward and the arguments."""
    module.register_forward_pre_hook(lambda _, args, kwargs: (((args, kwargs),), {}), with_kwargs=True)
    module.forward = partial(_unpack, instead, module.forward)


def _unpack(instead: Any, forward: Forward, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    return instead(forward, *arguments)


def leaf_modules(module: nn.Module, cut: PipelineCut, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that stay whole where the code of the model and of those entered is followed, by name."""
    for child_name, child in module.named_children():
        name = prefix + child_name
        container = type(child).forward in (nn.Sequential.forward, nn.Module.forward)  # ModuleList has none of its own
        if name not in cut.kept and (container or name in cut.entered):
            yield from leaf_modules(child, cut, f"{name}.")
        else:
            yield name, child


def _signature(arguments: Any) -> Any:
    """Return what decides the shapes that come out; what has no value of its own counts by its identity."""
    leaves, form = pytree.tree_flatten(arguments)
    return str(form), tuple(_form(leaf) for leaf in leaves)


def _form(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype
    return leaf if isinstance(leaf, int | float | str | bool | None) else id(leaf)
