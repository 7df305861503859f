"""The section `recipe`: the model, the data, and all other settings that affect the trained weights."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal, Self, get_args

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator

from lockstep.common.names import format_suggestion
from lockstep.common.text import format_count
from lockstep.config.base import (
    BY_NAME,
    Floats,
    Fraction,
    Ints,
    Location,
    Name,
    NaturalFloat,
    NaturalInt,
    Paths,
    Patterns,
    PositiveFloat,
    PositiveFloats,
    PositiveInt,
    Section,
    Sha256,
    Threads,
    list_to_tuple,
    make_shorthand_validator,
)
from lockstep.core.precision import SCALED_PRECISIONS, Precision, get_default_static_scale, translate_precision
from lockstep.core.rate import Curve
from lockstep.core.work import compute_default_microbatches

Pixels = Annotated[int, Field(ge=1, le=1 << 14)]


class WeightsConfig(Section):
    """Pretrained weights from a file, a transformers folder or a Lockstep run.

    The path is ignored when recipes are compared, because only the values of the weights affect the result.
    """

    path: Location | None = None
    sha256: Sha256 | None = None  # hash of the tensors, which the run records, and verifies if you set it
    fresh: Patterns = ()  # parameters that keep their random initialization, such as a new head
    prefix: Name | None = None  # only load tensors whose names have this prefix, which is removed
    ema: bool = False  # load the averaged weights of a Lockstep run


class LoraConfig(Section):
    """Low-rank adapters (LoRA) from peft. All parameters are frozen, except the adapters and those in `train`."""

    target_modules: Annotated[
        Patterns, Field(min_length=1, description="the end of a module name, or a list of such ends")
    ]
    r: PositiveInt = 8
    alpha: PositiveFloat = 16.0
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    rslora: bool = False
    train: Patterns = ()  # additional parameters to train, such as a new head


Plan = Annotated[
    dict[str, str], Field(description="a mapping from module name patterns to kinds of splits: colwise, rowwise, ...")
]


class ModelConfig(Section):
    """A model from Lockstep, timm, torchvision or transformers, or a function at `package.module:function`."""

    name: Name
    source: Literal["auto", "lockstep", "timm", "torchvision", "transformers"] = "auto"
    pretrained: bool = False
    weights: Annotated[
        WeightsConfig | None, make_shorthand_validator("path", str), Field(description="a path, or a mapping of keys")
    ] = None
    lora: LoraConfig | None = None
    freeze: Patterns = ()  # names of parameters to freeze
    chunks: PositiveInt = 1  # number of chunks of heads and features, which strategy `tensor` distributes
    plan: Plan = Field(default_factory=dict)
    sequence_chunks: PositiveInt = 1  # number of chunks of a sequence, which strategy `context` distributes
    options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_chunks(self) -> Self:
        if self.plan and self.chunks == 1:
            raise ValueError("plan: requires more than 1 chunk, but chunks is 1; set chunks, or unset plan")
        if self.lora is not None and self.chunks > 1:
            raise ValueError("chunks: layers with adapters cannot be split into chunks; unset chunks or lora")
        return self


class AugmentConfig(Section):
    """Augmentation of training images. Random numbers only depend on the seed, the epoch and the sample index."""

    crop_padding: Annotated[int, Field(ge=0, le=1 << 14)] = 0  # zero padding per side in pixels before a random crop
    flip: bool = False  # flip horizontally with probability 1/2
    resized_crop: bool = False  # for image files: a random crop with an area in `resized_crop_scale`, then resized
    resized_crop_scale: Annotated[Floats, Field(min_length=2, max_length=2)] = (0.08, 1.0)


class DataConfig(Section):
    """A dataset, selected by name, or a function at `package.module:function`."""

    name: Name
    root: Location = "data"
    download: bool = True
    image_size: Pixels | None = None  # for image files and `synthetic`: height and width of model inputs
    resize_size: Pixels | None = None  # for image files: length of the short side before the center crop in evaluations
    augment: AugmentConfig = AugmentConfig()
    mean: Floats | None = None  # per channel, for values in [0, 1]; defaults to the mean of the dataset
    std: PositiveFloats | None = None
    exif: bool = True  # for image files: apply the EXIF orientation
    on_error: Literal["raise", "skip"] = "raise"
    collate: Name | None = None  # `package.module:function` that converts a list of samples to a batch of tensors
    options: dict[str, Any] = Field(default_factory=dict)


class LearningRateConfig(Section):
    """A learning rate.

    If `per_samples` is set, the linear scaling rule applies: `value` is the rate for a batch of `per_samples` samples.
    """

    value: PositiveFloat
    per_samples: PositiveInt | None = None


_BY_VALUE: Final = make_shorthand_validator("value", int, float)
_RATE: Final = "a number, or value and per_samples"


class ParameterGroupConfig(Section):
    """Optimizer settings for parameters with matching names. Each parameter belongs to the first matching group."""

    match: Annotated[Patterns, Field(min_length=1)]
    lr: Annotated[LearningRateConfig | None, _BY_VALUE, Field(description=_RATE)] = None
    lr_factor: PositiveFloat | None = None  # multiplies the optimizer's learning rate
    weight_decay: NaturalFloat | None = None
    options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_one_rate(self) -> Self:
        if self.lr is not None and self.lr_factor is not None:
            raise ValueError("lr and lr_factor are both set; set only one of the two")
        return self


class OptimizerConfig(Section):
    """The optimizer: `sgd`, `adamw`, `lars`, `lamb`, another class of torch.optim or timm.optim, or an import path."""

    name: Name = "sgd"
    lr: Annotated[LearningRateConfig, _BY_VALUE, Field(description=_RATE)]
    momentum: Fraction | None = None
    nesterov: bool | None = None
    weight_decay: NaturalFloat | None = None
    decay_bias_and_norm: bool = True  # whether weight decay applies to biases and other 1-dim parameters
    groups: Annotated[
        tuple[ParameterGroupConfig, ...],
        BeforeValidator(list_to_tuple),
        Field(description="a list of mappings of match, lr or lr_factor, weight_decay, options"),
    ] = ()
    layer_decay: Annotated[float, Field(gt=0, le=1)] | None = None  # ratio of a layer's learning rate to the next one's
    options: dict[str, Any] = Field(default_factory=dict)


def _check_schedule_name(name: str) -> str:
    if name in get_args(Curve) or ":" in name:
        return name
    raise ValueError(
        f"expected one of {', '.join(get_args(Curve))}, or "
        f"package.module:function{format_suggestion(name, get_args(Curve))}"
    )


class ScheduleConfig(Section):
    """A schedule (core/rate.py), or `package.module:function`, which returns a factor of the base learning rate."""

    name: Annotated[
        Curve | Name,
        AfterValidator(_check_schedule_name),
        Field(description="`cosine`, `linear`, `polynomial`, `steps`, `constant`, or an import path"),
    ] = "constant"
    each: Literal["step", "epoch"] = "step"
    warmup_epochs: NaturalFloat = 0.0
    warmup_steps: NaturalInt | None = None  # alternative to warmup_epochs
    warmup_factor: Annotated[float, Field(gt=0, le=1)] = 0.1
    min_lr: NaturalFloat = 0.0
    milestones: Floats = ()
    gamma: PositiveFloat = 0.1
    power: PositiveFloat = 1.0
    options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        if self.options and ":" not in self.name:
            raise ValueError(f"options: only supported for a custom schedule, not for {self.name}; unset options")
        return self

    @model_validator(mode="after")
    def _check_one_warmup(self) -> Self:
        if self.warmup_steps is None:
            return self
        if self.warmup_epochs:
            raise ValueError("warmup_epochs and warmup_steps are both set; set only one of the two")
        if self.each == "epoch":
            raise ValueError("each: epoch does not support warmup_steps; use warmup_epochs instead")
        return self


class TaskConfig(Section):
    """A built-in task, a class at `package.module:Class`, or `auto`, which infers the task from the data.

    The options of the task are additional keys of the same mapping.
    """

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    name: Name = "auto"


class LossConfig(Section):
    """The loss: `cross_entropy`, or a function of (outputs, targets) at `package.module:function`.

    The function must return a sum over samples, or a value for each sample.
    """

    name: Name = "cross_entropy"
    label_smoothing: Fraction = 0.0


class MixConfig(Section):
    """Mixup and CutMix within each micro-batch.

    `mixup` and `cutmix` are the parameters of the beta distributions. Set a parameter to 0 to disable the method.
    """

    mixup: NaturalFloat = 0.0
    cutmix: NaturalFloat = 0.0
    probability: Fraction = 1.0


class EmaConfig(Section):
    """An exponential moving average (EMA) of the weights, which is updated in each step and used in evaluations."""

    decay: Annotated[float, Field(gt=0, lt=1)] = 0.9999


class LossScaleConfig(Section):
    """The loss scale for fp16, which is dynamic unless `static` is set."""

    initial: PositiveFloat = 65536.0
    growth_interval: PositiveInt = 2000
    static: PositiveFloat | None = None  # a constant scale instead of a dynamic scale

    @model_validator(mode="after")
    def _check_static(self) -> Self:
        if self.static is not None and (self.initial, self.growth_interval) != (65536.0, 2000):
            raise ValueError("static: a static loss scale does not use initial and growth_interval; unset them")
        return self


def make_default_loss_scale(precision: object) -> LossScaleConfig:
    """Return the default loss scale for a precision."""
    return LossScaleConfig(static=get_default_static_scale(precision))


class StartingPoint(Section):
    """Identifies the state that `run.start_from` loaded. Lockstep sets this section; don't set it yourself."""

    weights_sha256: Sha256
    optimizer_sha256: Sha256 | None = None
    updates: NaturalInt | None = None  # number of completed optimizer updates


