# $ torchrun --standalone --nproc-per-node=2 tutorial/28-deepspeed/engine.py 0 1 2 3
"""The training of lesson 9 in DeepSpeed's engine, under each of ZeRO's stages: a JSON says what, the engine does it."""

import logging
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

os.environ["DS_ACCELERATOR"] = "cpu"  # before the import, which looks for a device
import deepspeed

EPOCHS, BATCH = 3, 48  # the batch of all processes together


def samples() -> tuple[Tensor, Tensor]:
    """Return 1,200 points in 20 dimensions; the class of each is the largest of its first four numbers."""
    x = torch.randn(1200, 20, generator=torch.Generator().manual_seed(1))
    return x, x[:, :4].argmax(1)


def configuration(stage: int) -> dict[str, object]:
    """Return the JSON of DeepSpeed, as a dict: batch = micro-batch of a process x steps accumulated x processes."""
    return {
        "train_batch_size": BATCH,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},  # shard small weights too
    }


def train(stage: int) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
    engine, optimizer, *_ = deepspeed.initialize(model=model, config=configuration(stage))
    data = TensorDataset(*samples())
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, engine.train_micro_batch_size_per_gpu(), sampler=sampler)
    losses = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for x, y in loader:
            loss = cross_entropy(engine(x), y)
            engine.backward(loss)  # instead of loss.backward(): it divides by the steps accumulated
            engine.step()  # moves the weights at every second call, and sets the gradients to zero
            total += loss.detach() * len(x)
        dist.all_reduce(total)
        losses.append(total.item() / len(data))
    adam = getattr(optimizer, "optimizer", optimizer)  # of torch, inside ZeRO's
    state = [each for values in adam.state.values() for each in values.values() if torch.is_tensor(each) and each.dim()]
    weights, moments = (sum(each.numel() for each in tensors) for tensors in (model.parameters(), state))
    shards = dist.get_world_size() if stage else 1
    assert 3208 <= moments * shards < 3300  # two for each weight; shards are rounded up
    if dist.get_rank() == 0:
        kept = f"keeps {weights:5,} weights, {moments:5,} moments of Adam"
        print(f"stage {stage}: {kept}, loss {' '.join(f'{loss:.4f}' for loss in losses)}", flush=True)
    return losses


def main(stages: list[int]) -> None:
    dist.init_process_group("gloo")  # DeepSpeed uses the process group that is there
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # it logs to standard output
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled first, for inference alone
    found = [train(stage) for stage in stages]
    for losses in found:
        assert losses[-1] < losses[0] / 2
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(found[0]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main([int(stage) for stage in sys.argv[1:]])
