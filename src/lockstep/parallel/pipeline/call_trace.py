"""Records the forward pass of a model as a sequence of module calls, by running it with fake tensors.

This is for models that torch.fx can't trace. Each stage runs the forward method of the full model, with fake tensors in
place of the outputs of modules on other ranks (replay.py). Therefore the code between modules can use shapes, Python
values, and values that only depend on the model inputs, such as a padding mask. It can't use the values of module
outputs.

The fake tensors come from a meta model: a copy of the model whose tensors have a shape, a dtype and a device, but no
values.
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

from lockstep.common.user_code import describe_error
from lockstep.core import batch as batches
from lockstep.core.batch import Inputs, map_tensors
from lockstep.errors import LockstepError
from lockstep.parallel.pipeline.graph_trace import PipelineCut, UntraceableError, get_rng_states
from lockstep.parallel.pipeline.part import find_nonleaf_attributes, named_tensors


@dataclass
class _TracedCall:
    """A call to a leaf module, which is never split, and the code that runs after it until the next call."""

    name: str
    argument_ids: dict[str, int] = field(default_factory=dict)  # path -> id of each fake tensor in the arguments
    produced_ids: set[int] = field(default_factory=set)  # ids of the fake tensors created by the call and this code
    read_ids: set[int] = field(default_factory=set)  # ids of the fake tensors that this code uses
    num_operations: int = 0


@final
class CallTrace:
    """A recorded forward pass, with the same interface as GraphTrace.

    The model is recorded in training mode if `training` is set, and in evaluation mode otherwise. Raises UsageError if
    the model's code can't run on fake tensors.
    """

    def __init__(self, model: nn.Module, cut: PipelineCut, training: bool) -> None:
        assert cut.example is not None
        model.train(training)
        self._modules = dict(model.named_modules())
        self._meta = MetaModel(model, torch.device("cpu"))
        self._leaves = dict(leaf_modules(self._meta.model, cut))
        self._names = {id(fake): name for name, fake in self._meta.tensors.items()}
        self._tensors = dict(named_tensors(model))
        self._alive: list[Any] = []  # keeps tensors alive, so that their ids aren't reused
        self._calls: list[_TracedCall] = []
        self._inside_module = False
        # Use ones as inputs: they are valid indices into embedding tables, and a mask of ones masks nothing.
        ones = batches.map_tensors(lambda tensor: torch.ones(tensor.shape, dtype=tensor.dtype), cut.example)
        self.outputs: Any = self._run(ones)
        self.used = [self._collect_tensors(call) for call in self._calls]
        self.calls: dict[str, int] = {}
        for position, call in enumerate(self._calls):
            self.calls.setdefault(call.name, position)

    def find_obstacle(self, position: int) -> str | None:
        """See GraphTrace."""
        producers = {key: call.name for call in self._calls[:position] for key in call.produced_ids}
        entering = {*self._calls[position].argument_ids.values()}
        for call in self._calls[position:]:
            for key in call.read_ids:
                if key in producers:
                    return f"code between modules also uses an output of {producers[key]} after {call.name}"
            for key in call.argument_ids.values():
                if key in producers and key not in entering:
                    return f"{call.name} uses an output of {producers[key]}"
        return None

    def get_boundary_paths(self, position: int) -> tuple[str, ...]:
        """Return the paths of the arguments of the call at `position` that depend on earlier modules."""
        return tuple(self._calls[position].argument_ids)

    def measure(self, example: Inputs) -> list[int]:
        """See GraphTrace. The operations were counted when the forward pass was recorded. `example` is not used."""
        return [call.num_operations // 2 for call in self._calls]

    def _collect_tensors(self, call: _TracedCall) -> dict[int, Tensor]:
        direct_tensors = [self._tensors[self._names[key]] for key in call.read_ids if key in self._names]
        module_tensors = [tensor for _, tensor in named_tensors(self._modules[call.name])]
        return {id(tensor): tensor for tensor in (*direct_tensors, *module_tensors)}

    def _run(self, inputs: Inputs) -> Any:
        for name, leaf in self._leaves.items():
            intercept(leaf, partial(self._record_call, name))
        states = get_rng_states()
        try:
            with torch.no_grad(), _ReadRecorder(self):
                outputs = batches.call_model(self._meta.model, inputs)
        except LockstepError:
            raise
        except Exception as error:  # user code can raise any exception when it reads a fake tensor
            description = describe_error(error, UntraceableError.advice)
            reason = f"its code between modules depends on values that modules compute: {description}"
            raise UntraceableError(reason) from error
        if get_rng_states() != states:
            raise UntraceableError(f"its forward method draws random numbers; {UntraceableError.advice}")
        if not self._calls:
            raise UntraceableError(f"its forward method calls no modules; {UntraceableError.advice}")
        self._record_read(outputs)
        return outputs

    def _record_call(self, name: str, forward: "Forward", args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run and record a call to a leaf module. Replaces the module's forward method."""
        if self._inside_module:
            return forward(*args, **kwargs)
        fakes = [(path, leaf) for path, leaf in leaves_with_paths((args, kwargs)) if isinstance(leaf, FakeTensor)]
        self._calls.append(_TracedCall(name, {path: id(leaf) for path, leaf in fakes}))
        self._alive += [leaf for _, leaf in fakes]
        self._inside_module = True
        try:
            with torch.random.fork_rng([]), FlopCounterMode(display=False) as counter:
                outputs = batches.map_tensors(self._meta.to_fake, forward(*args, **kwargs))
        finally:
            self._inside_module = False
        self._calls[-1].num_operations = counter.get_total_flops()
        self._record_produced(outputs)
        return outputs

    def _record_read(self, values: Any) -> None:
        """Record that code between modules uses these tensors, or that the model returns them."""
        if self._calls:
            self._calls[-1].read_ids |= {
                id(value) for value in pytree.tree_leaves(values) if isinstance(value, FakeTensor)
            }

    def _record_produced(self, values: Any) -> None:
        fakes = [value for value in pytree.tree_leaves(values) if isinstance(value, FakeTensor)]
        self._alive += fakes
        if self._calls:
            earlier_ids = set().union(*(call.produced_ids for call in self._calls))
            self._calls[-1].produced_ids |= {id(value) for value in fakes} - earlier_ids


