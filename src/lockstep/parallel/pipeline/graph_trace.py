"""Traces the forward pass of a model as a sequence of large modules, between which it can be split.

The model is traced coarsely with torch.fx: only the code that connects its modules is traced. The modules stay Python
modules, so they can contain any code and work for any batch size. Containers are traced. Other than containers, only
the model itself and the modules in `entered` are traced.
"""

import random as python_random
import traceback
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, Final, final

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from lockstep.core import batch as batches
from lockstep.core.batch import Inputs
from lockstep.errors import LockstepError, UsageError
from lockstep.parallel.pipeline.part import tensors_of

_ROOT: Final = "model"


class UntraceableError(UsageError):
    """Raised if the code of a model can't be traced. The code may still run without values (call_trace.py)."""

    advice: ClassVar = "move this code to a separate module, or use a different strategy"

    def __init__(self, reason: str) -> None:
        super().__init__(f"strategy pipeline: the model cannot be split: {reason}")


@dataclass(frozen=True)
class PipelineCut:
    """The modules at which stages 1, 2, ... begin, and the modules whose code is traced or run for a split."""

    begins: tuple[str, ...] = ()
    entered: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()  # names of blocks that are never split
    example: Inputs | None = field(default=None, compare=False)  # example inputs of the model
    replayed: bool = False  # whether each stage runs the model's code (replay.py), because the code can't be traced


