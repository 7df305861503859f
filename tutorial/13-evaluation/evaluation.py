# $ torchrun --standalone --nproc-per-node=3 tutorial/13-evaluation/evaluation.py
"""Evaluate on several processes, three times wrong and once right."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DistributedSampler, TensorDataset

BATCH = 10


def answers() -> Tensor:
    """Return for 101 samples, the hardest first, whether a classifier is right: what each rank would compute."""
    x = torch.randn(101, 4, generator=torch.Generator().manual_seed(0))
    margin = x.topk(2).values.diff().abs().flatten()
    return (margin > 0.3)[margin.argsort()]


def mean_over_ranks(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    right = answers()
    expected = right.sum().item() / len(right)

    # Wrong: the sampler repeats samples until all ranks have as many, and those are counted twice.
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(TensorDataset(right), shuffle=False)
    mine = right[list(sampler)]
    padded = mean_over_ranks(mine.sum().item() / len(mine))
    assert len(mine) * size >= len(right)

    # Wrong: the mean over the ranks is computed, and then the value of this rank is used.
    unused = right[rank::size].double().mean().item()
    mean_over_ranks(unused)
    assert (unused != expected) == (size > 1)

    # Wrong: no sample is repeated, but a batch of 4 counts as much as one of 10.
    mine = right[rank::size]
    means = torch.stack([batch.double().mean() for batch in mine.split(BATCH)])
    mean_of_means = mean_over_ranks(means.mean().item())

    # Right: every sample on one rank, two sums, one division.
    sums = torch.tensor([0, 0])
    for batch in mine.split(BATCH):
        sums += torch.stack([batch.sum(), torch.tensor(len(batch))])
    dist.all_reduce(sums)
    correct, counted = sums.tolist()
    assert counted == len(right)
    assert correct / counted == expected
    assert mean_of_means != expected
    assert (padded != expected) == (len(right) % size != 0)

    if rank == 0:
        print(f"one process          {expected:.4f} of {len(right)} samples")
        print(f"padded, mean         {padded:.4f} of {len(sampler) * size} samples")
        print(f"reduced, not used    {unused:.4f} of {len(right[rank::size])} samples")
        print(f"mean of batch means  {mean_of_means:.4f} of {len(right)} samples")
        print(f"sums                 {correct / counted:.4f} of {counted} samples")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
