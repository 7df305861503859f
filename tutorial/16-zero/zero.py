# $ torchrun --standalone --nproc-per-node=4 tutorial/16-zero/zero.py
"""ZeRO: what each rank keeps of weights, gradients and optimizer state under DDP, by hand, and under FSDP2."""

import copy
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

STEPS, LR = 5, 0.01


def kept(tensors: Iterable[Tensor | None]) -> int:
    """Return the KiB that these tensors have on this rank."""
    local = (each.to_local() if isinstance(each, DTensor) else each for each in tensors if each is not None)
    return round(sum(each.nbytes for each in local) / 1024)


def report(
    name: str, parameters: list[nn.Parameter], gradients: list[Tensor | None], optimizer: torch.optim.Adam
) -> None:
    state = [each for values in optimizer.state.values() for each in values.values() if each.dim() > 0]
    if dist.get_rank() == 0:
        print(f"{name:12} weights {kept(parameters):3} KiB, gradients {kept(gradients):3}, Adam {kept(state):3}")


def batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(16, 20, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
    return x, x[:, :4].argmax(1)


def plain(model: nn.Module, name: str) -> None:
    """Train with DDP or with FSDP2: the loop is the same."""
    optimizer = torch.optim.Adam(model.parameters(), LR)
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    report(name, list(model.parameters()), [each.grad for each in model.parameters()], optimizer)


def by_hand(model: nn.Module) -> None:
    """Train with ZeRO-1 by hand: each rank has the optimizer of one shard of a vector of all weights."""
    rank, size = dist.get_rank(), dist.get_world_size()
    parameters = list(model.parameters())
    vector = nn.utils.parameters_to_vector(parameters).detach()
    vector = nn.functional.pad(vector, (0, -len(vector) % size))  # else the shards would not be equally long
    shard = nn.Parameter(vector.chunk(size)[rank].clone())
    optimizer = torch.optim.Adam([shard], LR)
    for step in range(STEPS):
        x, y = batch(step)
        cross_entropy(model(x), y).backward()
        gradient = torch.cat([each.grad.flatten() for each in parameters if each.grad is not None])
        gradient = nn.functional.pad(gradient, (0, len(vector) - len(gradient)))
        shard.grad = torch.empty_like(shard)
        dist.reduce_scatter_tensor(shard.grad, gradient)  # to each rank the sum of its shard
        shard.grad /= size
        optimizer.step()
        dist.all_gather_into_tensor(vector, shard.detach())  # the new weights
        nn.utils.vector_to_parameters(vector, parameters)
        model.zero_grad()
    report("ZeRO by hand", parameters, [shard.grad], optimizer)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(20, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4))
    models = [copy.deepcopy(first) for _ in range(3)]
    plain(DistributedDataParallel(models[0]), "DDP")
    by_hand(models[1])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in models[2]:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)  # each is gathered when it is computed, and freed afterwards
    fully_shard(models[2], mesh=mesh)
    plain(models[2], "FSDP2")
    for one, *others in zip(*(model.parameters() for model in models), strict=True):
        for other in others:
            torch.testing.assert_close(other.full_tensor() if isinstance(other, DTensor) else other, one)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
