"""A loop starts with the bits of its script: small programs of each kind, with the plain loop of torch beside each.

One process, one micro-batch a step. The plain loop takes the batches that `run.steps` gives, and the random numbers
that each of them is computed with.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from one_process import joined
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

SAMPLES = 44  # in batches of 16, 16 and 12
IGNORED = -100

Loss = Callable[[nn.Module, Sequence[Tensor]], Tensor]


def inputs(*shape: int) -> Tensor:
    return torch.randn(SAMPLES, *shape, generator=torch.Generator().manual_seed(1))


def labels(classes: int, *shape: int) -> Tensor:
    return torch.randint(classes, (SAMPLES, *shape), generator=torch.Generator().manual_seed(2))


def some_ignored(targets: Tensor) -> Tensor:
    """Leave so many values of each sample that no two batches have equally many."""
    lengths = torch.arange(len(targets)) % targets[0].numel() + 1
    places = torch.arange(targets[0].numel()).view(targets[0].shape)
    return targets.where(places < lengths.view(-1, *[1] * places.ndim), IGNORED)


class Autoencoder(nn.Module):
    """A variational autoencoder; it returns the reconstruction, and mean and logarithm of the variance."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(12, 6), nn.Linear(3, 12)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        noise = torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(mean + noise), mean, log_variance


def mean_entropy(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def mean_squares(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def token_entropy(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=IGNORED)


def evidence(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """The loss of pytorch/examples: sums that nothing divides."""
    found, mean, log_variance = model(batch[0])
    reconstruction = F.binary_cross_entropy_with_logits(found, batch[0].sigmoid(), reduction="sum")
    return reconstruction - 0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()


def deep(*, dropout: float = 0.0, norm: bool = False) -> nn.Module:
    inner: list[nn.Module] = [nn.BatchNorm1d(13)] if norm else []
    return nn.Sequential(nn.Linear(6, 13), *inner, nn.ReLU(), nn.Dropout(dropout), nn.Linear(13, 3))


def segmenter() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 4, 1))


def language_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 11))


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)


def slow(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-4)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@dataclass
class Program:
    """A script: what it trains on what, and by which loss. `never_divided` is one that sums, and divides nowhere."""

    build: Callable[[], nn.Module]
    data: Sequence[Tensor]
    loss: Loss
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = momentum
    clip: float | None = None
    weight: Callable[[Any], int] | None = None
    never_divided: bool = False


def counted(batch: Sequence[Tensor]) -> int:
    return int((batch[1] != IGNORED).sum())


PROGRAMS = {
    "classifier": Program(deep, (inputs(6), labels(3)), mean_entropy),
    "classifier with dropout": Program(partial(deep, dropout=0.3), (inputs(6), labels(3)), mean_entropy, adamw),
    "classifier with BatchNorm": Program(partial(deep, norm=True), (inputs(6), labels(3)), mean_entropy, adamw),
    "clipped": Program(deep, (inputs(6), labels(3)), mean_entropy, clip=0.5),
    "regression of five outputs": Program(partial(nn.Linear, 6, 5), (inputs(6), inputs(11)[:, 6:]), mean_squares),
    "language model": Program(
        language_model, (labels(11, 7), some_ignored(labels(11, 7))), token_entropy, adamw, weight=counted
    ),
    "segmentation": Program(segmenter, (inputs(3, 4, 5), labels(4, 4, 5)), mean_entropy),
    "segmentation with ignored pixels": Program(
        segmenter, (inputs(3, 4, 5), some_ignored(labels(4, 4, 5))), mean_entropy, weight=counted
    ),
    "variational autoencoder": Program(Autoencoder, (inputs(12),), evidence, slow, never_divided=True),
}