class Recipe(Section):
    """All settings that affect the trained weights."""

    task: Annotated[TaskConfig, BY_NAME, Field(description="a name, or a name and its options")] = TaskConfig()
    model: Annotated[ModelConfig, BY_NAME, Field(description="a name, or a mapping of keys")]
    data: Annotated[DataConfig, BY_NAME, Field(description="a name, or a mapping of keys")]
    batch: PositiveInt
    microbatch: PositiveInt | None = None  # maximum size; defaults to 32 samples if microbatches isn't set
    microbatches: Annotated[int, Field(ge=1, le=1 << 20)] = Field(
        default_factory=lambda validated: compute_default_microbatches(validated["batch"], validated.get("microbatch"))
    )
    evaluation_batch: PositiveInt | None = None  # samples per evaluation batch; defaults to the largest micro-batch
    epochs: PositiveInt | None = None
    steps: PositiveInt | None = None
    last_batch: Literal["keep", "drop"] = "keep"
    optimizer: Annotated[OptimizerConfig, BY_NAME, Field(description="a name, or a mapping of keys")]
    schedule: Annotated[ScheduleConfig, BY_NAME, Field(description="a name, or a mapping of keys")] = ScheduleConfig()
    loss: Annotated[LossConfig, BY_NAME, Field(description="a name, or a mapping of keys")] = LossConfig()
    metrics: Annotated[Paths, Field(description="a list of import paths")] = ()
    mix: MixConfig = MixConfig()
    ema: EmaConfig | None = None
    clip_norm: PositiveFloat | None = None
    precision: Annotated[Precision, BeforeValidator(translate_precision)] = "fp32"
    loss_scale: Annotated[
        LossScaleConfig,
        make_shorthand_validator("static", int, float),
        BeforeValidator(lambda value: {} if value == "dynamic" else value),
        Field(description="a number, `dynamic`, or a mapping of keys"),
    ] = Field(default_factory=lambda validated: make_default_loss_scale(validated.get("precision")))
    memory_format: Literal["contiguous", "channels_last"] = "contiguous"
    compile: bool = False
    batchnorm: Literal["local", "sync", "frozen"] = "local"  # micro-batch, step, or running statistics
    nonfinite: Literal["stop", "skip"] = "stop"
    topk: Ints = (1, 5)
    start: StartingPoint | None = None
    seed: Annotated[int, Field(ge=0, le=(1 << 63) - 1)] = 0
    threads: Threads = 1  # per process; on the CPU, the number of threads affects the trained weights

    @model_validator(mode="after")
    def _check_consistent(self) -> Self:
        if problems := find_contradictions(dict(self)):
            raise ValueError("\n".join(problems))
        return self


