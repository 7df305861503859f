"""Traces the forward pass of a model as a sequence of calls of large modules, between which it can be split.

torch.fx only traces the code of the model itself, of nn.Sequential containers and of the modules in `expanded`. All
other modules stay regular calls, so they can contain any code and support any batch size.
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
from lockstep.parallel.pipeline.part import named_tensors

_ROOT: Final = "model"


class UntraceableError(UsageError):
    """Raised if the code of a model can't be traced. The code may still run on fake tensors (call_trace.py)."""

    advice: ClassVar = "move this code to a separate module, or use a different strategy"

    def __init__(self, reason: str) -> None:
        super().__init__(f"strategy pipeline: the model cannot be split: {reason}")


@dataclass(frozen=True)
class PipelineCut:
    """How to partition a model into stages.

    `stage_starts` are the names of the modules at which stages 1, 2, ... begin. `expanded` are the names of the modules
    whose code is traced or replayed, so that the model can be split between their submodules.
    """

    stage_starts: tuple[str, ...] = ()
    expanded: frozenset[str] = frozenset()
    unsplit: frozenset[str] = frozenset()  # names of blocks that are never split
    example: Inputs | None = field(default=None, compare=False)  # example inputs of the model
    replayed: bool = False  # whether each stage runs the code of the full model (replay.py)


