"""Computes digests of the reduced gradient of each step, and of the weights at each save.

The digests don't depend on the placement. They are computed as follows:

1. Each rank computes a partial digest on its device, and keeps it there.

2. At a report or a save, the partial digests of many steps are summed over all ranks with a single all-reduce. Then
rank 0 writes the digests.

3. If computing the digests takes more than `MAX_TIME_FRACTION` of the step time, only every k-th step gets a digest.
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

MAX_TIME_FRACTION: Final = 0.005  # maximum fraction of the step time that digests may take
_MAX_PENDING_DIGESTS: Final = 64  # once this many digests are pending, the next report sums them over the ranks
_TIMED_DIGESTS: Final = 8  # number of digests that are timed before the interval is chosen
_MAX_INTERVAL: Final = 1 << 12


class Digest(NamedTuple):
    """A digest after `step` updates: of the gradient of the last update or, if `is_weights` is set, of the weights."""

    step: int
    value: int  # unsigned, 64 bits
    is_weights: bool = False


@final
@dataclass(eq=False)
class StepDigests:
    """Computes the digests of a run. All ranks must make the same calls.

    - `gradients`: Returns the reduced gradients of the engine.
    - `write`: Called on rank 0 with the complete digests, in the order of their steps.
    - `interval`: The number of steps from one digest to the next. If it is None, the interval is chosen from
      measurements, so that digests take at most `MAX_TIME_FRACTION` of the step time.
    - `report`: Called with a message once the interval has been chosen.
    """

    world: World
    gradients: Callable[[], NamedTensors]
    write: Callable[[Sequence[Digest]], None]
    interval: int | None = None
    report: Callable[[str], object] = str

    def __post_init__(self) -> None:
        self._digests = Digests()
        self._assigned_names_cache: dict[tuple[str, ...], frozenset[str]] = {}
        self._pending: list[tuple[int, bool, Tensor]] = []
        self._last_added = 0.0  # time of the previous call to `add`
        self._step_seconds: deque[float] = deque(maxlen=_TIMED_DIGESTS)  # seconds between consecutive steps
        self._digest_seconds: deque[float] = deque(maxlen=_TIMED_DIGESTS)  # seconds per digest

    def add(self, step: int) -> None:
        """Add the digest of the gradient of `step`, counted from 1, if a digest is due."""
        if self.interval is None:
            now = time.perf_counter()
            self._step_seconds.append(now - self._last_added)
            self._last_added = now
        if step % (self.interval or 1):
            return
        self._add_digest(step, self.gradients(), is_weights=False)
        if self.interval is None:
            if self.world.device.type == "cuda":  # the elapsed time is known only after the kernels have run
                torch.cuda.synchronize(self.world.device)
            self._digest_seconds.append(time.perf_counter() - now)

    def add_weights(self, step: int, weights: NamedTensors) -> None:
        """Add the digest of the weights after `step` updates."""
        self._add_digest(step, weights, is_weights=True)

    def collect(self, *, only_if_enough: bool = False) -> None:
        """Sum the pending digests over all ranks, and write them on rank 0.

        If `only_if_enough` is set and only a few digests are pending, they are kept for a later call.
        """
        threshold = 1 if not only_if_enough else _TIMED_DIGESTS if self.interval is None else _MAX_PENDING_DIGESTS
        if len(self._pending) < threshold:
            return
        pending, self._pending = self._pending, []
        table = torch.stack([part.to(self.world.device) for *_, part in pending] + [self._choose_interval()])
        *values, every = self.world.add_(table).tolist()
        if every:
            self.interval = every
            self.report(f"digests: one every {every} steps, to take at most {MAX_TIME_FRACTION:.1%} of the time\n")
        if self.world.rank == 0:
            summed = zip(pending, values, strict=True)
            self.write([Digest(step, value % (1 << 64), is_weights) for (step, is_weights, _), value in summed])

    def _add_digest(self, step: int, tensors: NamedTensors, is_weights: bool) -> None:
        self._pending.append((step, is_weights, self._digests.digest_model(tensors, self._get_assigned_names(tensors))))

    def _get_assigned_names(self, tensors: NamedTensors) -> frozenset[str]:
        """Return the names of the unsharded tensors whose digests are computed on this rank only."""
        names = tuple(tensors)
        if names not in self._assigned_names_cache:
            whole_sizes = {name: value.numel() for name, value in tensors.items() if not isinstance(value, Shard)}
            total, offset, assigned = max(1, sum(whole_sizes.values())), 0, set()
            for name, length in whole_sizes.items():
                middle = offset + length / 2  # if all tensors of a model are empty, rank 0 computes their digest
                offset += length
                if int(middle * self.world.size / total) == self.world.rank:
                    assigned.add(name)
            self._assigned_names_cache[names] = frozenset(assigned)
        return self._assigned_names_cache[names]

    def _choose_interval(self) -> Tensor:
        """Return the interval in steps at which digests take at most `MAX_TIME_FRACTION` of the step time.

        Returns 0 if too few digests have been timed, and on all ranks except rank 0.
        """
        every = 0
        if self.world.rank == 0 and self.interval is None and len(self._digest_seconds) == _TIMED_DIGESTS:
            target_interval = median(self._digest_seconds) / (MAX_TIME_FRACTION * median(self._step_seconds))
            every = 1
            while every < min(target_interval, _MAX_INTERVAL):
                every *= 2
        return torch.tensor(every, device=self.world.device)
