# $ torchrun --standalone --nproc-per-node=3 tutorial/04-process-groups/process_group.py
"""Join the processes of a run into a process group, choose a device, and add a number over all of them."""

import os

import torch
import torch.distributed as dist


def main() -> None:
    local_rank, local_world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    has_gpu = torch.cuda.device_count() >= local_world_size  # one for each process of this node, or none is used
    device = torch.device("cuda", local_rank) if has_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if has_gpu else "gloo")  # waits until all ranks have come

    rank, world_size = dist.get_rank(), dist.get_world_size()
    total = torch.tensor(rank + 1, device=device)
    dist.all_reduce(total)  # adds over all ranks, in place
    assert total.item() == world_size * (world_size + 1) // 2
    print(f"rank {rank} of {world_size}, local rank {local_rank}, {dist.get_backend()}, {device}: sum {total.item()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
