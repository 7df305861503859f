"""Golden cases of every collective: what each rank should receive is worked out from the ranks' numbers alone.

Values are small whole numbers, so that sums are exact in every dtype and in any order. A case is the same call on all
ranks; the results are compared bit for bit.
"""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.peer_errors import translate_peer_errors
from lockstep.comm.world import World

DTYPES: Final = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8)
_COUNTS: Final = (1, 1031)  # elements: fewer than there are ranks, and no multiple of any number of them
_LARGE: Final = 1 << 16  # of one case: over a link of 1 Mbit/s it takes seconds
# Beyond this rank narrow dtypes get zeros, since 64 * 3 is exact in all of them.
_NARROW: Final[dict[torch.dtype, int]] = {torch.float16: 64, torch.bfloat16: 64, torch.uint8: 64}
# What a conversion to 32 bits on the way would lose.
_UNIT: Final[dict[torch.dtype, float]] = {torch.int64: 2**40 + 1, torch.float64: 1 + 2**-40}
_REFUSALS: Final = ("not support", "unsupported", "not implemented", "Invalid scalar type")

Received = list[tuple[Tensor, Tensor]]  # what came, and what should have


@dataclass(frozen=True)
class GoldenCase:
    """One call of a collective, as one rank makes it."""

    rank: int
    size: int
    dtype: torch.dtype
    count: int
    device: torch.device
    root: int = 0

    def values(self, rank: int, to: int = 0, count: int | None = None) -> Tensor:
        """Return what `rank` sends, to rank `to` where each gets its own."""
        if rank >= _NARROW.get(self.dtype, rank + 1):
            return self.empty(count)
        number = torch.arange(self.count if count is None else count)
        small = (3 * number + 5 * rank + 7 * to + number // 11) % 4
        return small.to(self.dtype).mul_(_UNIT.get(self.dtype, 1)).to(self.device)

    def empty(self, count: int | None = None) -> Tensor:
        """Return zeros, to receive into."""
        return torch.zeros(self.count if count is None else count, dtype=self.dtype, device=self.device)

    def sum(self, to: int = 0) -> Tensor:
        """Return the sum of what all ranks send."""
        return torch.stack([self.values(rank, to) for rank in range(self.size)]).sum(0, dtype=self.dtype)

    def every(self, to: int = 0) -> list[Tensor]:
        """Return what each rank sends, by rank."""
        return [self.values(rank, to) for rank in range(self.size)]


@dataclass
class Golden:
    """What came of the cases on one rank: how many were tried of each collective, which were wrong, and which refused.

    A backend may refuse a collective or a dtype, which is no fault.
    """

    tried: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


def run_golden_cases(world: World, step: Callable[[], None] = lambda: None) -> Golden:
    """Try all cases; all ranks call it. `step` is called before each."""
    golden = Golden()
    if world.size == 1:
        return golden
    _barrier(world, golden, step)
    for name, collective, case in _cases(world):
        step()
        # Torch 2.14 warns of names that 2.11 to 2.15 have.
        with translate_peer_errors(), warnings.catch_warnings(action="ignore", category=FutureWarning):
            try:
                received = collective(case)
            except (RuntimeError, ValueError, TypeError) as error:  # before anything was sent: on all ranks alike
                if not any(sign in str(error) for sign in _REFUSALS):
                    raise
                golden.refused.append(f"{name} of {_words(case)}")
                continue
        golden.tried[name] = golden.tried.get(name, 0) + 1
        faults = [fault for came, expected in received if (fault := _fault(came, expected))]
        golden.wrong += [f"{name} of {_words(case)}: {faults[0]}"] if faults else []
    return golden


def _cases(world: World) -> Iterator[tuple[str, Callable[[GoldenCase], Received], GoldenCase]]:
    for device in {torch.device("cpu"), world.device if world.backend == "nccl" else torch.device("cpu")}:
        yield "all_reduce", _all_reduce, GoldenCase(world.rank, world.size, torch.float32, _LARGE, device)
        for name, collective, rooted in _COLLECTIVES:
            roots = sorted({0, world.size - 1}) if rooted else [0]
            for dtype in DTYPES:
                for count in _COUNTS:
                    for root in roots:
                        yield name, collective, GoldenCase(world.rank, world.size, dtype, count, device, root)


def _all_reduce(case: GoldenCase) -> Received:
    added, greatest = case.values(case.rank), case.values(case.rank)
    dist.all_reduce(added)
    dist.all_reduce(greatest, dist.ReduceOp.MAX)
    return [(added, case.sum()), (greatest, torch.stack(case.every()).amax(0))]


def _all_gather(case: GoldenCase) -> Received:
    listed, whole = [case.empty() for _ in range(case.size)], case.empty(case.size * case.count)
    dist.all_gather(listed, case.values(case.rank))
    dist.all_gather_into_tensor(whole, case.values(case.rank))
    return [*zip(listed, case.every(), strict=True), (whole, torch.cat(case.every()))]


def _broadcast(case: GoldenCase) -> Received:
    tensor = case.values(case.rank)
    dist.broadcast(tensor, case.root)
    return [(tensor, case.values(case.root))]


def _reduce(case: GoldenCase) -> Received:
    tensor = case.values(case.rank)
    dist.reduce(tensor, case.root)
    return [(tensor, case.sum())] if case.rank == case.root else []  # elsewhere anything may be in it


def _scatter(case: GoldenCase) -> Received:
    tensor = case.empty()
    sent = [case.values(case.root, rank) for rank in range(case.size)] if case.rank == case.root else None
    dist.scatter(tensor, sent, case.root)
    return [(tensor, case.values(case.root, case.rank))]


def _gather(case: GoldenCase) -> Received:
    listed = [case.empty() for _ in range(case.size)] if case.rank == case.root else None
    dist.gather(case.values(case.rank), listed, case.root)
    return [] if listed is None else [*zip(listed, case.every(), strict=True)]


def _reduce_scatter(case: GoldenCase) -> Received:
    listed, whole = case.empty(), case.empty()
    sent = [case.values(case.rank, rank) for rank in range(case.size)]
    dist.reduce_scatter(listed, sent)
    dist.reduce_scatter_tensor(whole, torch.cat(sent))
    return [(listed, case.sum(case.rank)), (whole, case.sum(case.rank))]


def _all_to_all(case: GoldenCase) -> Received:
    """Exchange lists of equal tensors, which gloo has since torch 2.13."""
    listed = [case.empty() for _ in range(case.size)]
    dist.all_to_all(listed, [case.values(case.rank, rank) for rank in range(case.size)])
    return [*zip(listed, case.every(case.rank), strict=True)]


def _all_to_all_single(case: GoldenCase) -> Received:
    """Exchange parts of one tensor whose sizes differ, some of them empty."""

    def part(source: int, target: int) -> Tensor:
        return case.values(source, target, (source + 2 * target) % 3 * case.count)

    sent = [part(case.rank, rank) for rank in range(case.size)]
    expected = [part(rank, case.rank) for rank in range(case.size)]
    whole = case.empty(sum(map(len, expected)))
    dist.all_to_all_single(whole, torch.cat(sent), [*map(len, expected)], [*map(len, sent)])
    return [(whole, torch.cat(expected))]


def _send_recv(case: GoldenCase) -> Received:
    """Send to the next rank, and receive from the one before, as many elements more as the sender's number."""
    before, after = (case.rank - 1) % case.size, (case.rank + 1) % case.size
    tensor = case.empty(case.count + before)
    sent = case.values(case.rank, count=case.count + case.rank)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, tensor, before)])
    for work in works:
        work.wait()
    return [(tensor, case.values(before, count=case.count + before))]


