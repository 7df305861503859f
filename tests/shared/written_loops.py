"""Training loops as people write them, whole or by their loss: alike on all placements, or refused with their line.

A loop is given a run that has been joined. The line that a refusal has to name ends in `# <-`; where a message names
the two lines that the code was between, it lies between them.
"""

import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from loop_ends import Loop
from loops import data, micro_batches, net, steps
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune, spectral_norm
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

ALIKE: dict[str, Loop] = {}
REFUSED: dict[str, tuple[Loop, str]] = {}  # with a part of the message
IN_ROWS: dict[str, tuple[Loop, str]] = {}  # the same, of what is alike only where weights are whole


def alike(loop: Loop) -> Loop:
    ALIKE[loop.__name__] = loop
    return loop


def refused(text: str, table: dict[str, tuple[Loop, str]] = REFUSED) -> Callable[[Loop], Loop]:
    def noted(loop: Loop) -> Loop:
        table[loop.__name__] = loop, text
        return loop

    return noted


class Parts(nn.Module):
    """A module that has these parts, by name."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def computed(steps: Iterator[Any], model: Any) -> Iterator[Any]:
    """Yield each step once its micro-batches are computed."""
    for step in steps:
        for x, y in step:
            step.backward(sum=summed(model(x), y))
        yield step


def even(run: Any, epochs: int = 1) -> Iterator[Any]:
    """Steps in which each of one to three ranks has as many micro-batches, so that all are refused at once."""
    return run.steps(data(36), batch=18, microbatches=6, epochs=epochs)


def adam(model: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr)


def placed(run: Any, model: nn.Module | None = None) -> tuple[Any, Any]:
    model = model or net()
    return run.place(model, adam(model))


def summed(outputs: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="sum", **options)


def plain(model: Any, inputs: Any, targets: Any) -> Tensor:
    return summed(model(inputs), targets)


def trained(run: Any, model: nn.Module, loss: Callable[[Any, Any, Any], Tensor] = plain, **update: Any) -> None:
    """Train by steps that are as they should be, by a loss of the model, inputs and targets."""
    model, _ = placed(run, model)
    for step, x, y in micro_batches(steps(run), **update):
        step.backward(sum=loss(model, x, y))


# The usual loop of PyTorch, and what is left of it by mistake.


@refused("a backward other than step.backward|a backward that is not step.backward")
def usual_loop(run):
    model, optimizer = placed(run)
    for step in even(run):
        for x, y in step:
            loss = F.cross_entropy(model(x), y)
            loss.backward()  # <-
            optimizer.step()


@refused("optimizer.zero_grad() is not supported after run.place")
def zero_grad_first(run):
    model, optimizer = placed(run)
    for step, x, y in micro_batches(even(run)):
        optimizer.zero_grad()  # <-
        step.backward(sum=summed(model(x), y))


@refused("optimizer.step() is not supported after run.place")
def optimizer_steps(run):
    model, optimizer = placed(run)
    for _ in computed(even(run), model):
        optimizer.step()  # <-


@refused("the placed model is called outside of a micro-batch")
def own_loader(run):
    model, _ = placed(run)
    for x, y in DataLoader(data(), batch_size=8, shuffle=True):
        summed(model(x), y)  # <-


@refused("the loss is a mean")
def mean(run):
    model, _ = placed(run)
    for step, x, y in micro_batches(even(run)):
        step.backward(sum=F.cross_entropy(model(x), y))  # <-


@refused("the loss is divided by 6")
def accumulation_of_sums(run):
    accumulate = 6
    model, _ = placed(run)
    for step, x, y in micro_batches(even(run)):
        step.backward(sum=summed(model(x), y) / accumulate)  # <-


@alike
def accumulation_ported(run):
    """Nested loops: some steps make what is reported as one."""
    model, _ = placed(run)
    reported, running = [], 0.0
    for step in computed(steps(run, epochs=2), model):
        step.update(clip=1.0)
        running += float(step.loss)
        if step.every(steps=2):
            reported.append(running / 2)
            running = 0.0
    assert len(reported) == 3


@alike
def accumulation_by_a_product(run):
    """What cannot be told from a factor of one's own, and is warned of."""
    accumulate = 4
    trained(run, net(), lambda model, x, y: summed(model(x), y) * (1 / accumulate))


@refused("step 1: the loop left the step after 1 of ")
def left_early(run):
    model, _ = placed(run)
    for step in even(run):
        for x, y in step:
            step.backward(sum=summed(model(x), y))
            break  # <-
        step.update()


@refused("step.backward was called twice: step.backward at ")
def backward_twice(run):
    model, _ = placed(run)
    for step, x, y in micro_batches(even(run)):
        outputs = model(x)
        step.backward(sum=summed(outputs, y))
        step.backward(sum=0.1 * outputs.square().sum())  # <-


@alike
def early_stopping(run):
    """Stop by a figure of the whole validation set."""
    model, _ = placed(run)
    best, patience = float("inf"), 0
    for step in computed(steps(run, epochs=4), model):
        step.update()
        if step.every(epochs=1):
            loss = run.sum(summed(model(x), y) for x, y in run.each(data())) / 40
            patience = 0 if loss < best - 0.05 else patience + 1
            best = min(best, loss)
            if patience == 2:
                break


@refused("0.weight was modified")
def best_restored(run):
    model, _ = placed(run)
    best = deepcopy(model.state_dict())
    for step in computed(even(run), model):
        step.update()
    model.load_state_dict(best)  # <-
    run.fingerprint()


@refused("optimizer.state is empty after run.place")
def moments_forgotten(run):
    """Adam's moments halved when an epoch is over."""
    model, optimizer = placed(run)
    for step, x, y in micro_batches(even(run)):
        step.backward(sum=summed(model(x), y))
    for state in optimizer.state.values():  # <-
        state["exp_avg"].mul_(0.5)


