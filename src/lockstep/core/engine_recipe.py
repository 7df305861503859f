"""The keys of a recipe that an engine reads, as a protocol. An engine accepts any object with these attributes.

The keys have the same names and meanings as in config/recipe.py. Use `PlainRecipe` for engines without a configuration.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

from lockstep.core.precision import Precision

Nonfinite = Literal["stop", "skip"]
MemoryFormat = Literal["contiguous", "channels_last"]
BatchNorm = Literal["local", "sync", "frozen"]


class LossScale(Protocol):
    """The keys of the recipe's section `loss_scale`."""

    @property
    def initial(self) -> float: ...
    @property
    def growth_interval(self) -> int: ...
    @property
    def static(self) -> float | None: ...


class Ema(Protocol):
    """The keys of the recipe's section `ema`."""

    @property
    def decay(self) -> float: ...


class SequenceChunks(Protocol):
    """The only key of the recipe's section `model` that engines read."""

    @property
    def sequence_chunks(self) -> int: ...


class EngineRecipe(Protocol):
    """The keys of a recipe that an engine and the training loop read."""

    @property
    def batch(self) -> int: ...
    @property
    def microbatches(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def precision(self) -> Precision: ...
    @property
    def loss_scale(self) -> LossScale: ...
    @property
    def nonfinite(self) -> Nonfinite: ...
    @property
    def clip_norm(self) -> float | None: ...
    @property
    def ema(self) -> Ema | None: ...
    @property
    def memory_format(self) -> MemoryFormat: ...
    @property
    def compile(self) -> bool: ...
    @property
    def batchnorm(self) -> BatchNorm: ...
    @property
    def model(self) -> SequenceChunks: ...


@dataclass(frozen=True)
class PlainLossScale:
    """A LossScale with the recipe defaults."""

    initial: float = 65536.0
    growth_interval: int = 2000
    static: float | None = None


@dataclass(frozen=True)
class PlainEma:
    """An Ema with the given decay."""

    decay: float


@dataclass(frozen=True)
class PlainSequenceChunks:
    """SequenceChunks with the recipe default."""

    sequence_chunks: int = 1


@dataclass(frozen=True)
class PlainRecipe:
    """An EngineRecipe with the recipe defaults, except for `microbatches`, which you must set."""

    microbatches: int
    batch: int = 1
    seed: int = 0
    threads: int = 1
    precision: Precision = "fp32"
    loss_scale: LossScale = PlainLossScale()
    nonfinite: Nonfinite = "stop"
    clip_norm: float | None = None
    ema: Ema | None = None
    memory_format: MemoryFormat = "contiguous"
    compile: bool = False
    batchnorm: BatchNorm = "local"
    model: SequenceChunks = PlainSequenceChunks()


def make_nonfinite_advice(recipe: EngineRecipe | None) -> str:
    """Return the advice to give if a loss isn't finite. If `recipe` is None, the advice is for custom loops."""
    if recipe is None:
        return "lower the learning rate, clip with step.update(clip=...), or check the loss for log(0) and x/0"
    clip = "" if recipe.clip_norm else "set recipe.clip_norm, "
    return f"lower the learning rate, {clip}or skip such steps with recipe.nonfinite=skip"
