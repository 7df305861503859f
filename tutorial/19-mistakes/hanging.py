# $ torchrun --standalone --nproc-per-node=4 tutorial/19-mistakes/hanging.py
"""Mistakes that let ranks wait for each other, pass each other, or share a device: each shown failing, then fixed."""

import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line)


def not_reached_by_all() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    impatient: Any = dist.new_group(timeout=timedelta(seconds=2))  # the default is 30 minutes with gloo
    loss = torch.tensor(1.0)
    if rank == 0 and size > 1:
        try:
            dist.all_reduce(loss, group=impatient)  # to print it: but the others never come
        except RuntimeError as error:
            if "imed out" not in str(error):
                raise
            say("all_reduce inside `if rank == 0`: an error after the group's timeout")
        else:
            raise AssertionError("the others did come")
    dist.barrier()
    loss = torch.tensor(1.0)
    dist.all_reduce(loss)  # all ranks come here
    assert loss.item() == size
    say(f"  all_reduce before the `if`: {loss.item():g}")


def barrier_on_the_wrong_group(folder: Path) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = [list(range(first, min(first + 2, size))) for first in range(0, size, 2)]
    groups: list[Any] = [dist.new_group(ranks) for ranks in rows]
    for name, group in (("of its row", groups[rank // 2]), ("of the world", None)):
        path = folder / name
        dist.barrier()
        if rank == 0:
            time.sleep(2)  # preparing data takes time
            path.touch()
        dist.barrier(group=group)  # "nobody reads before rank 0 has written"
        found = torch.tensor(int(path.exists()))
        dist.all_reduce(found)
        assert found.item() == (size if group is None else len(rows[0]))
        say(f"{'  ' if group is None else ''}barrier {name}: {found.item()} of {size} ranks found rank 0's file")


def rank_modulo_devices() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    devices, node = 2, rank % 2  # two nodes of two devices, to which ranks were dealt out in turn: 0 2 | 1 3
    own = torch.tensor([node, rank % devices])
    everyone = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(everyone, own)
    used = {tuple(each.tolist()) for each in everyone}
    assert len(used) == min(size, 2)
    say(f"rank % devices: {size} ranks on {len(used)} devices")
    nodes = [int(each[0]) for each in everyone]
    local_rank = nodes[:rank].count(node)  # the ranks before this one on its node; launchers set it as LOCAL_RANK
    own = torch.tensor([node, local_rank])
    dist.all_gather(everyone, own)
    used = {tuple(each.tolist()) for each in everyone}
    assert len(used) == size
    say(f"  local rank: {size} ranks on {len(used)} devices")


def main() -> None:
    dist.init_process_group("gloo")
    not_reached_by_all()
    with tempfile.TemporaryDirectory() as own:
        folders: list[str | None] = [own]
        dist.broadcast_object_list(folders, src=0)  # rank 0's, for all
        barrier_on_the_wrong_group(Path(str(folders[0])))
    rank_modulo_devices()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