@refused("optimizer.state_dict() is not supported after run.place")
def optimizer_saved(run):
    model, optimizer = placed(run)
    for step, x, y in micro_batches(even(run)):
        step.backward(sum=summed(model(x), y))
    optimizer.state_dict()  # <-


# Generative adversarial networks.


def discriminator() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.LeakyReLU(0.2), nn.Linear(12, 1))


def generator() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 6), nn.Tanh())


def binary(logits: Tensor, label: float) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, label), reduction="sum")


@alike
def dcgan_discriminator(run):
    """Train the discriminator against a generator that is fixed."""
    faker = generator().eval().requires_grad_(False)
    model = discriminator()
    model, _ = run.place(model, torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.5, 0.999)))
    for step, real, _ in micro_batches(steps(run)):
        fake = faker(torch.randn(len(real), 4))
        step.backward(sum=binary(model(real), 1.0) + binary(model(fake.detach()), 0.0))


@refused("a Linear outside the placed model has parameters that require gradients")
def dcgan_generator_outside(run):
    faker = generator()
    model, _ = placed(run, discriminator())
    for step, real, _ in micro_batches(even(run)):
        fake = faker(torch.randn(len(real), 4))  # <-
        step.backward(sum=binary(model(real), 1.0) + binary(model(fake), 0.0))


@refused("run.place: the run already has a model")
def dcgan_two_models(run):
    of_d, of_g = discriminator(), generator()
    run.place(of_d, adam(of_d))
    run.place(of_g, adam(of_g))  # <-


@refused("discriminator.0 is called with different weights", IN_ROWS)
def dcgan_both(run):
    """Train both in each step, by a module whose forward has both losses."""

    class Gan(Parts):
        """Both networks and losses: that of the generator goes through a discriminator whose weights are constants."""

        def forward(self, real: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
            fake = self.generator(noise)
            of_d = binary(self.discriminator(real), 1.0) + binary(self.discriminator(fake.detach()), 0.0)
            constant = {name: each.detach() for name, each in self.discriminator.named_parameters()}
            of_g = binary(torch.func.functional_call(self.discriminator, constant, fake), 1.0)  # <-
            return of_d, of_g

    model, _ = placed(run, Gan(generator=generator(), discriminator=discriminator()))
    for step, real, _ in micro_batches(steps(run)):
        of_d, of_g = model(real, torch.randn(len(real), 4))
        step.backward(sum=of_d + of_g)


@refused("a ModuleDict has no forward", IN_ROWS)
def dcgan_in_turns(run):
    """Train one, then the other, as a group rests whose rate is scaled to 0; both called by themselves."""
    pair = nn.ModuleDict({"g": generator(), "d": discriminator()})
    groups = [{"params": pair[name].parameters()} for name in ("g", "d")]
    model, optimizer = run.place(pair, torch.optim.SGD(groups, lr=0.02))  # <-
    for step in steps(run, epochs=2):
        of_d = step.number % 2 == 1
        for group, scale in zip(optimizer.param_groups, (1.0 - of_d, float(of_d)), strict=True):
            group["lr_scale"] = scale
        for real, _ in step:
            fake = model["g"](torch.randn(len(real), 4))
            if of_d:
                step.backward(sum=binary(model["d"](real), 1.0) + binary(model["d"](fake.detach()), 0.0))
            else:
                step.backward(sum=binary(model["d"](fake), 1.0))
        step.update()


@refused("0.weight was modified")
def wgan_clipping(run):
    model, _ = placed(run, discriminator())
    for step in even(run):
        for real, _ in step:
            step.backward(sum=model(torch.randn_like(real)).sum() - model(real).sum())
        step.update()
        for each in model.parameters():
            each.data.clamp_(-0.01, 0.01)  # <-


@refused(
    "a backward other than step.backward goes through the placed model, whose weights are sharded by rows", IN_ROWS
)
def wgan_gradient_penalty(run):
    """WGAN-GP: the penalty on the norm of the critic's gradient, differentiated twice."""
    critic = nn.Sequential(nn.Linear(6, 12), nn.LeakyReLU(0.2), nn.Linear(12, 1))
    model, _ = placed(run, critic)
    for step, real, _ in micro_batches(steps(run)):
        fake, share = torch.randn_like(real), torch.rand(len(real), 1)
        between = (share * real + (1 - share) * fake).requires_grad_()
        scores = model(between)
        [gradient] = torch.autograd.grad(scores.sum(), between, create_graph=True)  # <-
        penalty = ((gradient.norm(2, dim=1) - 1) ** 2).sum()
        step.backward(sum=model(fake).sum() - model(real).sum() + 10.0 * penalty)


@refused(
    "a backward other than step.backward goes through the placed model, whose weights are sharded by rows", IN_ROWS
)
def r1_penalty(run):
    """StyleGAN's R1, in the steps that it falls on."""
    critic = nn.Sequential(nn.Linear(6, 12), nn.Softplus(), nn.Linear(12, 1))
    model, _ = placed(run, critic)
    for step, real, _ in micro_batches(steps(run)):
        real = real.requires_grad_(step.number % 2 == 1)
        logits = model(real)
        loss = F.softplus(-logits).sum() + F.softplus(model(torch.randn_like(real))).sum()
        if step.number % 2:
            [gradient] = torch.autograd.grad(logits.sum(), real, create_graph=True)  # <-
            loss = loss + 5.0 * gradient.square().sum()
        step.backward(sum=loss)


# Spectral norm.


@refused("the forward pass changes buffer 3.weight_u of Linear")
def spectral_norm_by_hook(run):
    model, _ = placed(run, nn.Sequential(*discriminator()[:3], spectral_norm(nn.Linear(12, 1))))
    for step, real, _ in micro_batches(even(run)):
        step.backward(sum=binary(model(real), 1.0))  # <-


@refused("the forward pass changes buffer 3.parametrizations.weight.0._u of _SpectralNorm")
def spectral_norm_by_parametrization(run):
    model, _ = placed(run, nn.Sequential(*discriminator()[:3], parametrizations.spectral_norm(nn.Linear(12, 1))))
    for step, real, _ in micro_batches(even(run)):
        step.backward(sum=binary(model(real), 1.0))  # <-


@alike
def weight_norm(run):
    """A parametrization that moves nothing."""
    trained(run, nn.Sequential(*net()[:4], parametrizations.weight_norm(nn.Linear(13, 3))))


# Self-supervised learning, with a teacher, and contrastive.


class Head(nn.Module):
    """DINO's: a backbone and a last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 12), nn.GELU())
        self.last_layer = nn.Linear(12, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        features = F.normalize(self.backbone(x), dim=-1)
        return self.last_layer(features)


def cosine(first: float, last: float, share: float) -> float:
    return last + 0.5 * (first - last) * (1 + float(np.cos(np.pi * share)))


def dino_loss(student: Tensor, teacher: Tensor) -> Tensor:
    return -(teacher.div(0.04).softmax(-1) * student.div(0.1).log_softmax(-1)).sum()


@alike
def dino(run):
    """DINO's schedules: rate, weight decay, momentum of the teacher, and a last layer that rests in the first epoch."""
    student = Head()
    teacher = deepcopy(student).requires_grad_(False)
    groups = [{"params": student.backbone.parameters()}, {"params": student.last_layer.parameters()}]
    model, optimizer = run.place(student, torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.04))
    total = 80
    for step in steps(run, epochs=2):
        share = step.samples_seen / total
        for group in optimizer.param_groups:
            group["weight_decay"] = cosine(0.04, 0.4, share)
        optimizer.param_groups[1]["lr_scale"] = float(step.epoch > 0)
        for x, _ in step:
            views = [x + 0.1 * torch.randn_like(x) for _ in range(2)]
            targets = [teacher(view) for view in views]
            outputs = model(torch.cat(views)).chunk(2)
            step.backward(sum=(dino_loss(outputs[0], targets[1]) + dino_loss(outputs[1], targets[0])) / 2)
        step.update(lr=cosine(1e-2, 1e-4, share), clip=3.0)
        momentum = cosine(0.9, 1.0, share)
        with torch.no_grad():
            for mine, its in zip(teacher.parameters(), model.parameters(), strict=True):
                mine.mul_(momentum).add_(whole(its), alpha=1 - momentum)


