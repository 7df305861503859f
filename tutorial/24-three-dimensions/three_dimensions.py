# $ torchrun --standalone --nproc-per-node=8 tutorial/24-three-dimensions/three_dimensions.py
"""3D parallelism on a DeviceMesh: two stages, whose layers are cut in two, in two replicas that share their weights."""

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss

WIDTH, HIDDEN, BATCH, MICRO_BATCHES, STEPS, LR = 16, 64, 32, 4, 5, 0.5
PIPE, DATA, TENSOR = 2, 2, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = x + self.down(torch.relu(self.up(x)))
        return total


def main() -> None:
    dist.init_process_group("gloo")
    # The last axis is that of neighbours, who exchange most: a sum in each layer. Replicas exchange once a step.
    mesh = init_device_mesh("cpu", (PIPE, DATA, TENSOR), mesh_dim_names=("pipe", "data", "tensor"))
    pipe, data, tensor = (mesh.get_local_rank(name) for name in ("pipe", "data", "tensor"))
    torch.manual_seed(0)
    blocks = [Block() for _ in range(PIPE)]
    x = torch.randn(BATCH, WIDTH)
    y = x.roll(1, dims=1).relu()
    whole = copy.deepcopy(nn.Sequential(*blocks))

    own = blocks[pipe]  # lesson 17: a stage
    parallelize_module(own, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})  # lesson 18
    fully_shard(own, mesh=mesh["data"])  # lesson 16
    stage = PipelineStage(own, pipe, PIPE, torch.device("cpu"), group=mesh.get_group("pipe"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=mse_loss)
    optimizer = torch.optim.SGD(own.parameters(), LR)
    samples, features = (slice(i * n, (i + 1) * n) for i, n in ((data, BATCH // DATA), (tensor, HIDDEN // TENSOR)))
    for _ in range(STEPS):
        optimizer.zero_grad()
        if pipe == 0:
            schedule.step(x[samples])
        else:
            schedule.step(target=y[samples])
        optimizer.step()

    optimizer = torch.optim.SGD(whole.parameters(), LR)
    for _ in range(STEPS):  # the same in one process
        optimizer.zero_grad()
        loss = mse_loss(whole(x), y)
        loss.backward()
        optimizer.step()
    held = 0
    for found, expected in zip(own.parameters(), whole[pipe].parameters(), strict=True):
        assert isinstance(found, DTensor)
        held += found.to_local().numel()
        torch.testing.assert_close(found.full_tensor(), expected)
    total = sum(each.numel() for each in whole.parameters())
    cut = f"samples {samples.start} to {samples.stop - 1}, features {features.start} to {features.stop - 1}"
    print(f"rank {dist.get_rank()}: stage {pipe}, {cut}: keeps {held} of {total} weights")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
