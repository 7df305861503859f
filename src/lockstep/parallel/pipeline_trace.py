"""A model's forward as a straight line of larger modules, which can be cut between them.

The model is traced coarsely (torch.fx): only the code that strings its modules together is followed, and each of those
stays the Python module that it is, whatever its code does, for any batch size. Containers are followed; of other
modules only the model itself and those that are `entered`.
"""

from __future__ import annotations

import random as python_random
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from lockstep.core import batch as batches
from lockstep.core.batch import Inputs
from lockstep.errors import LockstepError, UsageError

_ROOT: Final = "model"


@final
class Line:
    """A traced forward: `body` are its nodes in order, without its input, its output and its weights.

    The model is put into the mode that `training` says. What is `kept` is not followed, though it be a container. Code
    that cannot be followed raises UsageError.
    """

    def __init__(
        self, model: nn.Module, entered: frozenset[str], training: bool, kept: frozenset[str] = frozenset()
    ) -> None:
        model.train(training)
        self._root = _OneInput(model)
        self._graph = _traced(self._root, entered, kept)
        self._modules = dict(model.named_modules())
        nodes = list(self._graph.nodes)
        self._input, self._output = nodes[0], nodes[-1]
        self.body = [node for node in nodes if node.op not in ("placeholder", "output", "get_attr")]
        self._named = {f"{_ROOT}.{name}": tensor for name, tensor in tensors_of(model)}
        self._used = [self._used_by(node) for node in self.body]
        self._unfit: frozenset[str] = frozenset()  # what is neither a tensor nor a whole number
        if not isinstance(self._output.args[0], fx.Node):
            raise UsageError(
                f"strategy pipeline: the model returns a {type(self._output.args[0]).__name__}, not one tensor; wrap "
                f"it in a function of yours"
            )

    def calls(self) -> Iterator[tuple[int, str]]:
        """Yield the place and the name of each module where it is called first."""
        met: set[str] = set()
        for place, node in enumerate(self.body):
            if node.op == "call_module" and _name(node) not in met:
                met.add(_name(node))
                yield place, _name(node)

    def place(self, name: str) -> int | None:
        """Return where the module `name`, or the first of its parts, is called first."""
        inside = (place for place, called in self.calls() if called == name or called.startswith(f"{name}."))
        return next(inside, None)

    def tensors(self, part: range) -> dict[int, Tensor]:
        """Return the parameters and buffers used at these places, by their identity."""
        return {id(tensor): tensor for place in part for tensor in self._used[place]}

    def obstacle(self, place: int) -> str | None:
        """Return why the line cannot be cut before `place`, if so."""
        behind = self.tensors(range(place, len(self.body)))
        tied = [tensor for key, tensor in self.tensors(range(place)).items() if key in behind]
        if tied:
            name = next(name for name, tensor in self._named.items() if tensor is tied[0])
            return f"{name.removeprefix(f'{_ROOT}.')} is used on both sides"
        others = [node.name for node in self._crossing(place) if node.name in self._unfit]
        return f"'{others[0]}', which crosses it, is no tensor and no whole number" if others else None

    def trains(self) -> list[bool]:
        """Return for each place whether a parameter to train is used there."""
        return [any(tensor.requires_grad for tensor in used) for used in self._used]

    def measure(self, sample: Tensor) -> list[int]:
        """Return the operations of the forward at each place, for the input `sample`; the model is on the meta device.

        From here on `obstacle` knows what cannot cross, too.
        """
        run = _Measuring(self._root, self._graph)
        run.run(sample)
        self._unfit = frozenset(run.unfit)
        return [run.operations.get(node.name, 0) // 2 for node in self.body]

    def weights(self) -> list[int]:
        """Return the parameters' elements at each place, each counted where it is used first."""
        met: set[int] = set()
        found = []
        for used in self._used:
            fresh = [tensor for tensor in used if isinstance(tensor, nn.Parameter) and id(tensor) not in met]
            met |= {id(tensor) for tensor in fresh}
            found.append(sum(tensor.numel() for tensor in fresh))
        return found

    def module(self, start: int, stop: int) -> fx.GraphModule:
        """Return what lies between two places: from the values that cross into it to a list of those that cross out.

        Its parts are the model's own modules and weights.
        """
        graph = fx.Graph()
        copied = {node: graph.placeholder(node.name) for node in self._crossing(start)}
        for node in self.body[start:stop]:
            for weight in node.all_input_nodes:
                if weight.op == "get_attr" and weight not in copied:
                    copied[weight] = graph.node_copy(weight)
            copied[node] = graph.node_copy(node, lambda each: copied[each])
        last = stop == len(self.body)
        results = self._output.all_input_nodes if last else self._crossing(stop)
        graph.output([copied[node] for node in results])
        return fx.GraphModule(self._root, graph)

    def _crossing(self, place: int) -> list[fx.Node]:
        if place == 0:
            return [self._input]
        late = {*self.body[place:], self._output}
        return [node for node in [self._input, *self.body[:place]] if any(user in late for user in node.users)]

    def _used_by(self, node: fx.Node) -> list[Tensor]:
        weights = [self._named[str(each.target)] for each in node.all_input_nodes if each.op == "get_attr"]
        if node.op == "call_module":
            weights += [tensor for _, tensor in tensors_of(self._modules[_name(node)])]
        return weights


def only_input(inputs: Inputs) -> Tensor:
    """Return the one tensor that a model takes; UsageError where it takes more."""
    tensors = batches.tensors_of(inputs)
    if len(inputs) != 1 or len(tensors) != 1 or isinstance(inputs, Mapping):
        raise UsageError(
            f"strategy pipeline: the model takes {len(inputs)} inputs; let its forward take one tensor, or use another "
            f"strategy"
        )
    return tensors[0]


def tensors_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return all parameters and buffers by name, shared ones by each of their names."""
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


@final
class _OneInput(nn.Module):
    """A model called with its input alone, so that no default of its forward becomes a second input."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Any:
        return self.model(inputs)


@final
class _CoarseTracer(fx.Tracer):
    proxy_buffer_attributes = True  # else a buffer's value would be that of the trace

    def __init__(self, entered: frozenset[str], kept: frozenset[str]) -> None:
        super().__init__()
        self._entered = entered
        self._kept = kept

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module stays whole."""
        name = module_qualified_name.removeprefix(_ROOT).removeprefix(".")
        if name in self._kept:
            return True
        return bool(name) and type(m).forward is not nn.Sequential.forward and name not in self._entered


@final
class _Measuring(fx.Interpreter):
    def __init__(self, root: nn.Module, graph: fx.Graph) -> None:
        super().__init__(root, graph=graph)
        self.operations: dict[str, int] = {}
        self.unfit: set[str] = set()

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Give a module lists of its own, as a call would: the graph's refuse to be written into."""
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return tuple(list(each) if isinstance(each, list) else each for each in args), kwargs

    def run_node(self, n: fx.Node) -> Any:
        """Run one node and count; with a graph, since the counter's hooks stumble over a weight's views without."""
        with FlopCounterMode(display=False) as counter:
            result = super().run_node(n)
        self.operations[n.name] = counter.get_total_flops()
        if not isinstance(result, Tensor | int):
            self.unfit.add(n.name)
        return result


def _traced(root: nn.Module, entered: frozenset[str], kept: frozenset[str]) -> fx.Graph:
    """Trace, and refuse what a trace would silently fix: tensors of the moment and drawn numbers."""
    before = _generators()
    try:
        graph = _CoarseTracer(entered, kept).trace(root)
    except LockstepError:
        raise
    except Exception as error:  # a stranger's code may raise anything once it meets no real tensors
        first = next(iter(str(error).splitlines()), "")
        raise UsageError(
            f"strategy pipeline: the model cannot be cut: its code {_blame(error)} depends on values or shapes of "
            f"tensors ({type(error).__name__}: {first}); move that code into a module of its own, or use another "
            f"strategy"
        ) from error
    problem = None
    if _generators() != before:
        problem = "draws random numbers"
    elif any("_tensor_constant" in str(node.target) for node in graph.nodes if node.op == "get_attr"):
        problem = "makes tensors that come neither from its input nor from its weights"
    if problem:
        raise UsageError(
            f"strategy pipeline: the model cannot be cut: its own forward {problem}; move that code into a module of "
            f"its own, or use another strategy"
        )
    return graph


def _generators() -> list[object]:
    _, numbers, *rest = np.random.get_state(legacy=True)
    return [bytes(torch.get_rng_state().numpy()), np.asarray(numbers).tobytes(), rest, python_random.getstate()]


def _blame(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [Path(torch.__file__).parent, Path(__file__).parent]
    theirs = [each for each in frames if not any(Path(each.filename).is_relative_to(place) for place in ours)]
    return f"at {theirs[-1].filename}:{theirs[-1].lineno}, `{theirs[-1].line}`," if theirs else "somewhere"


def _name(node: fx.Node) -> str:
    return str(node.target).removeprefix(f"{_ROOT}.")
