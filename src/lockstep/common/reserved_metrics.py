"""Metric names that are reserved, because events in the event log already have fields with these names."""

from collections.abc import Iterable
from typing import Final

RESERVED_BY_EVENTS: Final = frozenset({"event", "time", "step", "epoch", "samples"})
# The fields of step, evaluation and end events, except `loss`, which a metric of a task may replace.
RESERVED_IN_TRAINING: Final = RESERVED_BY_EVENTS | {
    *("lr", "norm", "samples_per_s", "data_s", "peak_bytes", "weight_per_s", "loss_scale", "flops_per_s", "mfu"),
    *("evaluated", "of", "seconds", "fractions", "weights"),
    *("weights_sha256", "skipped_steps", "skipped_samples", "audited"),
    *("seconds_by_rank", "peak_bytes_by_rank", "predicted", "measured"),
}


def find_reserved_name(names: Iterable[str], reserved: frozenset[str]) -> str | None:
    """Return the first name in `names` that is reserved, or None."""
    return next((name for name in names if name in reserved), None)
