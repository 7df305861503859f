"""Models, losses and data sets with a fault each, such as users bring along: what `lockstep verify` has to find."""

import functools
import itertools
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from lockstep.data.base import DataSet

Loss = Callable[[Tensor, Tensor], Tensor]

_COUNTED = [0]
_NUMBERS = itertools.count()


def instance_norm(num_classes: int) -> nn.Module:
    """Keep running statistics as torch's InstanceNorm does, which an engine moves once a step."""
    norm = nn.InstanceNorm2d(1, track_running_stats=True)
    return nn.Sequential(norm, nn.Flatten(), nn.Linear(64, num_classes))


def linear(num_classes: int) -> nn.Module:
    """No fault."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))


class _Linear(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(64, num_classes)


class Remembering(_Linear):
    """Keeps a running mean and a count in plain attributes, and normalizes by it."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.forwards = 0
        self.center = torch.zeros(64)

    def forward(self, inputs: Tensor) -> Tensor:
        flat = inputs.flatten(1)
        if self.training:
            self.forwards += 1
            self.center = 0.9 * self.center + 0.1 * flat.detach().mean(0)
        return self.linear(flat - self.center)


class Counting(_Linear):
    """Counts its forwards in a plain attribute, and makes no use of the count."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.forwards = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.forwards += 1
        return self.linear(inputs.flatten(1))


class Centered(_Linear):
    """Moves a buffer in its forward pass."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.register_buffer("center", torch.zeros(64))

    def forward(self, inputs: Tensor) -> Tensor:
        flat = inputs.flatten(1)
        if self.training:
            self.center.lerp_(flat.detach().mean(0), 0.1)
        return self.linear(flat)


class MyNorm(nn.Module):
    """A BatchNorm written by hand."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(features))
        self.register_buffer("running_var", torch.ones(features))

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training:
            return (inputs - self.running_mean) / (self.running_var + 1e-5).sqrt()
        mean, var = inputs.mean(0), inputs.var(0, unbiased=False)
        self.running_mean.lerp_(mean.detach(), 0.1)
        self.running_var.lerp_(var.detach(), 0.1)
        return (inputs - mean) / (var + 1e-5).sqrt()


def normed(num_classes: int) -> nn.Module:
    """A model with a BatchNorm of its own."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), MyNorm(16), nn.Linear(16, num_classes))


class TwoHeads(nn.Module):
    """Uses one of its two heads."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.head, self.other = nn.Linear(64, num_classes), nn.Linear(64, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(inputs.flatten(1))


class _Noise(nn.Module):
    forwards = 0

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training:
            return inputs
        match self.source:
            case "python":
                return inputs * (1 + 0.1 * random.random())
            case "numpy":
                return inputs * (1 + 0.1 * float(np.random.rand()))
            case "idle clock":
                return inputs + 0 * time.perf_counter()
            case "clock":
                return inputs * (1 + 0.1 * (time.perf_counter() % 1))
            case "global":
                _COUNTED[0] += 1
                return inputs * (1 + 0.01 * _COUNTED[0])
            case "iterator":
                return inputs * (1 + 0.01 * next(_NUMBERS))
            case "class":
                _Noise.forwards += 1
                return inputs * (1 + 0.01 * _Noise.forwards)
            case "rank":
                return inputs * (1 + 0.1 * (dist.get_rank() if dist.is_initialized() else 0))
            case "variable":
                return inputs * (1 + 0.1 * int(os.environ.get("RANK", "0")))
            case _:
                return inputs * (1 + 0.1 * int.from_bytes(os.urandom(6)) / 2**48)


def noisy(num_classes: int, source: str) -> nn.Module:
    """Multiplies its inputs by noise from `source`, none of which is torch's."""
    return nn.Sequential(nn.Flatten(), _Noise(source), nn.Linear(64, num_classes))


