"""Reserved names of figures: a line of the events has each figure in a field of its name, next to its own fields."""

from collections.abc import Iterable
from typing import Final

OF_ALL: Final = frozenset({"event", "time", "step", "epoch", "samples"})
# Those of steps, evaluations and the end of a run; `loss` is what a task's own figure of that name replaces.
OF_TRAINING: Final = OF_ALL | {
    *("lr", "norm", "samples_per_s", "peak_bytes", "weight_per_s", "loss_scale", "flops_per_s", "mfu"),
    *("evaluated", "of", "seconds", "fractions", "weights"),
    *("weights_sha256", "skipped_steps", "skipped_samples", "audited"),
    *("seconds_by_rank", "peak_bytes_by_rank", "predicted", "measured"),
}


def first_taken(figures: Iterable[str], reserved: frozenset[str]) -> str | None:
    """Return the first of the figures' names, in their order, that is `reserved`; None where all are free."""
    return next((name for name in figures if name in reserved), None)
