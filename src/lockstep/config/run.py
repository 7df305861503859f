"""The section `run`: the outputs of a run, and where they are saved."""

from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator

from lockstep.common.location import check_location
from lockstep.common.names import format_choices
from lockstep.config.base import (
    BY_NAME,
    Location,
    Name,
    NaturalInt,
    PositiveFloat,
    PositiveInt,
    Section,
    list_to_tuple,
    make_shorthand_validator,
)

SINK_NAMES: Final = ("csv", "mlflow", "wandb")  # the sinks available by name, in addition to events.jsonl

RunLocation = Annotated[Location, AfterValidator(check_location)]  # a path, or the URL of a folder in object storage


class IntervalConfig(Section):
    """An interval, either in steps or in epochs."""

    steps: PositiveInt | None = None
    epochs: PositiveInt | None = None

    @model_validator(mode="after")
    def _check_one_interval(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            problem = "neither steps nor epochs is set" if self.steps is None else "steps and epochs are both set"
            raise ValueError(f"{problem}; set one of the two")
        return self


class StartFromConfig(Section):
    """The weights to start from: a checkpoint, or the newest checkpoint of a run.

    If `optimizer` is true, the optimizer state is loaded too.
    """

    run: RunLocation
    optimizer: bool = False


class PredictedConfig(Section):
    """The step time and peak memory that a plan predicts for a placement, each as the maximum over ranks."""

    strategy: Name
    processes: PositiveInt
    step_s: PositiveFloat
    peak_bytes: NaturalInt


def _check_sink_name(name: str) -> str:
    if name in SINK_NAMES or ":" in name:
        return name
    raise ValueError(f"no such sink{format_choices(name, [*SINK_NAMES, 'package.module:Class'])}")


class SinkConfig(Section):
    """A sink for events, in addition to the run folder. Its options are additional keys of the same mapping."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    name: Annotated[Name, AfterValidator(_check_sink_name)]


def _check_unique(sinks: tuple[SinkConfig, ...]) -> tuple[SinkConfig, ...]:
    names = [sink.name for sink in sinks]
    for name in SINK_NAMES:
        if names.count(name) > 1:
            raise ValueError(f"{name} is listed twice; keep one of the two")
    return sinks


class RunConfig(Section):
    """The outputs of a run. `dir` defaults to runs/<recipe>-<model>-<time>."""

    dir: RunLocation | None = None
    resume: RunLocation = "auto"  # auto, never, or the path or URL of a checkpoint or a run
    start_from: Annotated[
        StartFromConfig | None,
        make_shorthand_validator("run", str),
        Field(description="a run or a checkpoint, or a mapping of keys"),
    ] = None
    save_every: IntervalConfig = IntervalConfig(epochs=1)
    evaluate_every: IntervalConfig = IntervalConfig(epochs=1)
    key_file: str | None = None  # key for signing checkpoints; checkpoints without a valid signature are rejected
    keep: NaturalInt = 3  # number of recent checkpoints to keep; the latest and the best are always kept
    save_async: bool = False  # write checkpoints in the background, which needs memory for a copy of the state
    log_every: PositiveInt = 10  # number of steps between two `step` events
    digest_every: PositiveInt | Literal["auto", "off"] = "auto"  # interval in steps; auto: at most 0.5 % of the time
    tensorboard: bool = True
    sinks: Annotated[
        tuple[Annotated[SinkConfig, BY_NAME], ...],
        BeforeValidator(list_to_tuple),
        AfterValidator(_check_unique),
        Field(description="a list of `csv`, `wandb`, `mlflow` or import paths, each a name or a mapping of keys"),
    ] = ()
    probe: Literal["auto", "off"] = "auto"  # auto: check user code for hidden state and randomness, and warn
    predicted: PredictedConfig | None = None  # set by a plan; the run then reports the actual values too
