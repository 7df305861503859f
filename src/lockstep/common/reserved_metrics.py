"""Reserved metric names. In the event log, each metric is a field next to the fields of the event itself."""

from collections.abc import Iterable
from typing import Final

OF_ALL: Final = frozenset({"event", "time", "step", "epoch", "samples"})
# The fields of step, evaluation and end events, except `loss`, which a metric of a task may replace.
OF_TRAINING: Final = OF_ALL | {
    *("lr", "norm", "samples_per_s", "peak_bytes", "weight_per_s", "loss_scale", "flops_per_s", "mfu"),
    *("evaluated", "of", "seconds", "fractions", "weights"),
    *("weights_sha256", "skipped_steps", "skipped_samples", "audited"),
    *("seconds_by_rank", "peak_bytes_by_rank", "predicted", "measured"),
}


def first_reserved(names: Iterable[str], reserved: frozenset[str]) -> str | None:
    """Return the first metric name that is `reserved`, or None if there is none."""
    return next((name for name in names if name in reserved), None)