def whole(tensor: Tensor) -> Tensor:
    """Return a parameter whole, where a strategy has cut it."""
    return tensor.full_tensor() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor


@refused("the gradient of last_layer.weight was removed")
def dino_last_layer_canceled(run):
    """DINO's cancel_gradients_last_layer."""
    model, _ = placed(run, Head())
    for step in even(run):
        for x, _ in step:
            step.backward(sum=dino_loss(model(x), model(x).detach()))
        for name, each in model.named_parameters():
            if "last_layer" in name:
                each.grad = None  # <-
        step.update()


@refused("the lr of an optimizer group was changed, for example by a scheduler")
def dino_rate_in_groups(run):
    """DINO's own line for the rate."""
    model, optimizer = placed(run, Head())
    for step in even(run):
        for group in optimizer.param_groups:
            group["lr"] = cosine(1e-2, 1e-4, step.samples_seen / 36)  # <-
        for x, _ in step:
            step.backward(sum=dino_loss(model(x), model(x).detach()))
        step.update()


@alike
def byol(run):
    """A target network that follows by a momentum, kept by its own modules."""
    online = nn.ModuleDict({"encoder": nn.Linear(6, 8), "predictor": nn.Linear(8, 8)})

    class Online(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return self.parts["predictor"](self.parts["encoder"](x).relu())

    target = deepcopy(online["encoder"]).requires_grad_(False)
    model, _ = placed(run, Online(parts=online))
    for step in steps(run):
        for x, _ in step:
            one, other = x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)
            goal = F.normalize(target(other), dim=1)
            step.backward(sum=(2 - 2 * (F.normalize(model(one), dim=1) * goal).sum(1)).sum())
        step.update()
        with torch.no_grad():
            for mine, its in zip(target.parameters(), online["encoder"].parameters(), strict=True):
                mine.lerp_(whole(its), 0.1)


@alike
def info_nce(run):
    """SimCLR's loss within a micro-batch, which has its own negatives."""

    def loss(model, x, _):
        one, other = (F.normalize(model(x + 0.1 * torch.randn_like(x)), dim=1) for _ in range(2))
        logits = one @ other.T / 0.2
        labels = torch.arange(len(x))
        return (summed(logits, labels) + summed(logits.T, labels)) / 2

    trained(run, nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8)), loss)


@alike
def barlow_twins(run):
    """Normalized by the micro-batch, which is a function of it alone."""

    def loss(model, x, _):
        one, other = (model(x + 0.1 * torch.randn_like(x)) for _ in range(2))
        cross = (one - one.mean(0)).T @ (other - other.mean(0)) / len(x)
        on, off = torch.diagonal(cross), cross - torch.diag(torch.diagonal(cross))
        return len(x) * ((on - 1).square().sum() + 0.005 * off.square().sum())

    trained(run, nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5)), loss)


@alike
def distillation(run):
    """A teacher that is frozen, and a temperature."""
    teacher = net().eval().requires_grad_(False)

    def loss(model, x, y):
        outputs, soft = model(x), teacher(x).div(4.0).softmax(1)
        kept = F.kl_div(outputs.div(4.0).log_softmax(1), soft, reduction="sum") * 16.0
        return 0.3 * summed(outputs, y) + 0.7 * kept

    trained(run, net(), loss)