@final
class GraphTrace:
    """A traced forward pass: a sequence of module calls and of the operations between them.

    - `nodes`: The nodes in order, without inputs, outputs and weights.
    - `used`: The parameters and buffers that each node uses, by id.
    - `calls`: The position in `nodes` of the first call of each module, by name, in call order.

    The model is traced in training mode if `training` is set, and in evaluation mode otherwise. Modules in
    `cut.unsplit` aren't traced, even if they are containers. `cut.example` contains the model inputs. If it is None,
    the model takes one tensor. Raises UsageError if the code can't be traced.
    """

    def __init__(self, model: nn.Module, cut: PipelineCut, training: bool) -> None:
        example = cut.example
        model.train(training)
        self._root = _FlatInputs(model, example)
        self._graph = _trace(self._root, cut)
        self._modules = dict(model.named_modules())
        self._inputs = _separate_inputs(self._graph, 1 if example is None else len(batches.get_tensors(example)))
        nodes = list(self._graph.nodes)
        self._output = nodes[-1]
        self.nodes = [node for node in nodes if node.op not in ("placeholder", "output", "get_attr")]
        self._named = {f"{_ROOT}.{name}": tensor for name, tensor in named_tensors(model)}
        self.used = [self._collect_tensors(node) for node in self.nodes]
        self.calls: dict[str, int] = {}
        for position, node in enumerate(self.nodes):
            if node.op == "call_module":
                self.calls.setdefault(_get_module_name(node), position)
        # Names of the nodes whose results are neither tensors nor integers.
        self._unsupported: frozenset[str] = frozenset()
        self._output_nodes = [leaf for leaf in pytree.tree_leaves(self._output.args[0]) if isinstance(leaf, fx.Node)]
        # Attributes of a module's output can be None, which a trace can't represent.
        if any(node.target is getattr for node in self._output_nodes):
            raise UntraceableError(
                "its outputs are attributes of a module's output; return tensors from its forward, or use a different "
                "strategy"
            )

    @property
    def outputs(self) -> Any:
        """The structure of the model's outputs, with empty tensors."""
        empty = torch.empty(0, device="meta")
        return pytree.tree_map_only(fx.Node, lambda _: empty, self._output.args[0])

    def find_obstacle(self, position: int) -> str | None:
        """Return why the forward pass can't be split before `position`, or None if the values there can be sent."""
        unsupported_names = [
            node.name for node in self._find_boundary_nodes(position) if node.name in self._unsupported
        ]
        return (
            f"'{unsupported_names[0]}', which would cross the split, is neither a tensor nor an integer"
            if unsupported_names
            else None
        )

    def measure(self, example: Inputs) -> list[int]:
        """Return the number of operations at each position of the forward pass on `example`.

        The model must be on the meta device. After this call, `find_obstacle` also checks the types of the values.
        """
        run = _FlopCounter(self._root, self._graph)
        run.run(*batches.get_tensors(example))
        self._unsupported = frozenset(run.unsupported)
        return [run.operations.get(node.name, 0) // 2 for node in self.nodes]

    def build_module(self, start: int, stop: int) -> fx.GraphModule:
        """Return a module that runs positions `start` to `stop` - 1, and returns a list of the outgoing values.

        Its arguments are the incoming values. If `stop` is the end, the outgoing values are the tensors of the model
        outputs, in order. The module shares the submodules and weights of the model.
        """
        graph = fx.Graph()
        copied = {node: graph.placeholder(node.name) for node in self._find_boundary_nodes(start)}
        for node in self.nodes[start:stop]:
            for weight in node.all_input_nodes:
                if weight.op == "get_attr" and weight not in copied:
                    copied[weight] = graph.node_copy(weight)
            copied[node] = graph.node_copy(node, lambda argument: copied[argument])
        last = stop == len(self.nodes)
        results = self._output_nodes if last else self._find_boundary_nodes(stop)
        graph.output([copied[node] for node in results])
        return fx.GraphModule(self._root, graph)

    def _find_boundary_nodes(self, position: int) -> list[fx.Node]:
        if position == 0:
            return self._inputs
        later_nodes = {*self.nodes[position:], self._output}
        return [
            node for node in [*self._inputs, *self.nodes[:position]] if any(user in later_nodes for user in node.users)
        ]

    def _collect_tensors(self, node: fx.Node) -> dict[int, Tensor]:
        weights = [
            self._named[str(input_node.target)] for input_node in node.all_input_nodes if input_node.op == "get_attr"
        ]
        if node.op == "call_module":
            weights += [tensor for _, tensor in named_tensors(self._modules[_get_module_name(node)])]
        return {id(tensor): tensor for tensor in weights}


@final
class _FlatInputs(nn.Module):
    """Wraps a model for tracing, so that its forward method takes a list of the tensors in `example`.

    Without this wrapper, default arguments of the model's forward method would become inputs. If `example` is None, the
    list contains one tensor.
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
        return batches.call_model(self.model, inputs)


def _separate_inputs(graph: fx.Graph, num_inputs: int) -> list[fx.Node]:
    """Replace the traced list of inputs with one placeholder per tensor, and return the placeholders."""
    placeholder = next(iter(graph.nodes))
    with graph.inserting_before(placeholder):
        placeholders = [graph.placeholder(f"input_{number}") for number in range(num_inputs)]
    for node in [*placeholder.users]:
        node.replace_all_uses_with(placeholders[node.args[1]])
        graph.erase_node(node)
    graph.erase_node(placeholder)
    return placeholders


@final
class _CoarseTracer(fx.Tracer):
    """Traces only the code of the model itself, of containers and of expanded modules."""

    proxy_buffer_attributes = True  # otherwise, the trace would contain the current buffers as constants

    def __init__(self, cut: PipelineCut) -> None:
        super().__init__()
        self._cut = cut

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is kept as a single call instead of being traced."""
        name = module_qualified_name.removeprefix(_ROOT).removeprefix(".")
        if name in self._cut.unsplit:
            return True
        return bool(name) and type(m).forward is not nn.Sequential.forward and name not in self._cut.expanded


@final
class _FlopCounter(fx.Interpreter):
    """Runs a graph and counts each node's operations. Also records nodes whose results can't be sent to a stage."""

    def __init__(self, root: nn.Module, graph: fx.Graph) -> None:
        super().__init__(root, graph=graph)
        self.operations: dict[str, int] = {}
        self.unsupported: set[str] = set()

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Convert list arguments to plain lists, as in a normal call. Lists in a graph are immutable."""
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return tuple(list(argument) if isinstance(argument, list) else argument for argument in args), kwargs

    def run_node(self, n: fx.Node) -> Any:
        """Run a node and count its operations. Autograd must be disabled: the counter fails on views of weights."""
        with FlopCounterMode(display=False) as counter:
            result = super().run_node(n)
        self.operations[n.name] = counter.get_total_flops()
        if not isinstance(result, Tensor | int):
            self.unsupported.add(n.name)
        return result


def _trace(root: nn.Module, cut: PipelineCut) -> fx.Graph:
    """Trace the model. Raises UntraceableError if its code draws random numbers or creates constant tensors."""
    states = get_rng_states()
    try:
        graph = _CoarseTracer(cut).trace(root)
    except LockstepError:
        raise
    except Exception as error:  # user code can raise any exception when it gets fx proxies
        first = next(iter(str(error).splitlines()), "")
        raise UntraceableError(
            f"its code {_format_error_location(error)} depends on values or shapes of tensors ({type(error).__name__}: "
            f"{first}); {UntraceableError.advice}"
        ) from error
    problem = None
    if get_rng_states() != states:
        problem = "draws random numbers"
    elif any("_tensor_constant" in str(node.target) for node in graph.nodes if node.op == "get_attr"):
        problem = "creates tensors that depend neither on its inputs nor on its weights"
    if problem:
        raise UntraceableError(f"its forward method {problem}; {UntraceableError.advice}")
    return graph


def get_rng_states() -> list[object]:
    """Return the states of the CPU random number generators of PyTorch, NumPy and Python."""
    _, numbers, *rest = np.random.get_state(legacy=True)
    return [bytes(torch.get_rng_state().numpy()), np.asarray(numbers).tobytes(), rest, python_random.getstate()]


def _format_error_location(error: Exception) -> str:
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


def _get_module_name(node: fx.Node) -> str:
    return str(node.target).removeprefix(f"{_ROOT}.")
