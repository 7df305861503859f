"""The process groups of a world in torch.distributed, with their carriers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Literal, Self, final

import torch.distributed as dist
from torch import Tensor

from lockstep.comm.carrier import Carrier, make_direct_carrier, renumber_ranks
from lockstep.comm.message_log import MessageLog
from lockstep.comm.peer_errors import translate_peer_errors


@final
@dataclass(eq=False)
class ProcessGroups:
    """Two process groups of all ranks of a world, and a cache of groups of subsets of the ranks.

    The main thread uses the group `main`, and a side stream uses `side`, so both can communicate at the same time. If
    user code created the default process group, Lockstep doesn't use it, and creates new groups with these `backends`.
    """

    main: dist.ProcessGroup
    side: dist.ProcessGroup
    timeout: timedelta | None = None
    make_carrier: Callable[[dist.ProcessGroup], Carrier] = make_direct_carrier
    backend: Literal["nccl", "gloo"] = "gloo"
    backends: str | None = None
    torch_ranks: Sequence[int] = ()  # rank in torch.distributed of each rank of the world, if they differ
    log: MessageLog | None = None  # records the messages in all groups except those of `split`
    _subgroups: dict[tuple[bool, str], dist.ProcessGroup] = field(default_factory=dict, init=False)

    def new_group(self, ranks: Sequence[int]) -> Any:
        """Create a group of `ranks`. All ranks of the world must call this method."""
        return dist.new_group([self.to_torch_rank(rank) for rank in ranks], timeout=self.timeout, backend=self.backends)

    def get_subgroup(self, rank_groups: list[list[int]], ranks: list[int], side_stream: bool) -> dist.ProcessGroup:
        """Return the process group of `ranks`, this rank's entry in `rank_groups`. Creates it on first use.

        If `side_stream` is set, the group is for a side stream. Otherwise, it is for the main thread.
        """
        if len(rank_groups) == 1:
            return self.side if side_stream else self.main
        key = side_stream, str(rank_groups)
        if key not in self._subgroups:
            self._subgroups[key] = self._create_subgroups(rank_groups, ranks)
        return self._subgroups[key]

    def split(self, rank_groups: list[list[int]], ranks: list[int]) -> Self:
        """Create process groups for a world of `ranks`, this rank's entry in `rank_groups`.

        All ranks must call this.
        """
        group = self._create_subgroups(rank_groups, ranks)
        return replace(self, main=group, side=group, torch_ranks=self._get_group_ranks(ranks), log=None)

    def _create_subgroups(self, rank_groups: list[list[int]], own_ranks: list[int]) -> dist.ProcessGroup:
        """Create the groups of all `rank_groups`, as torch requires on each rank. Returns the group of this rank."""
        groups = [self.new_group(ranks) for ranks in rank_groups]
        group = groups[rank_groups.index(own_ranks)]
        assert isinstance(group, dist.ProcessGroup)
        return group

    def to_torch_rank(self, rank: int) -> int:
        """Convert a rank of the world to a rank of torch.distributed."""
        return self.torch_ranks[rank] if self.torch_ranks else rank

    def make_group_carrier(self, group: dist.ProcessGroup, ranks: Sequence[int], label: str) -> Carrier:
        """Return a carrier for the process group of `ranks`. Its peers are indices into `ranks`."""
        carrier = self.make_carrier(group)
        if order := self._get_group_ranks(ranks):
            carrier = renumber_ranks(carrier, order)
        return carrier if self.log is None else self.log.watch(carrier, label, ranks)

    def _get_group_ranks(self, ranks: Sequence[int]) -> list[int]:
        """Return the group rank of each rank in `ranks`, or [] if these are 0, 1, 2, ... in order."""
        numbers = [self.torch_ranks[rank] for rank in ranks] if self.torch_ranks else []
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
