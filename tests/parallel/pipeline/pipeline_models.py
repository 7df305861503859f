"""Models that can be cut into stages, with traps of their own, and the trace of their training."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import toys
from torch import Tensor, nn
from toys import Trace

from lockstep.comm.world import World
from lockstep.core.order import Step, cut
from lockstep.core.precision import Precision
from lockstep.core.shard import MaybeSharded, Shard, local_tensor
from lockstep.models.freezing import freeze
from lockstep.parallel.engine import Engine, State
from lockstep.parallel.groups import ParameterGroup, settings
from lockstep.parallel.layerwise import Norms
from lockstep.parallel.layouts.base import trained_parameters
from lockstep.parallel.numerics import Numerics
from lockstep.parallel.optimize import make_optimizer
from lockstep.parallel.optimizer_state import Named
from lockstep.strategies import pipeline, single
from lockstep.tasks.base import MicroBatch, Problem
from lockstep.tasks.classification import Classification

CLASSES = 5


class Doubled(nn.Module):
    """Uses its weight twice, leaves one out, and writes into what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.once = nn.Linear(8, 8)
        self.again = nn.Linear(8, 8)
        self.again.weight = self.once.weight
        self.unused = nn.Parameter(torch.ones(3, 2))
        self.scale = nn.Parameter(torch.tensor(1.1))
        self.frozen = nn.Parameter(torch.full((8,), 0.5), requires_grad=False)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        x += self.frozen
        result: Tensor = self.again(self.once(x).relu()) * self.scale
        return result


class Skipping(nn.Module):
    """Strings modules together in its own code: a skip over several stages, weights of its own, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.position = nn.Parameter(torch.zeros(1, 8, 6, 6))
        self.drop = nn.Dropout(0.3)
        self.mix = nn.Conv2d(8, 8, 1)
        self.late = nn.BatchNorm2d(8, momentum=None)
        self.act = nn.ReLU(inplace=True)
        self.twice = Doubled()
        self.last = nn.Dropout(0.2)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, images: Tensor, scale: float = 1.0) -> Tensor:
        rows = images.shape[2]  # crosses every cut
        start = self.norm(self.stem(images)) + self.position
        x = self.act(self.late(self.mix(self.drop(start) * scale)))
        x = (x + start).mean((2, 3))
        head: Tensor = self.head(self.last(self.twice(x)) / rows)
        return head


def mlp() -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(108, 16), nn.ReLU(inplace=True), nn.Dropout(0.2)]
    for _ in range(5):
        layers += [nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(16, 16), nn.GELU(), nn.Linear(16, CLASSES))


def resnet18() -> nn.Module:
    import timm

    model: nn.Module = timm.create_model("resnet18", num_classes=CLASSES)
    return model


def vit() -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        img_size=6,
        patch_size=2,
        embed_dim=16,
        depth=4,
        num_heads=2,
        num_classes=CLASSES,
        drop_path_rate=0.3,
        pos_drop_rate=0.1,
        proj_drop_rate=0.1,
        attn_drop_rate=0.1,
        init_values=0.1,
    )


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "resnet18": resnet18, "vit": vit, "skipping": Skipping}


@dataclass(frozen=True)
class Case:
    """A recipe, small: `samples` are the sizes of the steps."""

    model: str = "skipping"
    microbatches: int = 4
    samples: tuple[int, ...] = (11, 8, 3)
    optimizer: str = "sgd"
    precision: Precision = "fp32"
    clip: float | None = None
    ema: bool = False
    channels_last: bool = False
    offload_activations: bool = False
    initial_scale: float = 1024.0
    static_scale: float | None = None
    skip_nonfinite: bool = False
    poisoned: int | None = None
    size: int = 6
    measured: bool = False  # whether stages are cut by operations too
    by_hand: dict[str, Any] = field(default_factory=dict)  # the optimizer's further options
    freeze: tuple[str, ...] = ()
    groups: tuple[ParameterGroup, ...] = ()


def build(case: Case) -> nn.Module:
    """Build the model with the same weights each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MODELS[case.model]()
    if case.freeze:
        freeze(model, case.freeze)
    return model


