"""Models that can be cut into stages, with traps of their own, and the trace of their training."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import toys
from torch import Tensor, nn
from toys import CLASSES, Case, Trace

from lockstep.comm.world import World
from lockstep.core.order import Step
from lockstep.core.shard import MaybeSharded, Shard
from lockstep.parallel.engine import Engine


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
        return self.again(self.once(x).relu()) * self.scale


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
        return self.head(self.last(self.twice(x)) / rows)


def mlp() -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(108, 16), nn.ReLU(inplace=True), nn.Dropout(0.2)]
    for _ in range(5):
        layers += [nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(16, 16), nn.GELU(), nn.Linear(16, CLASSES))


def resnet18() -> nn.Module:
    import timm

    return timm.create_model("resnet18", num_classes=CLASSES)


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


def recipe(model: str = "skipping", **more: Any) -> Case:
    """Return a small recipe that is trained in a pipeline, cut by parameters alone."""
    return Case(**{"model": MODELS[model], "strategy": "pipeline", "samples": (11, 8, 3), "measured": False, **more})


def in_pipeline(case: Case, options: Mapping[str, Any]) -> Case:
    """Return a case with these options, in a pipeline of one process too."""
    return replace(case, options=tuple(options.items()), alone="pipeline")


def own(tensors: Mapping[str, MaybeSharded]) -> Trace:
    """Return a hash for each tensor that lies on this rank, which in a pipeline has it whole."""
    return {name: toys.hashed(held) for name, held in tensors.items() if not isinstance(held, Shard) or _is_here(held)}


def _is_here(shard: Shard) -> bool:
    return shard.tensor.shape == shard.shape


def _gradients(training: Engine, step: Step) -> Trace:
    return {f"gradient {step.number} {name}": text for name, text in own(training.gradients()).items()}


def own_trace(world: World, case: Case) -> Trace:
    """Train and return what this rank can tell: losses, outputs and norms, and a hash of all that lies here."""
    training, trace = toys.trained(world, case, noted=_gradients)
    state = training.state()
    training.close()
    parts = {"model": state.model, "optimizer": state.optimizer, "ema": state.ema or {}}
    names = [f"{part} {name}" for part, tensors in parts.items() for name in tensors]
    hashes = {f"{part} {name}": text for part, tensors in parts.items() for name, text in own(tensors).items()}
    return {**trace, **hashes, "scalars": str(state.scalars), "names": str(names)}