@alike
def distillation_without_freezing(run):
    """A teacher in evaluation under no_grad, whose parameters still want gradients that they cannot get."""
    teacher = net().eval()

    def loss(model, x, y):
        with torch.no_grad():
            soft = 0.5 * teacher(x).softmax(1) + 0.5 * F.one_hot(y, 3)
        return summed(model(x), soft)

    trained(run, net(), loss)


@alike
def self_distillation(run):
    """The model itself in evaluation, asked within a micro-batch for what it is to learn."""

    def loss(model, x, _):
        with torch.no_grad():
            soft = model.eval()(x).softmax(1)
        return summed(model.train()(x), soft)

    trained(run, net(), loss)


@refused("a BatchNorm1d outside the placed model")
def distillation_in_training(run):
    teacher = net()
    model, _ = placed(run)
    for step, x, _ in micro_batches(even(run)):
        with torch.no_grad():
            soft = teacher(x).softmax(1)  # <-
        step.backward(sum=summed(model(x), soft))


# Augmentation and regularization.


@alike
def mixup(run):
    model, _ = placed(run)
    beta = torch.distributions.Beta(0.2, 0.2)
    for step, x, y in micro_batches(steps(run)):
        share, other = float(beta.sample()), torch.randperm(len(x))
        outputs = model(share * x + (1 - share) * x[other])
        step.backward(sum=share * summed(outputs, y) + (1 - share) * summed(outputs, y[other]))


@alike
def mixup_by_numpy(run):
    """As its authors wrote it: the share comes from NumPy's global generator."""

    def loss(model, x, y):
        share, other = np.random.beta(0.2, 0.2), torch.from_numpy(np.random.permutation(len(x)))
        outputs = model(share * x + (1 - share) * x[other])
        return share * summed(outputs, y) + (1 - share) * summed(outputs, y[other])

    trained(run, net(), loss)


@alike
def cutmix(run):

    def loss(model, x, y):
        width, other = int(torch.randint(1, 6, ())), torch.randperm(len(x))
        x = torch.cat([x[:, :width], x[other, width:]], 1)
        share = width / 6
        outputs = model(x)
        return share * summed(outputs, y) + (1 - share) * summed(outputs, y[other])

    trained(run, net(), loss)


@alike
def r_drop(run):
    """Two forwards of a batch, with other masks of dropout."""

    def loss(model, x, y):
        one, other = model(x).log_softmax(1), model(x).log_softmax(1)
        apart = sum(F.kl_div(a, b, reduction="sum", log_target=True) for a, b in ((one, other), (other, one)))
        return F.nll_loss(one, y, reduction="sum") + F.nll_loss(other, y, reduction="sum") + apart

    trained(run, net(), loss)


