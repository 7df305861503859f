"""How fast bytes get to a card, from it and between cards: copies of one size, timed on the device itself."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from typing import Final

import torch
from torch import Tensor

MIB: Final = 256
_HOST: Final = "host"
_ROUNDS: Final = 5


@dataclass(frozen=True)
class Speed:
    """One way of copying. `gb_s`: 10^9 bytes a second, the median of the rounds; None where no time was left for it."""

    source: str
    target: str
    way: str
    gb_s: float | None


def speeds(devices: Sequence[torch.device], limit_s: float, mib: int = MIB) -> Iterator[Speed]:
    """Measure each way of each device, then of each two of them, until the time is over."""
    end = time.monotonic() + limit_s
    for source, target, way in _ways([str(device) for device in devices]):
        in_time = time.monotonic() < end
        yield Speed(source, target, way, _rate(source, target, way == "pinned", mib << 20) if in_time else None)


def _ways(devices: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    for device in devices:
        for way in ("pinned", "pageable") if device.startswith("cuda") else ("pageable",):
            yield _HOST, device, way
            yield device, _HOST, way
        yield device, device, "in itself"
    yield from ((one, other, "") for one, other in permutations(devices, 2))


def _rate(source: str, target: str, pinned: bool, size: int) -> float:
    device = torch.device(target if source == _HOST else source)  # whose stream copies
    copy = partial(_memory(target, pinned, size).copy_, _memory(source, pinned, size), non_blocking=True)
    copy()  # the first one maps memory
    seconds = [_seconds(copy, device) for _ in range(_ROUNDS)]
    return size / statistics.median(seconds) / 1e9


def _memory(place: str, pinned: bool, size: int) -> Tensor:
    """Return memory that was written to: what was not has no pages yet."""
    if place == _HOST:
        return torch.empty(size, dtype=torch.uint8, pin_memory=pinned).fill_(1)
    return torch.empty(size, dtype=torch.uint8, device=place).fill_(1)


def _seconds(copy: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        began = time.perf_counter()
        copy()
        return time.perf_counter() - began
    before, after = torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True)
    stream = torch.cuda.current_stream(device)
    before.record(stream)
    copy()
    after.record(stream)
    after.synchronize()
    return before.elapsed_time(after) / 1e3
