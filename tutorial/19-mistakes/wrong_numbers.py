# $ torchrun --standalone --nproc-per-node=3 tutorial/19-mistakes/wrong_numbers.py
"""Mistakes that raise no error: each shown failing, then fixed."""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DistributedSampler, TensorDataset


def everyone(mine: Tensor) -> list[Tensor]:
    """Return what each rank has."""
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return parts


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line)


def no_set_epoch() -> None:
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(TensorDataset(torch.arange(100)))
    orders = [list(sampler) for _ in range(2)]
    assert orders[0] == orders[1]
    say("no set_epoch: epochs 0 and 1 have one order")
    fixed = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        fixed.append(list(sampler))
    assert fixed[0] != fixed[1]
    say("  set_epoch(epoch): they differ")


def mean_of_means() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    losses = torch.full((10 * 2**rank,), float(rank))  # rank 0 has 10 losses of 0, rank 1 has 20 of 1, rank 2 40 of 2
    mean = losses.mean()
    dist.all_reduce(mean)
    expected = sum(10 * 2**each * each for each in range(size)) / sum(10 * 2**each for each in range(size))
    assert size == 1 or mean / size != expected
    say(f"mean of means: {mean.item() / size:.3f}")
    sums = torch.tensor([losses.sum(), len(losses)])
    dist.all_reduce(sums)
    assert torch.isclose(sums[0] / sums[1], torch.tensor(expected))
    say(f"  sum of losses / number of losses: {(sums[0] / sums[1]).item():.3f}")


def augmentation_seeds() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # so that all ranks make the same model; and then the same noise, too
    noises = everyone(torch.randn(4))
    assert all(torch.equal(noises[0], each) for each in noises)
    say("one seed on all ranks: all augment their samples alike")
    epoch, samples = 0, range(rank, 4 * size, size)
    drawn = [torch.randn(1, generator=torch.Generator().manual_seed(1_000_003 * epoch + each)) for each in samples]
    noises = everyone(torch.cat(drawn))
    assert len(torch.cat(noises).unique()) == 4 * size
    say("  a seed for each epoch and sample: all samples differ, on any number of ranks alike")


def saving_on_all_ranks(folder: Path) -> None:
    rank, size, path = dist.get_rank(), dist.get_world_size(), folder / "model.pt"
    if rank == 0:
        torch.save({"weight": torch.ones(3)}, path)
    dist.barrier()
    if rank == size - 1 and rank > 0:
        path.open("wb").close()  # rank 2 saves too, a little later: as `torch.save` it begins with an empty file
    dist.barrier()
    if size > 1 and rank == 0:
        assert path.stat().st_size == 0
        print("saving on all ranks: a reader, or a crash, finds a file of 0 bytes")
    if rank == 0:  # one writer, and a name that appears when the file is complete
        torch.save({"weight": torch.ones(3)}, folder / "model.tmp")
        os.replace(folder / "model.tmp", path)
    dist.barrier()  # all come here: not inside the `if`
    assert torch.load(path, weights_only=True)["weight"].sum() == 3
    say("  rank 0 alone, by another name and os.replace, then a barrier: all ranks can load it")


def main() -> None:
    dist.init_process_group("gloo")
    no_set_epoch()
    mean_of_means()
    augmentation_seeds()
    with tempfile.TemporaryDirectory() as own:
        folders: list[str | None] = [own]
        dist.broadcast_object_list(folders, src=0)  # rank 0's, for all
        saving_on_all_ranks(Path(str(folders[0])))
        dist.barrier()  # nobody still reads when rank 0 removes it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
