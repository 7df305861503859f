# $ torchrun --standalone --nproc-per-node=3 tutorial/12-inside-ddp/inside_ddp.py
"""DistributedDataParallel by hand: hooks, buckets, and sending while the backward still computes."""

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

BUCKET_BYTES = 8192


class HandMadeDDP(nn.Module):
    """Average the gradients of `module` over all ranks; call `wait` between backward and optimizer.step."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        for tensor in module.state_dict().values():
            dist.broadcast(tensor, src=0)  # all ranks start with the weights and buffers of rank 0
        # A backward reaches the last parameters first, so the buckets are filled from the end.
        self.buckets: list[list[nn.Parameter]] = [[]]
        room = BUCKET_BYTES
        for parameter in reversed([each for each in module.parameters() if each.requires_grad]):
            if room < parameter.nbytes and self.buckets[-1]:
                self.buckets.append([])
                room = BUCKET_BYTES
            self.buckets[-1].append(parameter)
            room -= parameter.nbytes
        self.missing = [len(bucket) for bucket in self.buckets]
        self.sending: dict[int, tuple[dist.Work, Tensor]] = {}
        self.events: list[str] = []
        for number, bucket in enumerate(self.buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(lambda _, number=number: self.has_gradient(number))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.module(x)
        return output

    def has_gradient(self, number: int) -> None:
        """Count a gradient that is complete; autograd calls this while it goes on with the layers below."""
        self.missing[number] -= 1
        if self.missing[number]:
            return
        flat = torch.cat([each.grad.flatten() for each in self.buckets[number] if each.grad is not None])
        flat /= dist.get_world_size()
        work = dist.all_reduce(flat, async_op=True)  # on a thread of gloo's, a stream of NCCL's: nobody waits here
        assert work is not None
        self.sending[number] = (work, flat)
        self.events.append(f"bucket {number} of {flat.numel()} sent, {sum(self.missing)} gradients missing")

    def wait(self) -> None:
        """Put the averages where the gradients were."""
        for number, (work, flat) in sorted(self.sending.items()):
            work.wait()
            bucket = self.buckets[number]
            for parameter, mean in zip(bucket, flat.split([each.numel() for each in bucket]), strict=True):
                parameter.grad = mean.view_as(parameter)
        self.sending.clear()
        self.missing = [len(bucket) for bucket in self.buckets]


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())  # other weights and samples on every rank; those of rank 0 are sent to all
    layers = [nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)]
    ours = HandMadeDDP(nn.Sequential(*layers))
    torchs = DistributedDataParallel(copy.deepcopy(ours.module), bucket_cap_mb=BUCKET_BYTES / 2**20)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (ours, torchs)]
    for _ in range(5):
        x = torch.randn(16, 20)
        y = x[:, :4].argmax(1)
        for model, optimizer in zip((ours, torchs), optimizers, strict=True):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            ours.wait()
            optimizer.step()
    for mine, theirs in zip(ours.module.parameters(), torchs.module.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    if dist.get_rank() == 0:
        print(*ours.events[: len(ours.buckets)], "after 5 steps: the weights of torch's DDP", sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
