"""The events of a run: the loop yields these, and the sinks write them down.

Units: `time` is seconds since 1970, `seconds` wall-clock seconds, `lr` the learning rate, `loss` the sum of the
losses over what the step or the evaluation weighs, `peak_bytes` bytes, `samples_per_s` training samples a second over
all processes. What other figures are is the task's.
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
    "weight_per_s": "training weight/s, all processes, in the task's unit",
    "flops_per_sample": "FLOP of forward and backward, products alone",
    "peak_flops_per_s": "FLOP/s of dense products, all devices",
    "flops_per_s": "FLOP/s of the model, all processes",
    "mfu": "fraction of peak_flops_per_s",
    "peak_bytes": "bytes, the most that rank 0 has had",
    "seconds_by_rank": "s of each rank, by what they went to",
    "peak_bytes_by_rank": "bytes, the most that each rank has had",
    "predicted": "step_s in s, peak_bytes in bytes, in use in a step",
    "measured": "step_s in s, peak_bytes in bytes, in use in a step",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Event:
    """What happens once `step` steps are done, in `epoch`, when so many training `samples` were seen."""

    step: int
    epoch: int
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(_Event):
    """The run begins, or resumes at `step` of `steps`; `again` of them had been done, and were not saved."""

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
    task: str = ""  # in words: which it is, and why
    monitor: str = "loss"  # the figure by which an evaluation is the best
    higher: bool = False  # whether a higher one is better
    unit: str = "samples"  # what a weight counts
    fractions: list[str] = field(default_factory=list)  # figures that are shares of one
    resumed_from: str | None = None
    again: int = 0
    flops_per_sample: int | None = None
    peak_flops_per_s: float | None = None  # of the devices that it runs on, where it is known
    backend: str = ""  # what carries tensors between several ranks
    sharing: list[list[int]] = field(default_factory=list)  # ranks that have one device between them
    hash_seed: str = ""  # of Python's hashes: PYTHONHASHSEED, or random
    name: Literal["started"] = "started"


@dataclass(frozen=True, slots=True, kw_only=True)
class Warned(_Event):
    """The numbers of this run may depend on its placement: `culprit` is what does it, `text` says where and how."""

    culprit: str
    text: str
    name: Literal["warning"] = "warning"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped(_Event):
    """Step number `step` (from 1) is done; figures are of this step alone, speed since the last report."""

    loss: float
    lr: float
    norm: float | None
    samples_per_s: float
    peak_bytes: int
    weight_per_s: float | None = None  # where the weight is not the number of samples
    figures: dict[str, float] = field(default_factory=dict)  # the task's
    loss_scale: float | None = None
    skipped_steps: int = 0
    flops_per_s: float | None = None
    mfu: float | None = None
    name: Literal["step"] = "step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated(_Event):
    """The validation split was visited: each of its samples once."""

    loss: float
    figures: dict[str, float]  # by their names, such as {"r2": 0.98}
    evaluated: int
    of: int
    seconds: float
    fractions: list[str] = field(default_factory=list)  # figures that are shares of one
    weights: Literal["model", "ema"] = "model"
    name: Literal["evaluated"] = "evaluated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged(_Event):
    """Figures that a loop of the user's own gave, by their names."""

    figures: dict[str, float]
    name: Literal["logged"] = "logged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped(_Event):
    """Files that could not be read, each reported once in a start; their samples count as nothing."""

    files: tuple[str, ...]
    name: Literal["skipped"] = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrupted(_Event):
    """An audit of the step after `step` found bits that are wrong. The step is not applied, and this start ends.

    `ranks` are wrong, where a majority tells which: `placement.on_corruption: go_on` goes on without them.
    """

    ranks: tuple[int, ...]
    text: str
    name: Literal["corrupted"] = "corrupted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved(_Event):
    """A checkpoint is on disk, synced and hashed."""

    path: str
    weights_sha256: str
    best: bool
    seconds: float
    name: Literal["saved"] = "saved"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped(_Event):
    """Training stopped early because of `reason`, and the work so far is saved."""

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
    audited: int = 0  # steps that this start audited
    seconds: float = 0.0
    seconds_by_rank: dict[str, list[float]] = field(default_factory=dict)  # by what they went to (device/clock.py)
    peak_bytes_by_rank: list[int] = field(default_factory=list)
    predicted: dict[str, float] = field(default_factory=dict)  # of a step, by a plan: step_s and peak_bytes
    measured: dict[str, float] = field(default_factory=dict)  # the same of this start
    name: Literal["done"] = "done"


Event = Started | Warned | Stepped | Evaluated | Logged | Skipped | Corrupted | Saved | Stopped | Done
