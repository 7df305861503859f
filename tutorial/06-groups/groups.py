# $ torchrun --standalone --nproc-per-node=4 tutorial/06-groups/groups.py
"""Groups of some of the ranks, by the two rules: all ranks make all groups, and only members use one."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def own_group(partition: Sequence[Sequence[int]]) -> Any:
    """Make a group of each part of the world, and return the one that this rank is in."""
    # Rule 1: every rank makes every group, in the same order, those that it will not be in too.
    groups = [dist.new_group(list(ranks)) for ranks in partition]
    return next(group for group, ranks in zip(groups, partition, strict=True) if dist.get_rank() in ranks)


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = [range(first, min(first + 2, size)) for first in range(0, size, 2)]  # 0 1 | 2 3
    columns = [range(first, size, 2) for first in range(min(2, size))]  # 0 2 | 1 3
    row, column = own_group(rows), own_group(columns)

    # Rule 2: only members use a group, and all of them do.
    over_row, over_column = torch.tensor(rank), torch.tensor(rank)
    dist.all_reduce(over_row, group=row)
    dist.all_reduce(over_column, group=column)
    in_row, in_column = list(rows[rank // 2]), list(columns[rank % 2])
    assert over_row.item() == sum(in_row)
    assert over_column.item() == sum(in_column)
    print(f"rank {rank}: row {in_row} sums to {over_row}, column {in_column} to {over_column}")

    # A source is a global rank, unless it is given as a rank of the group.
    first = torch.tensor(rank)
    dist.broadcast(first, group=row, group_src=0)
    assert first.item() == dist.get_global_rank(row, 0) == in_row[0]

    # Who is no member has no group, and a collective on that changes nothing.
    first_row: Any = dist.new_group(list(rows[0]))
    number = torch.tensor(rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch does warn
        dist.all_reduce(number, group=first_row)
    if rank not in rows[0]:
        assert first_row == dist.GroupMember.NON_GROUP_MEMBER
        assert number.item() == rank
        print(f"rank {rank}: an all_reduce of the others left {number} as it was")

    # Another backend: a group on gloo for what lies in CPU memory, beside a world that may be NCCL's.
    on_cpu: Any = dist.new_group(backend="gloo")
    dist.barrier(group=on_cpu)
    assert dist.get_backend(on_cpu) == "gloo"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