def engine(world: World, case: Case, options: dict[str, Any] | None) -> Engine:
    """Start a pipeline, or the plain engine for options None."""
    options_of = {"sgd": {"momentum": 0.9, "nesterov": True}}.get(case.optimizer, {}) | case.by_hand
    names = [name for name, _ in trained_parameters(build(case))]
    special = settings(names, case.groups, {}) if case.groups else {}

    def optimizer(trained: Sequence[Named], norms: Norms) -> torch.optim.Optimizer:
        return make_optimizer(
            trained,
            name=case.optimizer,
            lr=0.1,
            weight_decay=0.01,
            norms=norms,
            settings=lambda name: special.get(name, {}),
            **options_of,
        )

    example = (torch.empty(2, 3, case.size, case.size, device="meta"),)
    problem = Problem(Classification(topk=(1,)), partial(build, case), example=example if case.measured else None)
    numerics = Numerics(
        microbatches=case.microbatches,
        seed=7,
        precision=case.precision,
        initial_scale=case.initial_scale,
        static_scale=case.static_scale,
        skip_nonfinite=case.skip_nonfinite,
        ema_decay=0.9 if case.ema else None,
        channels_last=case.channels_last,
        offload_activations=case.offload_activations,
    )
    if options is None:
        return single.Strategy().start(problem, optimizer, world, numerics)
    return pipeline.Strategy(**options).start(problem, optimizer, world, numerics)


def steps(case: Case) -> Iterator[tuple[Step, Tensor, Tensor]]:
    """Yield each step with all its samples."""
    generator = torch.Generator().manual_seed(3)
    seen = 0
    for number, samples in enumerate(case.samples):
        images = torch.randn(samples, 3, case.size, case.size, generator=generator)
        targets = torch.randint(CLASSES, (samples,), generator=generator)
        if number == case.poisoned:
            images[-1] = torch.inf
        yield Step(number, 0, seen, samples, seen, False), images, targets
        seen += samples


def trained(
    world: World, case: Case, options: dict[str, Any] | None, first: int = 0, state: State | None = None
) -> tuple[Engine, Trace]:
    """Train from step `first`, from `state` where given; return the engine and what every step said, to the bit."""
    training = engine(world, case, options)
    if state is not None:
        training.load(state)
    data_rank = pipeline.Strategy(**(options or {})).mesh(world.size).data_rank(world.rank)
    trace: Trace = {}
    for step, images, targets in list(steps(case))[first:]:
        cuts = cut(step.samples, min(case.microbatches, step.samples))
        mine = [
            MicroBatch(index, (images[list(own)], targets[list(own)]), len(own), len(own))
            for index, own in ((index, cuts[index]) for index, _ in data_rank.indices(len(cuts)))
        ]
        sums = training.forward_backward(mine, step)
        trace |= {f"gradient {step.number} {name}": text for name, text in own(training.gradients()).items()}
        update = training.update(toys.rate(step), case.clip)
        with training.evaluation() as predict:
            outputs = predict((images[:2],))
        norm = None if update.norm is None else update.norm.item().hex()
        trace[f"step {step.number}"] = f"{sums.loss.item().hex()} {norm} {update.applied} {update.loss_scale}"
        trace[f"outputs {step.number}"] = hashed(outputs)
    return training, trace


def own(tensors: Mapping[str, MaybeSharded]) -> Trace:
    """Return a hash for each tensor that lies on this rank."""
    return {name: hashed(held) for name, held in tensors.items() if not isinstance(held, Shard) or _lies_here(held)}


def hashed(held: MaybeSharded) -> str:
    """Return a hash of what lies here, which in a pipeline is the whole tensor."""
    tensor = local_tensor(held).detach()
    content = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return f"{hashlib.sha256(content).hexdigest()[:16]} {tensor.dtype} {tuple(tensor.shape)}"


def own_trace(world: World, case: Case, options: dict[str, Any] | None) -> Trace:
    """Train and return what this rank can tell: losses, outputs and norms, and a hash of all that lies here."""
    training, trace = trained(world, case, options)
    state = training.state()
    training.close()
    parts = {"model": state.model, "optimizer": state.optimizer, "ema": state.ema or {}}
    names = [f"{part} {name}" for part, tensors in parts.items() for name in tensors]
    hashes = {f"{part} {name}": text for part, tensors in parts.items() for name, text in own(tensors).items()}
    return {**trace, **hashes, "scalars": str(state.scalars), "names": str(names)}


def going_on(
    world: World, case: Case, options: dict[str, Any] | None, first: int, state: State | None
) -> tuple[Trace, State]:
    """Train from step `first`, from `state` where given, and return what the steps said and the state, whole."""
    training, trace = trained(world, case, options, first, state)
    whole = toys.whole_state(world, training)
    training.close()
    steps_alone = {name: text for name, text in trace.items() if not name.startswith("gradient")}
    return {**steps_alone, **toys.fingerprint(whole)}, toys.as_from_disk(whole)


def _lies_here(shard: Shard) -> bool:
    return shard.tensor.shape == shard.shape