class _Put(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training or inputs.is_meta:
            return inputs
        return inputs.clone().put_(torch.tensor([0]), inputs.new_zeros(1), accumulate=False)


def without_kernel(num_classes: int) -> nn.Module:
    """Uses an operation that torch has no deterministic kernel of."""
    return nn.Sequential(nn.Flatten(), _Put(), nn.Linear(64, num_classes))


def mean_of_parts(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss for each sample that has been divided by their number: what adds it up gets a mean."""
    return functional.cross_entropy(outputs, targets, reduction="none") / len(targets)


def mean(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss that is a mean, and does not hide it."""
    return functional.cross_entropy(outputs, targets)


class Jittering:
    """Map-style data with noise from a generator of its own."""

    def __init__(self, samples: int, noise: float) -> None:
        self.targets = [index % 3 for index in range(samples)]
        self._generator = np.random.default_rng(0)
        self._noise = noise

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        noise = self._noise * self._generator.standard_normal(64)
        return torch.full((64,), float(index % 7)) + torch.from_numpy(noise).float(), self.targets[index]


def jittering() -> tuple[Jittering, Jittering]:
    """Training data that is random for each call, and validation data that is not."""
    return Jittering(40, 0.1), Jittering(12, 0.0)


class Tokens:
    """Sequences of tokens, each of which is one tensor; they may be drawn anew for each call."""

    def __init__(self, anew: bool) -> None:
        self._anew = anew

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(np.random.default_rng(None if self._anew else index).integers(0, 7, 17))


def tokens() -> tuple[Tokens, Tokens]:
    """Training data that is random for each call, and validation data that is not."""
    return Tokens(anew=True), Tokens(anew=False)


class Relabeled:
    """A split of Lockstep's own protocol that draws labels from NumPy's global generator."""

    in_memory = True

    def __len__(self) -> int:
        return 40

    def fetch(self, indices: NDArray[np.int64], draw: int | None) -> tuple[Tensor, Tensor]:
        """Return inputs that follow from the index, and targets that do not."""
        targets: Sequence[int] = np.random.randint(0, 3, len(indices)).tolist()
        return torch.from_numpy(indices).float()[:, None].expand(-1, 64).clone(), torch.tensor(targets)


def relabeled() -> DataSet:
    """A whole data set whose targets are random."""
    return DataSet(Relabeled(), Relabeled(), {"classes": ["0", "1", "2"], "shape": [64]})


class _Slow(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and not inputs.is_meta:
            Path("begun").touch()
            time.sleep(60)
        return inputs


def slow(num_classes: int) -> nn.Module:
    """Leaves time for an interrupt."""
    return nn.Sequential(nn.Flatten(), _Slow(), nn.Linear(64, num_classes))


class Caching(_Linear):
    """Keeps a table in a buffer, which its first forward fills."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.register_buffer("table", torch.zeros(64))

    def forward(self, inputs: Tensor) -> Tensor:
        self.table.copy_(torch.linspace(0.0, 1.0, 64))
        return self.linear(inputs.flatten(1) + self.table)


class Drawing(_Linear):
    """Draws from a generator of its own, which it made when it was built."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.generator = np.random.default_rng(0)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs.flatten(1) * (1 + 0.1 * float(self.generator.random())))


def contrasting(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss that looks at pairs of samples."""
    alone = functional.cross_entropy(outputs, targets, reduction="sum")
    return alone + 0.1 * (outputs[:, None] - outputs[None]).square().mean((1, 2)).sum()


class Seeded(Jittering):
    """Map-style data with noise from NumPy's own generator, which Lockstep seeds for each sample."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.from_numpy(np.random.standard_normal(64)).float(), self.targets[index]


def seeded() -> tuple[Seeded, Seeded]:
    """Both parts of a data set that augments by the usual generators."""
    return Seeded(40, 0.0), Seeded(12, 0.0)


class Keeping(Seeded):
    """The same, whose items keep the noise that they were fetched with first."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples, 0.0)
        self._items: dict[int, tuple[Tensor, int]] = {}

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index not in self._items:
            self._items[index] = super().__getitem__(index)
        return self._items[index]


class Warming(Seeded):
    """The same, which builds something for its first item, and draws for it."""

    _built: nn.Module | None = None

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self._built is None:
            self._built = nn.Linear(3, 3)
        return super().__getitem__(index)


def warming() -> tuple[Warming, Warming]:
    """Both parts of such a data set."""
    return Warming(40, 0.0), Warming(12, 0.0)


def keeping() -> tuple[Keeping, Keeping]:
    """Both parts of such a data set."""
    return Keeping(40), Keeping(12)


def spectral_by_hook(num_classes: int) -> nn.Module:
    """A layer whose weight torch's older spectral_norm divides by an estimate that each forward moves."""
    return nn.Sequential(nn.Flatten(), nn.utils.spectral_norm(nn.Linear(64, 32)), nn.Linear(32, num_classes))


def spectral_by_parametrization(num_classes: int) -> nn.Module:
    """The same by torch's newer spectral_norm."""
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(64, 32))
    return nn.Sequential(nn.Flatten(), layer, nn.Linear(32, num_classes))


class _Sharded(Jittering):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return super().__getitem__((index + int(os.environ.get("RANK", "0"))) % len(self))


def sharded() -> tuple[_Sharded, _Sharded]:
    """Data that each rank has its own part of, as scripts for other frameworks may have it."""
    return _Sharded(40, 0.0), _Sharded(12, 0.0)


def counted_loss() -> Loss:
    """A loss that counts its calls in a closure."""
    calls = 0

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return functional.cross_entropy(outputs, targets, reduction="sum") * (1 + 0.01 * calls)

    return loss


counting_loss = counted_loss()


class InPlace(_Linear):
    """Changes its inputs in place."""

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs.mul_(0.5).add_(1.0).flatten(1))


def started_by_rank(num_classes: int) -> nn.Module:
    """Seeds its first weights by the rank, as scripts for other frameworks may."""
    torch.manual_seed(int(os.environ.get("RANK", "0")))
    return linear(num_classes)


class Capped(_Linear):
    """Keeps the norm of its weight below a bound by shrinking it in each forward."""

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.linear.weight.data.mul_(0.99)
        return self.linear(inputs.flatten(1))


class Dropping(_Linear):
    """Drops features in evaluation too, or counts what it evaluated."""

    def __init__(self, num_classes: int, counts: bool = False) -> None:
        super().__init__(num_classes)
        self.evaluated = 0
        self.counts = counts

    def forward(self, inputs: Tensor) -> Tensor:
        flat = inputs.flatten(1)
        if self.training:
            flat = functional.dropout(flat)
        elif self.counts:
            self.evaluated += 1
            flat = flat * self.evaluated
        else:
            flat = functional.dropout(flat, 0.1)
        return self.linear(flat)


class Renorm(nn.BatchNorm1d):
    """A BatchNorm that keeps its statistics itself, and normalizes by them."""

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and self.running_mean is not None and not inputs.is_meta:
            self.running_mean = 0.9 * self.running_mean + 0.1 * inputs.detach().mean(0)
            return inputs - self.running_mean
        return super().forward(inputs)


def renormed(num_classes: int) -> nn.Module:
    """A model with one of its own."""
    make = lambda features: Renorm(features)  # noqa: E731
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), make(16), nn.Linear(16, num_classes))


@functools.lru_cache
def _noise_of(size: int, number: int) -> float:
    return size * random.random() + number


class Cached(_Linear):
    """Takes its noise from a cache, which the first forward of a process fills."""

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs.flatten(1) * (1 + 0.1 * _noise_of(len(inputs), 0)))


class Edited(Jittering):
    """Map-style data that is changed in place when it is fetched."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples, 0.0)
        self.inputs = torch.ones(samples, 64)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.inputs[index].mul_(0.9), self.targets[index]


def edited() -> tuple[Edited, Edited]:
    """Both parts of such a data set."""
    return Edited(40), Edited(12)
