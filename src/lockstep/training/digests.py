"""A digest of each step's summed gradient, and of the weights at each save: the same for every placement.

Each rank works out its part where the gradient is and keeps it there. The parts of many steps are added over the ranks
at once, with a report or a save: that is a message and a write. Where a digest would take more than `PRICE` of a step,
only every k-th step has one.
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

PRICE: Final = 0.005  # of the time of a step, at most
_TOGETHER: Final = 64  # digests that are many
_MEASURED: Final = 8  # digests, before their interval is decided
_LONGEST_INTERVAL: Final = 1 << 12


class Digest(NamedTuple):
    """What was found after `step` updates: of the gradient of the last of them, or of the `weights`."""

    step: int
    value: int  # 64 bits, unsigned
    weights: bool = False


@final
@dataclass(eq=False)
class StepDigests:
    """The digests of a run, of an engine's `gradients`; `write` gets on rank 0 those that are complete, in their order.

    `every` is the interval in steps, None until there is one that keeps the price, of which `note` is told. All
    ranks call each method alike.
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
        self._last = 0.0  # when the last step came by
        self._steps: deque[float] = deque(maxlen=_MEASURED)  # seconds between two
        self._spent: deque[float] = deque(maxlen=_MEASURED)  # seconds of a digest

    def add(self, step: int) -> None:
        """Note the digest of the gradient of the update that makes it `step`, where one is due."""
        if self.every is None:
            now = time.perf_counter()
            self._steps.append(now - self._last)
            self._last = now
        if step % (self.every or 1):
            return
        self._note(step, self.gradients(), weights=False)
        if self.every is None:
            if self.world.device.type == "cuda":  # what it takes is known once it is done
                torch.cuda.synchronize(self.world.device)
            self._spent.append(time.perf_counter() - now)

    def add_weights(self, step: int, weights: NamedTensors) -> None:
        """Note the digest of the weights after `step` updates."""
        self._note(step, weights, weights=True)

    def collect(self, *, waits: bool = False) -> None:
        """Add up the parts of the ranks, and write what they give; one that `waits` does so if there are many."""
        many = 1 if not waits else _MEASURED if self.every is None else _TOGETHER
        if len(self._parts) < many:
            return
        notes, self._parts = self._parts, []
        found = torch.stack([part.to(self.world.device) for *_, part in notes] + [self._wanted_interval()])
        *values, every = self.world.add_(found).tolist()
        if every:
            self.every = every
            self.note(f"digests: of every {every}. step, so that they take at most {PRICE:.1%} of the time\n")
        if self.world.rank == 0:
            summed = zip(notes, values, strict=True)
            self.write([Digest(step, value % (1 << 64), weights) for (step, weights, _), value in summed])

    def _note(self, step: int, tensors: NamedTensors, weights: bool) -> None:
        self._parts.append((step, weights, self._digests.of_model(tensors, self._owned_of(tensors))))

    def _owned_of(self, tensors: NamedTensors) -> frozenset[str]:
        """Return which of the tensors that are whole on every rank are this rank's to digest: its share of elements."""
        names = tuple(tensors)
        if names not in self._owned:
            whole = {name: held.numel() for name, held in tensors.items() if not isinstance(held, Shard)}
            total, before, own = max(1, sum(whole.values())), 0, set()
            for name, length in whole.items():
                middle = before + length / 2  # of a model without elements all are rank 0's
                before += length
                if int(middle * self.world.size / total) == self.world.rank:
                    own.add(name)
            self._owned[names] = frozenset(own)
        return self._owned[names]

    def _wanted_interval(self) -> Tensor:
        """Return on rank 0 the interval at which digests keep the price, once it is known; else 0."""
        every = 0
        if self.world.rank == 0 and self.every is None and len(self._spent) == _MEASURED:
            wanted = median(self._spent) / (PRICE * median(self._steps))
            every = 1
            while every < min(wanted, _LONGEST_INTERVAL):
                every *= 2
        return torch.tensor(every, device=self.world.device)