class Residual(nn.Module):
    """Blocks that are left out at random."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if not self.training or self.draw() > 0.4:
                x = x + block(x).relu()
        return self.head(x)


def drawn_by_torch() -> float:
    return float(torch.rand(()))


@alike
def weights_of_a_layer_that_is_not_called(run):
    class Normed(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(F.layer_norm(self.fc(x), [13], self.norm.weight, self.norm.bias))

    trained(run, Normed(fc=nn.Linear(6, 13), norm=nn.LayerNorm(13), head=nn.Linear(13, 3)))


@refused("use a weight only in the forward of its own block", IN_ROWS)
def weights_of_another_block(run):
    class Tied(Residual):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(F.linear(x, self.blocks[0].weight))  # <-

    trained(run, Tied(drawn_by_torch))


@alike
def layer_drop(run):
    trained(run, Residual(drawn_by_torch))


@alike
def layer_drop_by_numpy(run):
    """As fairseq writes it: np.random.uniform in the forward."""
    trained(run, Residual(np.random.uniform))


@alike
def stochastic_depth(run):
    """A mask for each sample."""

    class Block(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            keep = (torch.rand(len(x), 1) < 0.8).float() / 0.8
            return x + keep * super().forward(x).relu()

    trained(run, nn.Sequential(Block(6, 6), Block(6, 6), nn.Linear(6, 3)))


@alike
def dropout_scheduled(run):
    model, _ = placed(run)
    for step in steps(run, epochs=2):
        model[3].p = 0.1 * (1 + step.epoch)
        for x, y in step:
            step.backward(sum=summed(model(x), y))
        step.update()


@refused(
    "a backward other than step.backward goes through the placed model, whose weights are sharded by rows", IN_ROWS
)
def adversarial(run):
    """FGSM: the gradient with respect to the inputs, then the loss of what is moved along it."""
    model, _ = placed(run, nn.Sequential(nn.Linear(6, 13), nn.ReLU(), nn.Linear(13, 3)))
    for step, x, y in micro_batches(steps(run)):
        moved = x.clone().requires_grad_()
        [gradient] = torch.autograd.grad(summed(model(moved), y), moved)  # <-
        step.backward(sum=summed(model(x + 0.1 * gradient.sign()), y))


@alike
def inputs_with_gradients(run):
    model, _ = placed(run)
    for step, x, y in micro_batches(steps(run)):
        noisy = x.clone().requires_grad_()
        step.backward(sum=summed(model(noisy), y))
        assert noisy.grad is not None


@alike
def vae(run):
    class Vae(Parts):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            mu, logvar = self.encoder(x).chunk(2, 1)
            return self.decoder(mu + torch.randn_like(mu) * (0.5 * logvar).exp()), mu, logvar

    def loss(model, x, _):
        found, mu, logvar = model(x)
        kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum()
        return F.mse_loss(found, x, reduction="sum") + kl

    trained(run, Vae(encoder=nn.Linear(6, 4), decoder=nn.Linear(2, 6)), loss)


# Averages of the weights.


@alike
def ema_by_hand(run):
    model, _ = placed(run)
    shadow = deepcopy({name: each.detach() for name, each in model.state_dict().items()})
    for step in computed(steps(run), model):
        step.update()
        with torch.no_grad():
            for name, each in model.state_dict().items():
                if each.is_floating_point():
                    shadow[name].mul_(0.9).add_(each, alpha=0.1)
                else:
                    shadow[name].copy_(each)


@alike
def ema_by_deepcopy_before(run):
    """The average is a model of its own, copied before run.place."""
    model = net()
    average = deepcopy(model).requires_grad_(False)
    model, _ = placed(run, model)
    for step in computed(steps(run), model):
        step.update()
        with torch.no_grad():
            for mine, its in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(whole(its), 0.1)
            for mine, its in zip(average.buffers(), model.buffers(), strict=True):
                mine.copy_(its)


@refused("the placed model cannot be copied, because its weights are sharded by rows", IN_ROWS)
def ema_by_deepcopy_after(run):
    """The average is a model of its own, copied after run.place."""
    model, _ = placed(run)
    average = deepcopy(model)  # <-
    for step in computed(steps(run), model):
        step.update()
        with torch.no_grad():
            for mine, its in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(its, 0.1)


@refused("the placed model cannot be copied, because its weights are sharded by rows", IN_ROWS)
def swa(run):
    """torch.optim.swa_utils, with what it averages copied after run.place."""
    model, _ = placed(run)
    averaged = AveragedModel(model)  # <-
    for step in computed(steps(run, epochs=2), model):
        step.update(lr=1e-2 if step.epoch == 0 else 1e-3)
        if step.epoch:
            averaged.update_parameters(model)


# Other ways to step.


@refused("a backward other than step.backward|a backward that is not step.backward")
def sam(run):
    """Sharpness-aware minimization: up along the gradient, and a second forward and backward there."""
    model, _ = placed(run)
    for step, x, y in micro_batches(even(run)):
        summed(model(x), y).backward()  # <-
        with torch.no_grad():
            moves = [0.05 * each.grad / each.grad.norm() for each in model.parameters()]
            for each, move in zip(model.parameters(), moves, strict=True):
                each.add_(move)
        step.backward(sum=summed(model(x), y))


@refused("a gradient of the placed model was modified")
def manual_sgd(run):
    model, _ = placed(run)
    for step in computed(even(run), model):
        with torch.no_grad():
            for each in model.parameters():
                each.grad.add_(each, alpha=1e-4)  # <-
                each -= 0.1 * each.grad
        step.update()


@refused("0.weight was modified|got mixed torch.Tensor and DTensor")
def manual_sgd_of_plain_weights(run):
    model, _ = placed(run)
    for step in even(run):
        for x, y in step:
            step.backward(sum=summed(model(x), y))
        with torch.no_grad():
            for each in model.parameters():
                each -= 0.1 * each.grad  # <-
        step.update()


@refused("a gradient of the placed model was modified")
def grad_scaler(run):
    model, optimizer = placed(run)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for step in even(run):
        for x, y in step:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = summed(model(x), y)
            step.backward(sum=scaler.scale(loss))
        scaler.step(optimizer)  # <-
        scaler.update()


@refused("a gradient of the placed model was modified")
def gradient_noise(run):
    model, _ = placed(run)
    for step in computed(even(run), model):
        for each in model.parameters():
            each.grad += 0.01 * torch.randn_like(each)  # <-
        step.update()


@alike
def autocast(run):

    def loss(model, x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = model(x)
        return summed(outputs.float(), y)

    trained(run, net(), loss)


@alike
def recomputed(run):
    """torch.utils.checkpoint in the forward."""

    class Recomputed(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.body, x, use_reentrant=False))

    body = nn.Sequential(nn.Linear(6, 13), nn.ReLU(), nn.Dropout(0.2))
    trained(run, Recomputed(body=body, head=nn.Linear(13, 3)))


# Schedules.


@refused("the lr of an optimizer group was changed, for example by a scheduler")
def scheduler_after_place(run):
    model, optimizer = placed(run)
    scheduler = CosineAnnealingLR(optimizer, 10)
    for step in computed(even(run), model):
        step.update()
        scheduler.step()  # <-


@alike
def scheduler_read(run):
    """A scheduler of an optimizer of its own, whose rates alone are used."""
    aside = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.1)
    scheduler = CosineAnnealingLR(aside, 10)
    model, _ = placed(run)
    for step in computed(steps(run), model):
        step.update(lr=scheduler.get_last_lr()[0])
        aside.step()
        scheduler.step()


@alike
def one_cycle_ported(run):
    model = net()
    model, optimizer = run.place(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.95))
    for step in computed(steps(run, epochs=2), model):
        share = step.samples_seen / 80
        rise = share / 0.3 if share < 0.3 else (1 - share) / 0.7
        for group in optimizer.param_groups:
            group["momentum"] = 0.95 - 0.1 * rise
        step.update(lr=0.01 + 0.09 * rise)


@refused("0.weight was frozen")
def frozen_after_an_epoch(run):
    model, _ = placed(run)
    for step in even(run, epochs=2):
        if step.epoch == 1:
            for each in model[0].parameters():
                each.requires_grad_(False)  # <-
        for x, y in step:
            step.backward(sum=summed(model(x), y))
        step.update()


@refused("0.weight was unfrozen")
def unfrozen_after_an_epoch(run):
    model = net()
    model[0].requires_grad_(False)
    rest = [each for each in model.parameters() if each.requires_grad]
    model, _ = run.place(model, torch.optim.SGD(rest, lr=0.1))
    for step in even(run, epochs=2):
        if step.epoch == 1:
            model[0].requires_grad_(True)  # <-
        for x, y in step:
            step.backward(sum=summed(model(x), y))
        step.update()


@alike
def rested_after_an_epoch(run):
    model = net()
    groups = [{"params": model[:2].parameters()}, {"params": model[2:].parameters()}]
    model, optimizer = run.place(model, torch.optim.AdamW(groups, lr=1e-2))
    for step in computed(steps(run, epochs=2), model):
        optimizer.param_groups[0]["lr_scale"] = float(step.epoch == 0)
        step.update()


@refused("0.bias was replaced|Sharding propagation failed")
def pruned_after_an_epoch(run):
    model, _ = placed(run)
    for step in computed(even(run, epochs=2), model):
        step.update()
        if step.every(epochs=1):
            prune.l1_unstructured(model[0], "weight", 0.5)  # <-


@alike
def batchnorm_frozen_in_each_epoch(run):
    """Fine-tuning: everything in training but BatchNorm."""
    model, _ = placed(run)
    for step in steps(run, epochs=2):
        model.train()
        for each in model.modules():
            if isinstance(each, nn.BatchNorm1d):
                each.eval()
        for x, y in step:
            step.backward(sum=summed(model(x), y))
        step.update()


@refused("1 was switched to evaluation mode")
def batchnorm_frozen_in_a_microbatch(run):
    model, _ = placed(run)
    for step, x, y in micro_batches(even(run)):
        model[1].eval()
        step.backward(sum=summed(model(x), y))  # <-


# Several tasks, other batches, hooks and figures.


@refused("the loss depends on a parameter of shape [2] that is not in the placed model")
def learned_weights_outside(run):
    """The uncertainty of several tasks, learned, and given to the optimizer alone."""
    uncertainty = nn.Parameter(torch.zeros(2))
    model, _ = placed(run)
    for step, x, y in micro_batches(even(run)):
        outputs = model(x)
        losses = torch.stack([summed(outputs, y), outputs.square().sum()])
        step.backward(sum=(torch.exp(-uncertainty) * losses + uncertainty).sum())  # <-


@refused("the loss depends on a tensor of shape [2] that requires a gradient, was modified since")
def learned_tensor_outside(run):
    """The same as a plain tensor, with an optimizer of its own."""
    uncertainty = torch.zeros(2, requires_grad=True)
    own = torch.optim.SGD([uncertainty], lr=0.1)
    model, _ = placed(run)
    for step in even(run):
        for x, y in step:
            outputs = model(x)
            losses = torch.stack([summed(outputs, y), outputs.square().sum()])
            step.backward(sum=(torch.exp(-uncertainty) * losses + uncertainty).sum())  # <-
        step.update()
        own.step()


@alike
def points_outside(run):
    """Inputs that require a gradient, as those of a differential equation, which nothing trains."""
    points = torch.linspace(-1, 1, 42).view(7, 6).requires_grad_()
    model, _ = placed(run)
    for step, x, y in micro_batches(steps(run, epochs=2)):
        step.backward(sum=summed(model(x), y) + len(x) * model(points).square().mean())


@alike
def learned_weights_inside(run):
    class Weighted(Parts):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            outputs = self.net(x)
            losses = torch.stack([summed(outputs, y), outputs.square().sum()])
            return (torch.exp(-self.uncertainty) * losses + len(x) * self.uncertainty).sum()

    weighted = Weighted(net=net(), uncertainty=nn.Parameter(torch.zeros(2)))
    trained(run, weighted, lambda model, x, y: model(x, y))


class Records(Dataset[dict[str, Any]]):
    """Samples as dicts, with a list and a string among them."""

    def __init__(self, samples: int) -> None:
        self.tensors = data(samples).tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": self.tensors[0][index], "label": self.tensors[1][index], "extra": [index], "name": str(index)}


@alike
def dict_batches(run):
    model, _ = placed(run)
    for step in run.steps(Records(40), batch=16, microbatches=4, epochs=1):
        for batch in step:
            assert len(batch["name"]) == len(batch["label"])
            step.backward(sum=summed(model(batch["image"]), batch["label"]))
        step.update()


@alike
def deep_supervision(run):
    """Heads that are used in turn, and weighed."""

    class Heads(Parts):
        def forward(self, x: Tensor) -> list[Tensor]:
            found = []
            for body, head in zip(self.body, self.heads, strict=True):
                x = body(x).relu()
                found.append(head(x))
            return found

    def loss(model, x, y):
        parts = zip((0.3, 0.3, 1.0), model(x), strict=True)
        return sum(weight * summed(outputs, y) for weight, outputs in parts)

    body, heads = (nn.ModuleList(nn.Linear(6, size) for _ in range(3)) for size in (6, 3))
    trained(run, Heads(body=body, heads=heads), loss)


@alike
def gradients_logged(run):
    """Norms of p.grad for a log, which are nan before the update; gradients emptied where none are."""
    model, optimizer = placed(run)
    seen = []
    for step in steps(run):
        model.zero_grad()
        for x, y in step:
            step.backward(sum=summed(model(x), y))
        norms = {name: each.grad.norm().item() for name, each in model.named_parameters() if each.grad is not None}
        total = torch.stack([each.grad.detach().square().sum() for each in model.parameters()]).sum().sqrt()
        seen.append((norms, float(total)))
        step.update(clip=1.0)
        weights = optimizer.param_groups[0]["params"]
        run.log(norm=step.norm, weights=sum(float(each.data.detach().norm()) for each in weights))


@alike
def figures_of_training(run):
    """Running figures of what this process has seen, in Python and in tensors."""
    model, _ = placed(run)
    running, correct, seen = torch.zeros(()), 0, 0
    for step in steps(run):
        for x, y in step:
            outputs = model(x)
            loss = summed(outputs, y)
            step.backward(sum=loss)
            running += loss.detach()
            correct += int((outputs.argmax(1) == y).sum())
            seen += len(y)
        step.update()
    assert 0 <= correct <= seen


@refused("run.place: 0.weight has a gradient hook")
def gradient_hook_before(run):
    model = net()
    for each in model.parameters():
        each.register_hook(lambda gradient: gradient.clamp(-1, 1))
    run.place(model, adam(model))  # <-


@refused("a gradient hook was added to 0.weight")
def gradient_hook_afterwards(run):
    """A hook that runs once a gradient is added up."""
    model, _ = placed(run)
    for step in computed(even(run), model):
        step.update()
        model[0].weight.register_post_accumulate_grad_hook(lambda each: None)  # <-


@alike
def activation_hook(run):
    """A gradient that is clipped on its way through the activations."""

    def loss(model, x, y):
        outputs = model(x)
        outputs.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        return summed(outputs, y)

    trained(run, net(), loss)


@alike
def forward_hook(run):
    """Features that are looked at, and added to the loss."""
    model, _ = placed(run)
    features: dict[str, Tensor] = {}
    model[0].register_forward_hook(lambda module, inputs, outputs: features.update(hidden=outputs))
    for step, x, y in micro_batches(steps(run)):
        step.backward(sum=summed(model(x), y) + 0.01 * features["hidden"].square().sum())


@alike
def full_backward_hook(run):
    """Gradients of a module's inputs, scaled."""
    model, _ = placed(run)
    model[4].register_full_backward_hook(lambda module, inner, outer: tuple(0.5 * each for each in inner))
    for step, x, y in micro_batches(steps(run)):
        step.backward(sum=summed(model(x), y))