# Prefixes of recipe keys that evaluations of a checkpoint ignore.
TRAINING_KEYS: Final = (
    *("seed", "epochs", "steps", "last_batch", "optimizer", "schedule", "mix", "clip_norm", "loss_scale", "nonfinite"),
    *("start", "data.augment", "model.weights", "model.pretrained", "ema"),
)
_CURVE_OPTIONS: Final = {"milestones": "steps", "gamma": "steps", "power": "polynomial"}
_CURVES_WITHOUT_MINIMUM: Final = ("constant", "steps")


def find_keys_without_effect(recipe: Recipe) -> Iterator[str]:
    """Yield a note for each key that is set but has no effect, which is allowed, but rarely intended."""
    yield from _find_schedule_keys_without_effect(recipe.schedule, recipe.epochs)
    augment, mix = recipe.data.augment, recipe.mix
    if not augment.resized_crop and augment.resized_crop_scale != AugmentConfig().resized_crop_scale:
        yield "recipe.data.augment.resized_crop_scale has no effect: only resized_crop uses it, which is not set"
    if mix.probability != MixConfig().probability and not (mix.mixup or mix.cutmix):
        yield "recipe.mix.probability has no effect: neither mixup nor cutmix is set"
    if (mix.mixup or mix.cutmix) and recipe.batch == recipe.microbatches:
        yield (
            "recipe.mix has no effect: mixup and cutmix mix the samples of a micro-batch, but each micro-batch has a "
            "single sample"
        )
    if recipe.precision not in SCALED_PRECISIONS and recipe.loss_scale != make_default_loss_scale(recipe.precision):
        scaled = ", ".join(sorted(SCALED_PRECISIONS))
        yield f"recipe.loss_scale has no effect: only {scaled} use it, not {recipe.precision}"


