"""Two nets against each other, as users write them: named groups of one optimizer, an iteration of a step for each."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

NOISE = 4


def data() -> TensorDataset:
    return TensorDataset(torch.randn(40, 6, generator=torch.Generator().manual_seed(1)))  # of 16 the last is short


def nets() -> nn.ModuleDict:
    generator = nn.Sequential(nn.Linear(NOISE, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 6))
    critic = nn.Sequential(nn.Linear(6, 12), nn.LeakyReLU(0.2), nn.Linear(12, 1))
    return nn.ModuleDict({"generator": generator, "critic": critic})


def adam(model: nn.ModuleDict) -> torch.optim.Adam:
    groups = [{"params": each.parameters(), "name": name} for name, each in model.items()]
    return torch.optim.Adam(groups, lr=2e-2, betas=(0.5, 0.999))


def placed(run: Any, **given: Any) -> nn.ModuleDict:
    model = nets()
    return run.place(model, adam(model), **given)[0]


def judged(model: nn.ModuleDict, inputs: Tensor, real: bool) -> Tensor:
    """Return what the critic loses, summed."""
    return lost(model["critic"](inputs), float(real))


def lost(scores: Tensor, wanted: float) -> Tensor:
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, wanted), reduction="sum")


def gan(run: Any, epochs: int = 2, last: int = 0) -> nn.ModuleDict:
    """Let both learn in each step, the critic first; up to the step `last`."""
    model = placed(run)
    for step in run.steps(data(), batch=16, microbatches=4, epochs=epochs):
        for (real,) in step:
            fake = model["generator"](torch.randn(len(real), NOISE)).detach()
            step.backward(sum=0.5 * judged(model, real, real=True) + 0.5 * judged(model, fake, real=False))
        step.update(of="critic")
        for (real,) in step:
            step.backward(sum=judged(model, model["generator"](torch.randn(len(real), NOISE)), real=True))
        step.update(of="generator", clip=1.0)
        if step.number == last:
            break
    return model


class Both(nn.Module):
    """Both nets behind one forward, as sharded strategies need them."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nets()

    def forward(self, noise: Tensor, real: Tensor | None = None) -> tuple[Tensor, ...]:
        fake = self.nets["generator"](noise)
        if real is None:
            return (self.nets["critic"](fake),)
        return self.nets["critic"](real), self.nets["critic"](fake.detach())


def in_one_module(run: Any) -> None:
    """As `gan`, by one forward of both nets."""
    model = Both()
    model, _ = run.place(model, adam(model.nets))
    for step in run.steps(data(), batch=16, microbatches=4, epochs=2):
        for (real,) in step:
            scores = model(torch.randn(len(real), NOISE), real)
            step.backward(sum=sum(lost(each, 1.0 - number) for number, each in enumerate(scores)))
        step.update(of="critic")
        for (real,) in step:
            (score,) = model(torch.randn(len(real), NOISE))
            step.backward(sum=lost(score, 1.0))
        step.update(of="generator")


class Reached(Both):
    """Both nets, each called equally often in each forward, whose outputs each loss can reach."""

    def forward(self, noise: Tensor, real: Tensor | None = None) -> tuple[Tensor, ...]:
        assert real is not None
        fake = self.nets["generator"](noise)
        return self.nets["critic"](real), self.nets["critic"](fake.detach()), self.nets["critic"](fake), fake


def reached_by_each_loss(run: Any) -> None:
    """As `in_one_module`, by losses that depend on all that the forward calls."""
    model = Reached()
    model, _ = run.place(model, adam(model.nets))
    for step in run.steps(data(), batch=16, microbatches=4, epochs=2):
        for (real,) in step:
            *scores, unused, fake = model(torch.randn(len(real), NOISE), real)
            loss = sum(lost(each, 1.0 - number) for number, each in enumerate(scores))
            step.backward(sum=loss + 0 * fake.sum() + 0 * unused.sum())
        step.update(of="critic")
        for (real,) in step:
            *scores, score, _ = model(torch.randn(len(real), NOISE), real)
            step.backward(sum=lost(score, 1.0) + 0 * sum(each.sum() for each in scores))
        step.update(of="generator")


def wasserstein(run: Any, epochs: int = 2) -> nn.ModuleDict:
    """Train the critic in each step with a penalty on its gradient, and the generator in every second one."""
    model = placed(run)
    critic = model["critic"]
    for step in run.steps(data(), batch=16, microbatches=4, epochs=epochs):
        for (real,) in step:
            fake = model["generator"](torch.randn(len(real), NOISE)).detach()
            between = torch.lerp(real, fake, torch.rand(len(real), 1)).requires_grad_()
            [slope] = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
            penalty = (slope.norm(dim=1) - 1).square().sum()
            step.backward(sum=critic(fake).sum() - critic(real).sum() + 10 * penalty)
        step.update(of="critic")
        if step.number % 2 == 0:
            for (real,) in step:
                step.backward(sum=-critic(model["generator"](torch.randn(len(real), NOISE))).sum())
            step.update(of="generator")
    return model