@alike
def gradient_reversal(run):
    class Reversed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return -0.3 * gradient

    class Adapted(Parts):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.body(x).relu()
            return self.head(hidden), self.domain(Reversed.apply(hidden))

    def loss(model, x, y):
        outputs, domain = model(x)
        return summed(outputs, y) + summed(domain, y.clamp(max=1))

    trained(run, Adapted(body=nn.Linear(6, 8), head=nn.Linear(8, 3), domain=nn.Linear(8, 2)), loss)


@alike
def language_model(run):
    """Weighed by tokens that are no padding."""
    texts = [torch.arange(1, 3 + number % 5) % 7 for number in range(24)]

    def padded(items: list[Tensor]) -> dict[str, Tensor]:
        return {"ids": nn.utils.rnn.pad_sequence(items, batch_first=True)}

    model, _ = placed(run, nn.Sequential(nn.Embedding(8, 5), nn.Linear(5, 8)))
    own = run.steps(texts, batch=8, microbatches=4, steps=3, collate=padded, weight=lambda b: int((b["ids"] > 0).sum()))
    for step in own:
        for batch in step:
            logits = model(batch["ids"][:, :-1]).flatten(0, 1)
            step.backward(sum=summed(logits, batch["ids"][:, 1:].flatten(), ignore_index=0))
        step.update()