def trained_plainly(model: nn.Module, program: Program, batches: Sequence[Any]) -> list[float]:
    """Train by the loop of torch on these batches, from the states of the random generator; return the losses."""
    optimizer = program.optimizer(model)
    losses = []
    for batch, state in batches:
        torch.set_rng_state(state)
        optimizer.zero_grad()
        loss = program.loss(model, batch)
        loss.backward()
        if program.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), program.clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained_by_lockstep(run: Any, model: nn.Module, program: Program) -> tuple[list[float], list[Any]]:
    """Train by a loop of one's own; return the losses, and the batches with the states of the random generator."""
    model, _ = run.place(model, program.optimizer(model))
    losses, batches = [], []
    options = {"batch": 16, "microbatches": 1, "epochs": 2, "weight": program.weight}
    for step in run.steps(TensorDataset(*program.data), **options):
        for batch in step:
            batches.append(([each.clone() for each in batch], torch.get_rng_state()))
            loss = program.loss(model, batch)
            if program.never_divided:
                step.backward(sum=step.weight * loss)
            else:
                step.backward(mean=loss)
        step.update(clip=program.clip)
        losses.append(float(step.loss))
    return losses, batches


@pytest.mark.parametrize("name", [*PROGRAMS])
def test_a_ported_script_has_its_own_bits(name: str) -> None:
    program = PROGRAMS[name]
    with joined() as run:
        model = program.build()
        plain = program.build()
        plain.load_state_dict(model.state_dict())
        losses, batches = trained_by_lockstep(run, model, program)
        expected = trained_plainly(plain, program, batches)
        found = model.state_dict()
        for key, each in plain.state_dict().items():
            # Norms are added by rows, and running statistics move once a step: rounded in another order than torch's.
            close = program.clip is not None or "running" in key
            torch.testing.assert_close(found[key], each, **({} if close else {"rtol": 0, "atol": 0}))
        rounded = program.clip is not None or program.never_divided
        assert losses == (pytest.approx(expected, rel=1e-6) if rounded else expected)


