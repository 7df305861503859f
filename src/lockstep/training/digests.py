"""Digests of the reduced gradient of each step, and of the weights at each save. They don't depend on the placement.

1. Each rank computes its part of a digest on its device, and keeps the part there.

2. At a report or a save, the parts of many steps are summed over all ranks with a single message and a single write.

3. If the digests would take more than the fraction `PRICE` of the step time, only every k-th step gets a digest.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, NamedTuple, final

import torch
from torch import Tensor

from lockstep.comm.world import World
from lockstep.core.digest import Digests
from lockstep.core.shard import NamedTensors, Shard

PRICE: Final = 0.005  # maximum fraction of the step time
_DIGESTS_PER_MESSAGE: Final = 64  # number of digests that are summed with a single message
_TIMED_DIGESTS: Final = 8  # number of digests that are timed before the interval is chosen
_MAX_INTERVAL: Final = 1 << 12


class Digest(NamedTuple):
    """A digest after `step` updates. It covers the gradient of the last update, or the weights if `weights` is set."""

    step: int
    value: int  # unsigned, 64 bits
    weights: bool = False


@final
@dataclass(eq=False)
class StepDigests:
    """Computes the digests of a run from the `gradients` of an engine.

    Rank 0 calls `write` with the complete digests, in order. `every` is the interval between digests in steps. If it is
    None, the interval is chosen from measurements so that digests take at most the fraction `PRICE` of the step time,
    and `note` is called with a message. All ranks must call each method in the same way.
    """

    world: World
    gradients: Callable[[], NamedTensors]
    write: Callable[[Sequence[Digest]], None]
    every: int | None = None
    note: Callable[[str], object] = str

    def __post_init__(self) -> None:
        self._digests = Digests()
        self._owned: dict[tuple[str, ...], frozenset[str]] = {}
        self._parts: list[tuple[int, bool, Tensor]] = []
        self._last_added = 0.0  # time of the last call of `add`
        self._steps: deque[float] = deque(maxlen=_TIMED_DIGESTS)  # seconds between consecutive steps
        self._digest_seconds: deque[float] = deque(maxlen=_TIMED_DIGESTS)  # seconds per digest

    def add(self, step: int) -> None:
        """Record the digest of the gradient that leads to `step`, if a digest is due at this step."""
        if self.every is None:
            now = time.perf_counter()
            self._steps.append(now - self._last_added)
            self._last_added = now
        if step % (self.every or 1):
            return
        self._note(step, self.gradients(), weights=False)
        if self.every is None:
            if self.world.device.type == "cuda":  # the elapsed time is known only after the kernels have run
                torch.cuda.synchronize(self.world.device)
            self._digest_seconds.append(time.perf_counter() - now)

    def add_weights(self, step: int, weights: NamedTensors) -> None:
        """Record the digest of the weights after `step` updates."""
        self._note(step, weights, weights=True)

    def collect(self, *, waits: bool = False) -> None:
        """Sum the parts over all ranks, and write the digests. With `waits`, only do so if enough are pending."""
        threshold = 1 if not waits else _TIMED_DIGESTS if self.every is None else _DIGESTS_PER_MESSAGE
        if len(self._parts) < threshold:
            return
        notes, self._parts = self._parts, []
        table = torch.stack([part.to(self.world.device) for *_, part in notes] + [self._wanted_interval()])
        *values, every = self.world.add_(table).tolist()
        if every:
            self.every = every
            self.note(f"digests: one every {every} steps, to take at most {PRICE:.1%} of the time\n")
        if self.world.rank == 0:
            summed = zip(notes, values, strict=True)
            self.write([Digest(step, value % (1 << 64), weights) for (step, weights, _), value in summed])

    def _note(self, step: int, tensors: NamedTensors, weights: bool) -> None:
        self._parts.append((step, weights, self._digests.of_model(tensors, self._owned_names(tensors))))

    def _owned_names(self, tensors: NamedTensors) -> frozenset[str]:
        """Return the names of the tensors whose digests this rank computes. Ranks divide the unsharded tensors."""
        names = tuple(tensors)
        if names not in self._owned:
            whole_sizes = {name: value.numel() for name, value in tensors.items() if not isinstance(value, Shard)}
            total, offset, owned = max(1, sum(whole_sizes.values())), 0, set()
            for name, length in whole_sizes.items():
                middle = offset + length / 2  # if all tensors of a model are empty, rank 0 computes their digest
                offset += length
                if int(middle * self.world.size / total) == self.world.rank:
                    owned.add(name)
            self._owned[names] = frozenset(owned)
        return self._owned[names]

    def _wanted_interval(self) -> Tensor:
        """Return the interval that keeps digests within `PRICE`. Return 0 if unknown, and on all ranks except 0."""
        every = 0
        if self.world.rank == 0 and self.every is None and len(self._digest_seconds) == _TIMED_DIGESTS:
            target_interval = median(self._digest_seconds) / (PRICE * median(self._steps))
            every = 1
            while every < min(target_interval, _MAX_INTERVAL):
                every *= 2
        return torch.tensor(every, device=self.world.device)