@alike
def recurrent(run):
    """An LSTM with a state of its own for each micro-batch."""

    class Reader(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.cell(x.view(len(x), 3, 2))[0][:, -1])

    trained(run, Reader(cell=nn.LSTM(2, 5, batch_first=True), head=nn.Linear(5, 3)), clip=0.5)


@alike
def drawn_between(run):
    """Numbers for a whole step, drawn before its micro-batches and after its update, from three generators."""
    model, _ = placed(run)
    rate = 1e-2
    for step in steps(run):
        share = np.random.beta(0.2, 0.2)
        for x, y in step:
            outputs = model(share * x + (1 - share) * x.flip(0))
            step.backward(sum=share * summed(outputs, y) + (1 - share) * summed(outputs, y.flip(0)))
        step.update(lr=rate)
        rate = 1e-2 * (0.5 + random.random() + float(torch.rand(())))


@alike
def drawn_after_the_micro_batches(run):
    """Numbers for the next step, drawn before the update. In the last step a rank of three has no micro-batch."""
    model, _ = placed(run, nn.Sequential(nn.Linear(6, 13), nn.Dropout(0.3), nn.ReLU(), nn.Linear(13, 3)))
    share = 0.5
    for step in run.steps(data(33), batch=16, microbatches=4, epochs=2):
        for x, y in step:
            outputs = model(share * x + (1 - share) * x.flip(0))
            step.backward(sum=share * summed(outputs, y) + (1 - share) * summed(outputs, y.flip(0)))
        share = (np.random.random() + random.random() + float(torch.rand(()))) / 3
        step.update()


@refused("run.steps: torch.autocast is enabled")
def autocast_around_the_loop(run):
    model, _ = placed(run)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for step in run.steps(data(36), batch=18, microbatches=6, epochs=1):  # <-
            for x, y in step:
                step.backward(sum=summed(model(x), y))
            step.update()


@refused("step 1: torch.autocast is enabled")
def autocast_around_the_iteration(run):
    model, _ = placed(run)
    iterator = even(run)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for step in iterator:  # <-
            for x, y in step:
                step.backward(sum=summed(model(x), y))
            step.update()


@alike
def noisy_evaluation_that_sets_the_rate(run):
    """A validation loss as of a VAE, whose noise is drawn from three generators; and numbers drawn after it."""
    model, _ = placed(run)
    rate, best = 1e-2, float("inf")
    for step in computed(even(run, epochs=4), model):
        step.update(lr=rate)
        if step.every(steps=2):
            noisy = ((x + np.random.rand() * torch.randn_like(x) + random.random(), y) for x, y in run.each(data()))
            loss = run.sum(summed(model(x), y) for x, y in noisy) / 40
            rate *= (1.0 if loss < best else 0.5) * (0.9 + 0.1 * float(torch.rand(())))
            best = min(best, loss)