class Adversaries(nn.Module):
    """A generator and a discriminator, which a step of either calls twice."""

    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        norm = partial(nn.BatchNorm1d, momentum=momentum)
        self.G = nn.Sequential(nn.Linear(4, 13), norm(13), nn.ReLU(), nn.Linear(13, 6))
        self.D = nn.Sequential(nn.Linear(6, 13), norm(13), nn.LeakyReLU(0.2), nn.Linear(13, 1))

    def adversarial(self, real: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return the losses of discriminator and generator, as the relativistic GAN has them."""
        fake = self.G(noise)
        return F.softplus(self.D(fake.detach()) - self.D(real)).mean(), F.softplus(self.D(real) - self.D(fake)).mean()


def adversaries_plainly(model: Adversaries, optimizer: torch.optim.Optimizer, batches: Sequence[Any]) -> None:
    rivals = [*model.D.parameters()], [*model.G.parameters()]
    for number, (real, noise) in enumerate(batches):
        optimizer.zero_grad()
        losses = model.adversarial(real, noise)
        gradients = torch.autograd.grad(losses[number % 2], rivals[number % 2])
        for parameter, gradient in zip(rivals[number % 2], gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()


def adversaries_by_lockstep(run: Any, model: Adversaries, optimizer: torch.optim.Optimizer) -> list[Any]:
    placed = nn.ModuleDict({"G": model.G, "D": model.D})
    placed, _ = run.place(placed, optimizer)
    batches = []
    for step in run.steps(TensorDataset(inputs(6)), batch=16, microbatches=1, epochs=4):
        for number, of in enumerate("DG"):
            for (real,) in step:
                noise = torch.randn(len(real), 4)
                batches.append((real.clone(), noise))
                step.backward(mean=model.adversarial(real, noise)[number])
            step.update(of=of)
    return batches


def adam_of_two(model: Adversaries) -> torch.optim.Optimizer:
    return torch.optim.Adam([{"params": getattr(model, name).parameters(), "name": name} for name in "GD"], lr=1e-2)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_layer_called_several_times_keeps_the_statistics_of_its_script(momentum: float | None) -> None:
    """In each pass the discriminator is called four times and the generator once, and torch folds in every call."""
    with joined() as run:
        model, plain = Adversaries(momentum), Adversaries(momentum)
        plain.load_state_dict(model.state_dict())
        batches = adversaries_by_lockstep(run, model, adam_of_two(model))
        adversaries_plainly(plain, adam_of_two(plain), batches)
        found = model.state_dict()
        for key, each in plain.state_dict().items():
            close = {"rtol": 2e-6, "atol": 1e-6} if "running" in key else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(found[key], each, **close)
        assert plain.D[1].num_batches_tracked == 4 * plain.G[1].num_batches_tracked == 4 * len(batches)


def two_models() -> nn.ModuleDict:
    return nn.ModuleDict(
        {"G": nn.Sequential(nn.Linear(6, 13), nn.BatchNorm1d(13), nn.Linear(13, 1)), "D": nn.Linear(6, 1)}
    )


def sgd_of_two(model: nn.ModuleDict) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": model[name].parameters(), "name": name} for name in "GD"], lr=0.1)


@pytest.mark.parametrize("order", ["GD", "DG"])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_layer_that_one_pass_of_a_step_calls_counts_in_that_pass_alone(momentum: float | None, order: str) -> None:
    with joined() as run:
        model, plain = two_models(), two_models()
        plain.load_state_dict(model.state_dict())
        for each in (model, plain):
            each["G"][1].momentum = momentum
        run.place(model, sgd_of_two(model))
        optimizer = sgd_of_two(plain)
        for step in run.steps(TensorDataset(inputs(6)), batch=16, microbatches=1, epochs=2):
            for of in order:
                for (x,) in step:
                    step.backward(mean=model[of](x).square().mean())
                step.update(of=of)
                optimizer.zero_grad()
                plain[of](x).square().mean().backward()
                optimizer.step()
        found = model.state_dict()
        for key, each in plain.state_dict().items():
            close = {"rtol": 2e-6, "atol": 1e-6} if "running" in key else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(found[key], each, **close)
        assert found["G.1.num_batches_tracked"] == 6


def normalizing() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 13), nn.BatchNorm1d(13), nn.ReLU(), nn.Linear(13, 1))


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def train_plainly(model: nn.Module, steps: Sequence[Tensor], decay: Callable[[nn.Module, int], None]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, x in enumerate(steps):
        decay(model, number)
        optimizer.zero_grad()
        squares(model, x).backward()
        optimizer.step()


def assert_same_training(found: nn.Module, expected: nn.Module) -> None:
    for key, each in expected.state_dict().items():
        close = {"rtol": 2e-6, "atol": 1e-6} if "running" in key else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(found.state_dict()[key], each, **close)
    assert found[1].momentum == expected[1].momentum


def decayed(model: nn.Module, number: int) -> None:
    model[1].momentum *= 0.7  # as PointNet's, which also clips it


@pytest.mark.parametrize("inside", [False, True])
def test_a_decaying_momentum_keeps_the_statistics_of_its_script(inside: bool) -> None:
    with joined() as run:
        model, plain, batches = normalizing(), normalizing(), []
        plain.load_state_dict(model.state_dict())
        run.place(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in run.steps(TensorDataset(inputs(6)), batch=16, microbatches=1, epochs=2):
            if not inside:
                decayed(model, step.number)
            for (x,) in step:
                if inside:
                    decayed(model, step.number)
                batches.append(x.clone())
                step.backward(mean=squares(model, x))
            step.update()
        train_plainly(plain, batches, decayed)
        assert_same_training(model, plain)


def test_copies_of_a_model_have_its_momentum_and_start_another_phase() -> None:
    batches, phases = [], []
    model = normalizing()
    plain = deepcopy(model)
    for _ in range(2):
        with joined() as run:
            run.place(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for step in run.steps(TensorDataset(inputs(6)), batch=16, microbatches=1, epochs=1):
                for (x,) in step:
                    batches.append(x.clone())
                    step.backward(mean=squares(model, x))
                step.update()
            phases.append(deepcopy(model))
        model = deepcopy(model)
    train_plainly(plain, batches[:3], lambda *_: None)
    assert_same_training(phases[0], plain)
    train_plainly(plain, batches[3:], lambda *_: None)
    assert_same_training(phases[1], plain)
