"""The process groups of a world in torch.distributed, and their carriers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Literal, Self, final

import torch.distributed as dist
from torch import Tensor

from lockstep.comm.carrier import Carrier, direct, renumbered
from lockstep.comm.message_log import MessageLog
from lockstep.comm.peer_errors import translate_peer_errors


@final
@dataclass(eq=False)
class ProcessGroups:
    """Two groups of all ranks of a world, and the groups of its parts, which are created once per use.

    This thread uses `main`, and a side stream uses `side`, so both can communicate at the same time. `backends` is set
    if the default process group belongs to other code and stays unchanged. New groups then use these backends.
    """

    main: dist.ProcessGroup
    side: dist.ProcessGroup
    timeout: timedelta | None = None
    carry: Callable[[dist.ProcessGroup], Carrier] = direct
    backend: Literal["nccl", "gloo"] = "gloo"
    backends: str | None = None
    numbers: Sequence[int] = ()  # ranks in torch.distributed, if they differ from those of the world
    log: MessageLog | None = None  # records the messages of all ranks and of parts, but not those of `among`
    _parts: dict[tuple[bool, str], dist.ProcessGroup] = field(default_factory=dict, init=False)

    def new(self, ranks: Sequence[int]) -> Any:
        """Create a group of these ranks. All ranks of the world call it."""
        return dist.new_group([self.number(rank) for rank in ranks], timeout=self.timeout, backend=self.backends)

    def part(self, parts: list[list[int]], ranks: list[int], side_stream: bool) -> dist.ProcessGroup:
        """Return the group of `ranks`, this rank's part in `parts`, for a side stream or for this thread."""
        if len(parts) == 1:
            return self.side if side_stream else self.main
        key = side_stream, str(parts)
        if key not in self._parts:
            self._parts[key] = self._make(parts, ranks)
        return self._parts[key]

    def among(self, parts: list[list[int]], ranks: list[int]) -> Self:
        """Return the groups of a separate world of `ranks`, this rank's part in `parts`. All ranks call it."""
        group = self._make(parts, ranks)
        return replace(self, main=group, side=group, numbers=self._order(ranks), log=None)

    def _make(self, parts: list[list[int]], own_ranks: list[int]) -> dist.ProcessGroup:
        """Create a group for each part, as all ranks must, and return that of this rank."""
        groups = [self.new(ranks) for ranks in parts]
        group = groups[parts.index(own_ranks)]
        assert isinstance(group, dist.ProcessGroup)
        return group

    def number(self, rank: int) -> int:
        """Return the rank in torch.distributed of a rank of the world."""
        return self.numbers[rank] if self.numbers else rank

    def carrier(self, group: dist.ProcessGroup, ranks: Sequence[int], label: str) -> Carrier:
        """Return the carrier in the group of `ranks`, numbered as in the world."""
        carrier = self.carry(group)
        if order := self._order(ranks):
            carrier = renumbered(carrier, order)
        return carrier if self.log is None else self.log.watch(carrier, label, ranks)

    def _order(self, ranks: Sequence[int]) -> list[int]:
        """Return the torch group rank of each of `ranks`, or an empty list if these are in order."""
        numbers = [self.numbers[rank] for rank in ranks] if self.numbers else []
        positions = {number: position for position, number in enumerate(sorted(numbers))}
        return [positions[number] for number in numbers]

    def add_(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the ranks in place."""
        with translate_peer_errors():
            dist.all_reduce(tensor, group=self.main)
        return tensor

    def close(self) -> None:
        """Destroy the process group, or only Lockstep's groups if the script opened it. No-op if it is already gone."""
        if not dist.is_initialized():
            return
        if self.backends is None:
            dist.destroy_process_group()
            return
        for group in (self.main, self.side, *self._parts.values()):
            dist.destroy_process_group(group)
