# $ torchrun --standalone --nproc-per-node=4 tutorial/16-zero/zero2.py
"""ZeRO-2 by hand: in the backward each bucket of gradients goes to the ranks that own its shards, and is freed."""

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

STEPS, LR, WIDTH, LAYERS = 5, 0.01, 128, 6


class Bucket:
    """Some parameters as one long vector; this rank updates one shard of it."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        self.parameters, self.missing = parameters, len(parameters)
        vector = nn.utils.parameters_to_vector(parameters).detach()
        self.vector = nn.functional.pad(vector, (0, -len(vector) % size))  # else the shards would not be equally long
        self.shard = nn.Parameter(self.vector.chunk(size)[rank].clone())
        for each in parameters:
            each.register_post_accumulate_grad_hook(self.has_gradient)

    def has_gradient(self, _: Tensor) -> None:
        """Count a gradient; with the last one, keep of the sum over all ranks this rank's shard."""
        self.missing -= 1
        if self.missing:
            return
        whole = torch.cat([each.grad.flatten() for each in self.parameters if each.grad is not None])
        whole = nn.functional.pad(whole, (0, len(self.vector) - len(whole)))
        self.shard.grad = torch.empty_like(self.shard)
        dist.reduce_scatter_tensor(self.shard.grad, whole)
        self.shard.grad /= dist.get_world_size()
        for each in self.parameters:
            each.grad = None  # freed here; the backward has the layers below still to compute
        self.missing = len(self.parameters)

    def gather(self) -> None:
        """Put the new weights of all ranks into the parameters, and free the gradient of the shard."""
        dist.all_gather_into_tensor(self.vector, self.shard.detach())
        nn.utils.vector_to_parameters(self.vector, self.parameters)
        self.shard.grad = None


def batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
    return x, x[:, :4].argmax(1)


def train(name: str, model: nn.Module, groups: list[list[nn.Parameter]]) -> int:
    """Return the most bytes of gradients that this rank had at once."""
    most = 0

    def look(_: Tensor) -> None:
        nonlocal most
        held = [each.grad for each in [*model.parameters(), *(bucket.shard for bucket in buckets)]]
        most = max(most, sum(each.nbytes for each in held if each is not None))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(look)  # before the bucket's own hook
    buckets = [Bucket(group) for group in groups]
    optimizer = torch.optim.Adam([bucket.shard for bucket in buckets], LR)
    for step in range(STEPS):
        x, y = batch(step)
        cross_entropy(model(x), y).backward()
        optimizer.step()
        for bucket in buckets:
            bucket.gather()
    if dist.get_rank() == 0:
        print(f"{name} at most {most / 1024:3.0f} KiB of gradients at once")
    return most


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    first = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)))
    one, two, ddp = copy.deepcopy(first), copy.deepcopy(first), DistributedDataParallel(first)
    all_at_once = train("ZeRO-1, one bucket:       ", one, [list(one.parameters())])
    layer_by_layer = train("ZeRO-2, a bucket a layer: ", two, [list(layer.parameters()) for layer in two])
    assert layer_by_layer < all_at_once / 2
    optimizer = torch.optim.Adam(ddp.parameters(), LR)
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        cross_entropy(ddp(x), y).backward()
        optimizer.step()
    for expected, *found in zip(first.parameters(), one.parameters(), two.parameters(), strict=True):
        for each in found:
            torch.testing.assert_close(each, expected)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