@final
class _ReadRecorder(TorchFunctionMode):
    """Records the tensors that code between modules reads and creates. Reading only a shape isn't recorded."""

    def __init__(self, trace: CallTrace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._trace._inside_module and (result is None or batches.get_tensors(result)):
            self._trace._record_read((args, kwargs))
            self._trace._record_produced(result)
        return result


def leaves_with_paths(arguments: Any) -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each pytree leaf in `arguments`."""
    for path, leaf in pytree.tree_flatten_with_path(arguments)[0]:
        yield pytree.keystr(path), leaf


Forward = Callable[..., Any]


@final
class MetaModel:
    """A copy of `model` with fake tensors, which have no values and appear to be on `device`."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._device = device
        self.tensors: dict[str, Tensor] = {}
        fakes_by_id: dict[int, Any] = {}
        for name, tensor in named_tensors(model):
            if id(tensor) not in fakes_by_id:
                fakes_by_id[id(tensor)] = self.tensors[name] = self._make_fake_like(tensor)
        fakes_by_id |= {id(tensor): self._make_fake_like(tensor) for tensor in find_nonleaf_attributes(model)}
        self.model: nn.Module = copy.deepcopy(model, fakes_by_id)
        self._modules = dict(self.model.named_modules())
        self._outputs_by_key: dict[Any, Any] = {}

    def infer_outputs(self, name: str, training: bool, args: Any, kwargs: Any) -> Any:
        """Return fake outputs of module `name` for these arguments."""
        key = name, training, torch.is_autocast_enabled(self._device.type), _make_cache_key((args, kwargs))
        if key not in self._outputs_by_key:
            with torch.no_grad(), torch.random.fork_rng([]):
                outputs = self._modules[name].train(training)(*args, **kwargs)
            self._outputs_by_key[key] = map_tensors(self.to_fake, outputs)
        return map_tensors(self._copy_fake, self._outputs_by_key[key])

    def to_fake(self, tensor: Tensor) -> Tensor:
        """Return a fake tensor with the same shape, dtype and device."""
        return tensor if isinstance(tensor, FakeTensor) else self._mode.from_tensor(tensor)

    def _copy_fake(self, tensor: Tensor) -> Tensor:
        with self._mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)

    def _make_fake_like(self, tensor: Tensor) -> Tensor:
        with self._mode:
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device)
        return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def intercept(module: nn.Module, replacement: Callable[[Forward, tuple[Any, ...], dict[str, Any]], Any]) -> None:
    """Replace a module's forward method with `replacement(forward, args, kwargs)`, with the original as `forward`."""
    module.register_forward_pre_hook(lambda _, args, kwargs: (((args, kwargs),), {}), with_kwargs=True)
    module.forward = partial(_call_replacement, replacement, module.forward)


def _call_replacement(replacement: Any, forward: Forward, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    return replacement(forward, *arguments)


def leaf_modules(module: nn.Module, cut: PipelineCut, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the name and module of each leaf module, which is never split.

    Containers and expanded modules aren't leaves.
    """
    for child_name, child in module.named_children():
        name = prefix + child_name
        is_container = type(child).forward in (nn.Sequential.forward, nn.Module.forward)  # ModuleList has no forward
        if name not in cut.unsplit and (is_container or name in cut.expanded):
            yield from leaf_modules(child, cut, f"{name}.")
        else:
            yield name, child


def _make_cache_key(arguments: Any) -> Any:
    """Return a cache key for the arguments of a call. Calls with the same key have outputs of the same shapes.

    Objects other than tensors and plain values are compared by identity.
    """
    leaves, form = pytree.tree_flatten(arguments)
    return str(form), tuple(_make_leaf_key(leaf) for leaf in leaves)


def _make_leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype
    return leaf if isinstance(leaf, int | float | str | bool | None) else id(leaf)