def _find_schedule_keys_without_effect(schedule: ScheduleConfig, epochs: int | None) -> Iterator[str]:
    for key, curve in _CURVE_OPTIONS.items():
        if schedule.name != curve and getattr(schedule, key) != ScheduleConfig.model_fields[key].default:
            yield f"recipe.schedule.{key} has no effect: only the schedule {curve} uses it, not {schedule.name}"
    if schedule.name == "steps" and not schedule.milestones:
        yield "recipe.schedule has no effect: steps changes the learning rate at milestones, but none are set"
    if schedule.name == "steps" and epochs is not None:
        late = ", ".join(f"{milestone:g}" for milestone in schedule.milestones if milestone >= epochs)
        if late:
            end = format_count(epochs, "epoch")
            yield f"recipe.schedule.milestones has no effect at {late}: the run ends after {end}"
    if schedule.name in _CURVES_WITHOUT_MINIMUM and schedule.min_lr != ScheduleConfig().min_lr:
        yield f"recipe.schedule.min_lr has no effect: the schedule {schedule.name} does not use it"


def find_contradictions(recipe_keys: Mapping[str, object]) -> list[str]:
    """Return a message for each contradiction between recipe keys. The values may not have been validated yet."""
    problems = []
    if (recipe_keys.get("epochs") is None) == (recipe_keys.get("steps") is None):
        if recipe_keys.get("steps") is None:
            problems.append("neither epochs nor steps is set; set one of the two")
        else:
            problems.append("epochs and steps are both set; set only one of the two (recipe.epochs= unsets epochs)")
    batch, microbatches = recipe_keys.get("batch"), recipe_keys.get("microbatches")
    if type(batch) is int and type(microbatches) is int and microbatches > batch > 0:  # isinstance would accept bool
        problems.append(
            f"batch: {batch} samples cannot fill {microbatches} micro-batches; "
            f"use a batch of at least {microbatches}, or at most {batch} micro-batches"
        )
    microbatch = recipe_keys.get("microbatch")
    expected = (
        compute_default_microbatches(batch, microbatch)
        if type(batch) is int and type(microbatch) is int and microbatch > 0
        else microbatches
    )
    if type(microbatches) is int and microbatches != expected:
        problems.append(
            f"microbatch: {batch} samples in micro-batches of at most {microbatch} samples are {expected} "
            f"micro-batches, but microbatches is {microbatches}; set only one of the two (recipe.microbatches= unsets "
            f"microbatches)"
        )
    return problems
