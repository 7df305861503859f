"""Rejects forward passes that write to weights, or to buffers that Lockstep doesn't synchronize across ranks.

BatchNorm's running statistics are synchronized (parallel/batchnorm.py). A forward pass in training mode can also write
to or replace other buffers, e.g. a counter, a running mean, or the vectors of spectral_norm. Each rank would then
update the buffer once for each of its own micro-batches, so the model would depend on the number of ranks. The same
applies to writes to weights, e.g. clamp_() under no_grad. In addition, sharded strategies would lose such a write.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final, final

from torch import Tensor, nn

from lockstep.common.user_code import make_refusal
from lockstep.errors import UsageError

_ADVICE: Final = (
    "compute it from the inputs and weights, or make it a running statistic of a BatchNorm; instead of spectral_norm, "
    "divide the weight by torch.linalg.matrix_norm(weight, 2), or use torch's weight_norm"
)
_WEIGHT_ADVICE: Final = (
    "compute with a modified copy, such as weight.clamp(min=0), or let the optimizer update the weight; code outside "
    "a forward pass must not write to weights either"
)
# Check the weights in the first _FIRST_FORWARDS forward passes, and then in every _CHECK_INTERVAL-th forward pass.
_FIRST_FORWARDS: Final = 8
_CHECK_INTERVAL: Final = 16


@final
class BufferGuard:
    """Detects writes to the weights of a model, and to all of its buffers except those in `exempt_buffers`.

    For sharded models, `get_gathered_weights` returns a dict that maps each gathered weight to its sharded parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        exempt_buffers: Collection[Tensor],
        get_gathered_weights: Callable[[], Mapping[Tensor, Tensor]] = dict,
    ) -> None:
        self._parameters: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        self._gathered = get_gathered_weights
        self._forwards = 0
        self._no_check = nullcontext()
        exempt_ids = {id(buffer) for buffer in exempt_buffers}
        self._modules = dict(model.named_modules())
        self._buffers = [module._buffers for module in self._modules.values()]
        self._locations = [
            (path, module, name)
            for path, module in self._modules.items()
            for name, buffer in module._buffers.items()
            if id(buffer) not in exempt_ids
        ]
        self._names = self._get_buffer_names()
        # Without buffers to compare, a checker has no state, so all forward passes share it.
        self._stateless_checker = None if self._locations else _BufferChecker(self)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Raise UsageError if a forward pass in the `with` block writes to a weight or changes a buffer."""
        with self.watch_weights(), self.watch_buffers():
            yield

    def watch_weights(self) -> AbstractContextManager[None]:
        """Raise UsageError if the forward pass in the `with` block writes to a weight. Only some passes are checked."""
        self._forwards += 1
        if self._forwards <= _FIRST_FORWARDS or not self._forwards % _CHECK_INTERVAL:
            return self._compare_weights()
        return self._no_check

    @contextmanager
    def _compare_weights(self) -> Iterator[None]:
        versions = {tensor: tensor._version for tensor in (*self._parameters, *self._gathered())}
        yield
        for tensor, version in versions.items():
            if tensor._version != version:
                parameter = tensor if tensor in self._parameters else self._gathered()[tensor]
                raise UsageError(f"the forward pass writes to weight {self._parameters[parameter]}; {_WEIGHT_ADVICE}")

    def watch_buffers(self) -> "_BufferChecker":
        """Raise UsageError if the forward pass in the `with` block writes to, replaces, adds or removes a buffer."""
        return self._stateless_checker or _BufferChecker(self)

    def _get_buffer_states(self) -> list[tuple[Tensor | None, int]]:
        return [_get_buffer_state(module._buffers.get(name)) for _, module, name in self._locations]

    def _check_buffers(self, states: Sequence[tuple[Tensor | None, int]]) -> None:
        if sum(map(len, self._buffers)) != len(self._names):
            path, name = min(self._get_buffer_names() ^ self._names)
            raise _make_buffer_error(path, self._modules[path], name)
        for (path, module, name), (buffer, version) in zip(self._locations, states, strict=False):
            current, current_version = _get_buffer_state(module._buffers.get(name))
            if current is not buffer or current_version != version:
                raise _make_buffer_error(path, module, name)

    def _get_buffer_names(self) -> set[tuple[str, str]]:
        return {(path, name) for path, module in self._modules.items() for name in module._buffers}


@final
class _BufferChecker:
    """Compares the buffers before and after a forward pass, to detect changes.

    This is a class instead of a generator-based context manager, which would add 3 us to every micro-batch.
    """

    def __init__(self, guard: BufferGuard) -> None:
        self._guard = guard

    def __enter__(self) -> None:
        self._states = self._guard._get_buffer_states()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._guard._check_buffers(self._states)


def _make_buffer_error(module_name: str, module: nn.Module, buffer_name: str) -> Exception:
    kind = type(module)
    if kind.__name__.startswith("FSDP") and len(kind.__bases__) == 2:
        # fully_shard replaces the class of a module with a subclass. Report the original class.
        kind = kind.__bases__[1]
    return make_refusal(
        f"the forward pass changes buffer {module_name}{'.' if module_name else ''}{buffer_name} of {kind.__name__}, "
        "so each process would change it based on its own micro-batches",
        _ADVICE,
    )


def _get_buffer_state(buffer: Tensor | None) -> tuple[Tensor | None, int]:
    return buffer, 0 if buffer is None else buffer._version
