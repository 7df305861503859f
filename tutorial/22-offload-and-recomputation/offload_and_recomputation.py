# $ python tutorial/22-offload-and-recomputation/offload_and_recomputation.py
"""Less memory for more time: activations that are computed again or kept in files, and Adam's state in files."""

import copy
import tempfile
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

BLOCKS, WIDTH, BATCH, STEPS = 8, 64, 256, 3
Call = Callable[[nn.Module, Tensor], Tensor]


class Meter(TorchDispatchMode):
    """Count the bytes of the tensors that are made in this context, until each is freed."""

    live = peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        old = {each.untyped_storage() for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        result = func(*args, **(kwargs or {}))
        for storage in {each.untyped_storage() for each in tree_leaves(result) if isinstance(each, Tensor)} - old:
            weakref.finalize(storage, self.add, -storage.nbytes())
            self.add(storage.nbytes())
        return result

    def add(self, nbytes: int) -> None:
        self.live += nbytes
        self.peak = max(self.peak, self.live)


def in_files(folder: Path) -> saved_tensors_hooks:
    """Keep in files what autograd saves; save_on_cpu, for GPUs, keeps it in the memory of the CPU."""
    numbers = count()

    def pack(saved: Tensor) -> Tensor | Path:
        if isinstance(saved, nn.Parameter):
            return saved  # a weight stays anyway
        torch.save(saved, path := folder / f"{next(numbers)}.pt")
        return path

    def unpack(packed: Tensor | Path) -> Any:
        return torch.load(packed, weights_only=True) if isinstance(packed, Path) else packed

    return saved_tensors_hooks(pack, unpack)


def train(name: str, call: Call, activations: Path | None = None, state: Path | None = None) -> tuple[Tensor, int]:
    """Return all weights after some steps, and the bytes at the peak."""
    torch.manual_seed(0)
    layers = (nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))
    blocks = nn.ModuleList(nn.Sequential(*copy.deepcopy(layers)) for _ in range(BLOCKS))
    adam = torch.optim.Adam(blocks.parameters())
    for number, weight in enumerate(blocks.parameters() if state else ()):
        adam.state[weight] = {"step": torch.zeros(())}
        for key in ("exp_avg", "exp_avg_sq"):  # the system reads and writes mapped files page by page
            adam.state[weight][key] = torch.from_file(f"{state}/{key}{number}", True, weight.numel()).view_as(weight)
    start = time.process_time()
    with Meter() as meter:
        for _ in range(STEPS):
            x = torch.ones(BATCH, WIDTH)
            with in_files(activations) if activations else nullcontext():
                for block in blocks:
                    x = x + call(block, x)
            x.square().mean().backward()
            del x
            adam.step()
            adam.zero_grad()
    peak, live, ms = meter.peak / 2**20, meter.live / 2**20, 1000 * (time.process_time() - start)
    print(f"{name:20} peak {peak:4.1f} MiB, between steps {live:.1f}, {ms:.0f} ms")
    return nn.utils.parameters_to_vector(blocks.parameters()), meter.peak


def main() -> None:
    weights, peak = train("everything kept", nn.Module.__call__)
    again = partial(checkpoint, use_reentrant=False)  # keeps x, and calls the block once more in the backward
    with tempfile.TemporaryDirectory() as folder:
        same = [
            train("recomputed", again),
            train("activations in files", nn.Module.__call__, activations=Path(folder)),
            train("Adam in files", nn.Module.__call__, state=Path(folder)),
        ]
    assert all(torch.equal(each, weights) and smaller < 0.8 * peak for each, smaller in same)
    assert not torch.equal(train("other dropout", partial(again, preserve_rng_state=False))[0], weights)


if __name__ == "__main__":
    main()