@final
class GraphTrace:
    """A traced forward pass as a sequence of places: calls of modules, and computations between two calls.

    - `body`: the nodes in order, without inputs, outputs and weights.
    - `used`: the parameters and buffers used at each place, by id.
    - `calls`: the place of the first call of each module, by name, in call order.

    `training` selects the mode of the model: training or evaluation. Modules in `cut.kept` aren't traced, even if they
    are containers. `cut.example` contains the inputs of the model. If it is None, the model takes one tensor. Raises
    UsageError if the code can't be traced.
    """

    def __init__(self, model: nn.Module, cut: PipelineCut, training: bool) -> None:
        example = cut.example
        model.train(training)
        self._root = _FlatInputs(model, example)
        self._graph = _trace(self._root, cut)
        self._modules = dict(model.named_modules())
        self._inputs = _separate_inputs(self._graph, 1 if example is None else len(batches.tensors_of(example)))
        nodes = list(self._graph.nodes)
        self._output = nodes[-1]
        self.body = [node for node in nodes if node.op not in ("placeholder", "output", "get_attr")]
        self._named = {f"{_ROOT}.{name}": tensor for name, tensor in tensors_of(model)}
        self.used = [self._tensors_of_node(node) for node in self.body]
        self.calls: dict[str, int] = {}
        for place, node in enumerate(self.body):
            if node.op == "call_module":
                self.calls.setdefault(_name(node), place)
        self._unfit: frozenset[str] = frozenset()  # names of nodes whose values are neither tensors nor integers
        self._output_nodes = [leaf for leaf in pytree.tree_leaves(self._output.args[0]) if isinstance(leaf, fx.Node)]
        if any(
            node.target is getattr for node in self._output_nodes
        ):  # these can be None, which a trace can't represent
            raise UntraceableError(
                "its outputs are attributes of a module's output; return tensors from its forward, or use a different "
                "strategy"
            )

    @property
    def outputs(self) -> Any:
        """The structure of the model's outputs, with empty tensors."""
        empty = torch.empty(0, device="meta")
        return pytree.tree_map_only(fx.Node, lambda _: empty, self._output.args[0])

    def obstacle(self, place: int) -> str | None:
        """Return the reason why the model can't be split before `place` because of the crossing values, or None."""
        misfits = [node.name for node in self._crossing(place) if node.name in self._unfit]
        return f"'{misfits[0]}', which would cross the split, is neither a tensor nor an integer" if misfits else None

    def measure(self, example: Inputs) -> list[int]:
        """Return the number of operations of the forward pass at each place for these inputs.

        The model must be on the meta device. After this call, `obstacle` also checks the types of crossing values.
        """
        run = _Measuring(self._root, self._graph)
        run.run(*batches.tensors_of(example))
        self._unfit = frozenset(run.unfit)
        return [run.operations.get(node.name, 0) // 2 for node in self.body]

    def module(self, start: int, stop: int) -> fx.GraphModule:
        """Return the module between two places. It maps the values that enter to a list of the values that leave.

        The values that leave the last place are the tensors of the model outputs, in order. The module shares the
        submodules and weights of the model.
        """
        graph = fx.Graph()
        copied = {node: graph.placeholder(node.name) for node in self._crossing(start)}
        for node in self.body[start:stop]:
            for weight in node.all_input_nodes:
                if weight.op == "get_attr" and weight not in copied:
                    copied[weight] = graph.node_copy(weight)
            copied[node] = graph.node_copy(node, lambda argument: copied[argument])
        last = stop == len(self.body)
        results = self._output_nodes if last else self._crossing(stop)
        graph.output([copied[node] for node in results])
        return fx.GraphModule(self._root, graph)

    def _crossing(self, place: int) -> list[fx.Node]:
        if place == 0:
            return self._inputs
        later_nodes = {*self.body[place:], self._output}
        return [node for node in [*self._inputs, *self.body[:place]] if any(user in later_nodes for user in node.users)]

    def _tensors_of_node(self, node: fx.Node) -> dict[int, Tensor]:
        weights = [
            self._named[str(input_node.target)] for input_node in node.all_input_nodes if input_node.op == "get_attr"
        ]
        if node.op == "call_module":
            weights += [tensor for _, tensor in tensors_of(self._modules[_name(node)])]
        return {id(tensor): tensor for tensor in weights}


@final
class _FlatInputs(nn.Module):
    """Calls a model with only the given inputs, so that default arguments of its forward method don't become inputs.

    The inputs are a list of the tensors in `example`, or a list of one tensor if there is no example.
    """

    def __init__(self, model: nn.Module, example: Inputs | None) -> None:
        super().__init__()
        self.model = model
        inputs: Inputs = (torch.empty(0, device="meta"),) if example is None else example
        self._leaves, self._form = pytree.tree_flatten(inputs)

    def forward(self, tensors: Any) -> Any:
        numbers = count()
        leaves = [tensors[next(numbers)] if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        inputs = pytree.tree_unflatten(leaves, self._form)
        return batches.call(self.model, inputs)


def _separate_inputs(graph: fx.Graph, inputs: int) -> list[fx.Node]:
    """Replace the traced list of inputs with one placeholder per tensor, and return the placeholders."""
    placeholder = next(iter(graph.nodes))
    with graph.inserting_before(placeholder):
        placeholders = [graph.placeholder(f"input_{number}") for number in range(inputs)]
    for node in [*placeholder.users]:
        node.replace_all_uses_with(placeholders[node.args[1]])
        graph.erase_node(node)
    graph.erase_node(placeholder)
    return placeholders


@final
class _CoarseTracer(fx.Tracer):
    proxy_buffer_attributes = True  # otherwise, the trace would contain the current values of buffers

    def __init__(self, cut: PipelineCut) -> None:
        super().__init__()
        self._cut = cut

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is kept as a single call instead of being traced."""
        name = module_qualified_name.removeprefix(_ROOT).removeprefix(".")
        if name in self._cut.kept:
            return True
        return bool(name) and type(m).forward is not nn.Sequential.forward and name not in self._cut.entered


@final
class _Measuring(fx.Interpreter):
    def __init__(self, root: nn.Module, graph: fx.Graph) -> None:
        super().__init__(root, graph=graph)
        self.operations: dict[str, int] = {}
        self.unfit: set[str] = set()

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Copy list arguments of a module to plain lists, as in a normal call. Lists in a graph are immutable."""
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return tuple(list(argument) if isinstance(argument, list) else argument for argument in args), kwargs

    def run_node(self, n: fx.Node) -> Any:
        """Run a node and count its operations. Autograd must be off, because the counter fails on views of weights."""
        with FlopCounterMode(display=False) as counter:
            result = super().run_node(n)
        self.operations[n.name] = counter.get_total_flops()
        if not isinstance(result, Tensor | int):
            self.unfit.add(n.name)
        return result


def _trace(root: nn.Module, cut: PipelineCut) -> fx.Graph:
    """Trace the model. Rejects code whose result a trace would make constant: temporary tensors and random numbers."""
    states = generators()
    try:
        graph = _CoarseTracer(cut).trace(root)
    except LockstepError:
        raise
    except Exception as error:  # user code can raise any exception if there are no real tensors
        first = next(iter(str(error).splitlines()), "")
        raise UntraceableError(
            f"its code {_error_location(error)} depends on values or shapes of tensors ({type(error).__name__}: "
            f"{first}); {UntraceableError.advice}"
        ) from error
    problem = None
    if generators() != states:
        problem = "draws random numbers"
    elif any("_tensor_constant" in str(node.target) for node in graph.nodes if node.op == "get_attr"):
        problem = "creates tensors that depend neither on its inputs nor on its weights"
    if problem:
        raise UntraceableError(f"its own forward {problem}; {UntraceableError.advice}")
    return graph


def generators() -> list[object]:
    """Return the states of the CPU generators of torch, NumPy and Python."""
    _, numbers, *rest = np.random.get_state(legacy=True)
    return [bytes(torch.get_rng_state().numpy()), np.asarray(numbers).tobytes(), rest, python_random.getstate()]


def _error_location(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    library_folders = [Path(torch.__file__).parent, Path(__file__).parent]
    user_frames = [
        frame for frame in frames if not any(Path(frame.filename).is_relative_to(folder) for folder in library_folders)
    ]
    return (
        f"at {user_frames[-1].filename}:{user_frames[-1].lineno}, `{user_frames[-1].line}`,"
        if user_frames
        else "somewhere"
    )


def _name(node: fx.Node) -> str:
    return str(node.target).removeprefix(f"{_ROOT}.")
