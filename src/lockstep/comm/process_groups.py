"""The process groups of a world in torch.distributed, with their carriers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Literal, Self, final

import torch.distributed as dist
from torch import Tensor

from lockstep.comm.carrier import Carrier, direct_carrier, renumber_ranks
from lockstep.comm.message_log import MessageLog
from lockstep.comm.peer_errors import translate_peer_errors


@final
@dataclass(eq=False)
class ProcessGroups:
    """Two process groups of all ranks of a world, and groups of subsets of the ranks, which are cached.

    The main thread uses `main` and a side stream uses `side`, so both can communicate at the same time. If user code
    created the default process group, the default group isn't used, and `backends` sets the backends of new groups.
    """

    main: dist.ProcessGroup
    side: dist.ProcessGroup
    timeout: timedelta | None = None
    make_carrier: Callable[[dist.ProcessGroup], Carrier] = direct_carrier
    backend: Literal["nccl", "gloo"] = "gloo"
    backends: str | None = None
    numbers: Sequence[int] = ()  # maps ranks of the world to ranks in torch.distributed, if they differ
    log: MessageLog | None = None  # records the messages in all groups except the groups of `split`
    _subgroups: dict[tuple[bool, str], dist.ProcessGroup] = field(default_factory=dict, init=False)

    def new_group(self, ranks: Sequence[int]) -> Any:
        """Create a group of `ranks`. All ranks of the world must call this method."""
        return dist.new_group([self.to_torch_rank(rank) for rank in ranks], timeout=self.timeout, backend=self.backends)

    def get_subgroup(self, parts: list[list[int]], ranks: list[int], side_stream: bool) -> dist.ProcessGroup:
        """Return the group of `ranks`, this rank's entry in `parts`, for a side stream or for the main thread."""
        if len(parts) == 1:
            return self.side if side_stream else self.main
        key = side_stream, str(parts)
        if key not in self._subgroups:
            self._subgroups[key] = self._create_subgroups(parts, ranks)
        return self._subgroups[key]

    def split(self, parts: list[list[int]], ranks: list[int]) -> Self:
        """Return new process groups for `ranks`, this rank's entry in `parts`. All ranks must call this method."""
        group = self._create_subgroups(parts, ranks)
        return replace(self, main=group, side=group, numbers=self._group_ranks(ranks), log=None)

    def _create_subgroups(self, parts: list[list[int]], own_ranks: list[int]) -> dist.ProcessGroup:
        """Create the groups of all parts, because all ranks must create all groups. Returns the group of this rank."""
        groups = [self.new_group(ranks) for ranks in parts]
        group = groups[parts.index(own_ranks)]
        assert isinstance(group, dist.ProcessGroup)
        return group

    def to_torch_rank(self, rank: int) -> int:
        """Convert a rank of the world to a rank of torch.distributed."""
        return self.numbers[rank] if self.numbers else rank

    def make_group_carrier(self, group: dist.ProcessGroup, ranks: Sequence[int], label: str) -> Carrier:
        """Return a carrier for the group of `ranks`. Peers are numbered by their position in `ranks`."""
        carrier = self.make_carrier(group)
        if order := self._group_ranks(ranks):
            carrier = renumber_ranks(carrier, order)
        return carrier if self.log is None else self.log.watch(carrier, label, ranks)

    def _group_ranks(self, ranks: Sequence[int]) -> list[int]:
        """Return the torch group rank of each rank in `ranks`, or [] if the numbering is the same."""
        numbers = [self.numbers[rank] for rank in ranks] if self.numbers else []
        positions = {number: position for position, number in enumerate(sorted(numbers))}
        return [positions[number] for number in numbers]

    def add_(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the ranks in place."""
        with translate_peer_errors():
            dist.all_reduce(tensor, group=self.main)
        return tensor

    def close(self) -> None:
        """Destroy the default process group, or only Lockstep's groups if the script created the default group.

        This is a no-op if the default process group is already destroyed.
        """
        if not dist.is_initialized():
            return
        if self.backends is None:
            dist.destroy_process_group()
            return
        for group in (self.main, self.side, *self._subgroups.values()):
            dist.destroy_process_group(group)