@alike
def temperature_returned(run):
    """CLIP's: a parameter of what is in no block, and a view of one in a block, are what the model returns."""

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x), self.bias[:1]

    class Returning(Parts):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            for layer in self.layers:
                x, shift = layer(x)
                x = x.tanh() + shift
            return x, self.temperature

    def loss(model, x, y):
        outputs, temperature = model(x)
        return summed(temperature.exp() * outputs, y)

    layers = nn.ModuleList([Scaled(6, 6), Scaled(6, 3)])
    trained(run, Returning(layers=layers, temperature=nn.Parameter(torch.ones(1))), loss)


@alike
def layer_drop_by_python(run):
    trained(run, Residual(random.random))


@refused("sharded weights are read within the step", IN_ROWS)
def weight_penalty(run):
    """L2 by hand, over what the loop finds in the model."""
    model, _ = placed(run)
    for step, x, y in micro_batches(steps(run)):
        l2 = sum(each.square().sum() for each in model.parameters())  # <-
        step.backward(sum=summed(model(x), y) + 1e-4 * len(x) * l2)


@alike
def weight_penalty_in_the_forward(run):
    class Penalized(Parts):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            outputs = self.net(x)
            return outputs, self.net[0].penalty + self.net[2].penalty

    class PenalizedLinear(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.penalty = self.weight.square().sum() + self.bias.abs().sum()
            return super().forward(x)

    def loss(model, x, y):
        outputs, penalty = model(x)
        return summed(outputs, y) + 1e-3 * len(x) * penalty

    layers = nn.Sequential(PenalizedLinear(6, 13), nn.ReLU(), PenalizedLinear(13, 3))
    trained(run, Penalized(net=layers), loss)


@refused("the loss depends on this rank's shard of 0.weight", IN_ROWS)
def weight_penalty_of_rows(run):
    """What a rank has of the weights before a forward, without an exchange."""
    model, _ = placed(run)
    for step, x, y in micro_batches(even(run)):
        weight = model[0].weight
        own = weight.to_local() if hasattr(weight, "to_local") else weight
        step.backward(sum=summed(model(x), y) + own.square().sum())  # <-


# What torch has for less memory, for evaluation and for parts that rest.


def recomputed_whole_model(run, model=None, **options):
    model, _ = placed(run, model or nn.Sequential(nn.Linear(6, 13), nn.ReLU(), nn.Dropout(0.3), nn.Linear(13, 3)))
    for step, x, y in micro_batches(steps(run, epochs=2), clip=1.0):
        step.backward(sum=summed(checkpoint(model, x, use_reentrant=False, **options), y))


@alike
def recomputed_by_the_loop(run):
    recomputed_whole_model(run)


@alike
def evaluated_in_inference_mode(run):
    model, _ = placed(run)
    rate = 1e-2
    for step in computed(steps(run, epochs=2), model):
        step.update(lr=rate)
        if step.every(epochs=1):
            with torch.inference_mode():
                rate = 1e-2 / (1 + run.sum(summed(model(x), y) for x, y in run.each(data())) / 40)


class Resting(nn.Sequential):
    """Keeps its first part in evaluation, as a frozen backbone, by a train() that returns nothing."""

    def train(self, mode: bool = True) -> None:  # type: ignore[override]
        super().train(mode)
        self[0].eval()


@alike
def frozen_part_that_overrides_train(run):
    resting = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)).requires_grad_(False)
    head = nn.Sequential(nn.Linear(6, 13), nn.Dropout(0.3), nn.ReLU(), nn.Linear(13, 3))
    model = Resting(resting, head)
    trained = torch.optim.AdamW(head.parameters(), lr=1e-2)
    model, _ = run.place(model, trained)
    for step in steps(run, epochs=2):
        model.train()
        for x, y in step:
            step.backward(sum=summed(model(x), y))
        step.update()
        if step.every(epochs=1):
            run.sum(summed(model(x), y) for x, y in run.each(data()))


@refused("do not change requires_grad, because this strategy gathers weights as they were at run.place", IN_ROWS)
def frozen_for_a_forward(run):
    """As the discriminator is in the turn of a GAN's generator."""
    model, _ = placed(run)
    for step, x, y in micro_batches(even(run, epochs=2)):
        model[0].requires_grad_(False)
        outputs = model(x)  # <-
        model[0].requires_grad_(True)
        step.backward(sum=summed(outputs, y))


@refused("do not change requires_grad, because this strategy gathers weights as they were at run.place", IN_ROWS)
def frozen_for_an_evaluation(run):
    model, _ = placed(run)
    for step in computed(steps(run, epochs=2), model):
        step.update()
        model[0].requires_grad_(False)  # <-
        run.sum(summed(model(x), y) for x, y in run.each(data()))
        model[0].requires_grad_(True)


@alike
def frozen_after_a_forward_and_back(run):
    model, _ = placed(run)
    for step, x, y in micro_batches(steps(run, epochs=2)):
        outputs = model(x)
        model[0].requires_grad_(False)
        model[0].requires_grad_(True)
        step.backward(sum=summed(outputs, y))


@refused("parameter head.weight is float64 and body.weight is float32", IN_ROWS)
def weights_of_two_dtypes(run):
    class Mixed(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x).tanh().double())

    mixed = Mixed(body=nn.Linear(6, 13), head=nn.Linear(13, 3, dtype=torch.float64))
    model, _ = run.place(mixed, adam(mixed))  # <-
    for step, x, y in micro_batches(even(run)):
        step.backward(sum=summed(model(x), y))
