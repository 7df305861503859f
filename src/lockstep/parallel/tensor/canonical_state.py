"""An engine wrapper that saves and loads the state of a chunked model in the layout of the original model."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import final

from torch import Size, Tensor

from lockstep.core.shard import ChunkLayout, MaybeSharded, NamedTensors, Shard
from lockstep.parallel.engine import Engine, State


@final
class CanonicalState:
    """Wraps `engine`. Converts the parameters in `chunk_layouts` and their optimizer state to the original layout."""

    def __init__(self, engine: Engine, chunk_layouts: Mapping[str, ChunkLayout]) -> None:
        self._engine = engine
        self._chunked = chunk_layouts
        self.forward_backward, self.update = engine.forward_backward, engine.update
        self.evaluation, self.close = engine.evaluation, engine.close

    @property
    def audited(self) -> int:
        """The number of steps for which the engine's audits passed."""
        return getattr(self._engine, "audited", 0)

    def gradients(self) -> dict[str, MaybeSharded]:
        """See Engine."""
        return self._restore(self._engine.gradients())

    def state(self) -> State:
        """See Engine."""
        return _map_state(self._engine.state(), self._restore)

    def load(self, state: State) -> None:
        """See Engine."""
        self._engine.load(_map_state(state, self._rearrange))

    def _restore(self, tensors: NamedTensors) -> dict[str, MaybeSharded]:
        canonical = dict(tensors)
        for name, tensor in tensors.items():
            chunked = self._find_chunked(name)
            if chunked is None or tensor.shape.numel() != prod(chunked.shape):  # e.g. a step counter
                continue
            if isinstance(tensor, Shard):
                canonical[name] = replace(tensor, shape=Size(chunked.shape), chunked=chunked)
            else:
                canonical[name] = chunked.from_rows(tensor)
        return canonical

    def _rearrange(self, tensors: NamedTensors) -> dict[str, MaybeSharded]:
        rows = dict(tensors)
        for name, tensor in tensors.items():
            chunked = self._find_chunked(name)
            if chunked is not None and isinstance(tensor, Tensor) and tensor.shape == chunked.shape:
                rows[name] = chunked.to_rows(tensor)
        return rows

    def _find_chunked(self, name: str) -> ChunkLayout | None:
        """Return how a parameter or its optimizer slot (`PARAMETER/SLOT`) is chunked, or None if it isn't chunked."""
        return self._chunked.get(name) or self._chunked.get(name.rpartition("/")[0])


def _map_state(state: State, convert: Callable[[NamedTensors], dict[str, MaybeSharded]]) -> State:
    ema = None if state.ema is None else convert(state.ema)
    return replace(state, model=convert(state.model), optimizer=convert(state.optimizer), ema=ema)
