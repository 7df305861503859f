"""The events of a run. The training loop yields them, and sinks write them.

Units: `time` is in seconds since 1970, `seconds` is a duration in seconds, and `peak_bytes` is in bytes. `lr` is the
learning rate. `loss` is the sum of the losses divided by the weight of the step or evaluation. `samples_per_s` is the
number of training samples per second over all processes. The meaning of other metrics depends on the task.
"""

from dataclasses import dataclass, field
from typing import Literal

UNITS = {
    "time": "s since 1970-01-01 UTC",
    "seconds": "s",
    "samples": "training samples seen",
    "loss": "sum over the weight",
    "lr": "optimizer's learning rate",
    "norm": "L2 norm of the gradient before clipping",
    "samples_per_s": "training samples/s, all processes",
    "data_s": "s of a step in which rank 0 waited for its data",
    "weight_per_s": "training weight/s, all processes, in the task's unit",
    "flops_per_sample": "FLOP of forward and backward, matrix products only",
    "peak_flops_per_s": "FLOP/s of dense matrix products, all devices",
    "flops_per_s": "FLOP/s of the model, all processes",
    "mfu": "fraction of peak_flops_per_s",
    "peak_bytes": "bytes, peak memory of rank 0",
    "seconds_by_rank": "s of each rank, by activity",
    "peak_bytes_by_rank": "bytes, peak memory of each rank",
    "predicted": "step_s in s, peak_bytes in bytes, during a step",
    "measured": "step_s in s, peak_bytes in bytes, during a step",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Event:
    """The fields of all events: the number of completed steps, the epoch, and the number of training samples seen."""

    step: int
    epoch: int
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(_Event):
    """The run started, or resumed after `step` of `steps` steps. `again` is the number of unsaved steps to repeat."""

    steps: int
    epochs: float
    steps_per_epoch: int
    train_samples: int
    validation_samples: int
    batch: int
    microbatches: int
    processes: int
    strategy: str
    device: str
    parameters: int
    base_lr: float
    task: str = ""  # a description of the task, and why it was chosen
    monitor: str = "loss"  # name of the metric that selects the best evaluation
    higher: bool = False  # whether a higher value of the monitored metric is better
    unit: str = "samples"  # unit of the weights
    fractions: list[str] = field(default_factory=list)  # names of the metrics that are fractions between 0 and 1
    resumed_from: str | None = None
    again: int = 0
    flops_per_sample: int | None = None
    peak_flops_per_s: float | None = None  # sum over all devices of the run, if known
    backend: str = ""  # communication backend, if there are several ranks
    sharing: list[list[int]] = field(default_factory=list)  # groups of ranks that share a device
    replicas: list[str] = field(default_factory=list)  # the device of each replica, if a process has several replicas
    hash_seed: str = ""  # Python's hash seed: PYTHONHASHSEED, or "random"
    name: Literal["started"] = "started"


@dataclass(frozen=True, slots=True, kw_only=True)
class Warned(_Event):
    """A warning that results may depend on the placement. `culprit` is the cause, and `text` gives the details."""

    culprit: str
    text: str
    name: Literal["warning"] = "warning"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped(_Event):
    """The report of step number `step`, counted from 1. Speeds are averaged since the last report."""

    loss: float
    lr: float
    norm: float | None
    samples_per_s: float
    peak_bytes: int
    data_s: float = 0.0  # mean time that rank 0 waited for the data of a step
    weight_per_s: float | None = None  # None if the weight is the number of samples
    figures: dict[str, float] = field(default_factory=dict)  # metrics of the task
    loss_scale: float | None = None
    skipped_steps: int = 0
    flops_per_s: float | None = None
    mfu: float | None = None
    name: Literal["step"] = "step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated(_Event):
    """The model was evaluated on every sample of the validation split."""

    loss: float
    figures: dict[str, float]  # metrics by name, such as {"r2": 0.98}
    evaluated: int
    of: int
    seconds: float
    fractions: list[str] = field(default_factory=list)  # names of the metrics that are fractions between 0 and 1
    weights: Literal["model", "ema"] = "model"
    name: Literal["evaluated"] = "evaluated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged(_Event):
    """Metrics that a custom training loop logged, by name."""

    figures: dict[str, float]
    name: Literal["logged"] = "logged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped(_Event):
    """Files that couldn't be read. Each start of the run reports a file once. Its samples have weight 0."""

    files: tuple[str, ...]
    name: Literal["skipped"] = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrupted(_Event):
    """An audit of the step after `step` found wrong results. The update isn't applied, and all ranks stop training.

    `ranks` are the ranks that computed wrong results, if a majority identifies them. With `placement.on_corruption:
    go_on`, the run continues without these ranks.
    """

    ranks: tuple[int, ...]
    text: str
    name: Literal["corrupted"] = "corrupted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved(_Event):
    """A checkpoint was hashed, written and synced to disk."""

    path: str
    weights_sha256: str
    best: bool
    seconds: float
    name: Literal["saved"] = "saved"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped(_Event):
    """Training stopped early, because of the signal `reason`. The progress is saved."""

    reason: Literal["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"]
    name: Literal["stopped"] = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Done(_Event):
    """The run is complete."""

    weights_sha256: str
    figures: dict[str, float] = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)
    skipped_steps: int = 0
    skipped_samples: int = 0
    audited: int = 0  # number of steps that were audited since the run was last started
    seconds: float = 0.0
    seconds_by_rank: dict[str, list[float]] = field(default_factory=dict)  # by activity (device/clock.py)
    peak_bytes_by_rank: list[int] = field(default_factory=list)
    predicted: dict[str, float] = field(default_factory=dict)  # values predicted by a plan: step_s and peak_bytes
    # step_s and peak_bytes, as measured since the run was last started
    measured: dict[str, float] = field(default_factory=dict)
    name: Literal["done"] = "done"


Event = Started | Warned | Stepped | Evaluated | Logged | Skipped | Corrupted | Saved | Stopped | Done