def _barrier(world: World, golden: Golden, step: Callable[[], None]) -> None:
    """Count at the store who has come: after the barrier it must be all, though the last rank comes late."""
    store = world.own_store("golden barrier")
    step()
    golden.tried["barrier"] = 1
    if world.rank == world.size - 1:
        time.sleep(0.02)
    store.add("came", 1)
    with translate_peer_errors():
        dist.barrier()
    came = store.add("came", 0)
    if came < world.size:
        golden.wrong.append(f"barrier: left when {came} of {world.size} ranks had come")


_COLLECTIVES: Final[Sequence[tuple[str, Callable[[GoldenCase], Received], bool]]] = (
    ("all_reduce", _all_reduce, False),
    ("all_gather", _all_gather, False),
    ("broadcast", _broadcast, True),
    ("reduce", _reduce, True),
    ("scatter", _scatter, True),
    ("gather", _gather, True),
    ("reduce_scatter", _reduce_scatter, False),
    ("all_to_all", _all_to_all, False),
    ("all_to_all_single", _all_to_all_single, False),
    ("send/recv", _send_recv, False),
)


def _words(case: GoldenCase) -> str:
    return f"{case.count:,} {str(case.dtype).removeprefix('torch.')} on {case.device.type}"


def _fault(came: Tensor, expected: Tensor) -> str:
    """Return where a result is wrong; "" where it is not."""
    if torch.equal(came, expected):
        return ""
    unlike = (came != expected).nonzero().flatten()
    first = int(unlike[0])
    number: Any = came[first].item()
    return f"element {first} is {number:g}, not {expected[first].item():g}; {len(unlike):,} of {len(came):,} differ"
