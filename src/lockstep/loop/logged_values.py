"""Implements `run.log`, and checks that all ranks log the same values."""

from collections.abc import Mapping
from typing import final

from torch import Tensor

from lockstep.common.reserved_metrics import RESERVED_BY_EVENTS, find_reserved_name
from lockstep.common.user_code import make_refusal
from lockstep.run.rank import Rank
from lockstep.training.events import Logged

__tracebackhide__ = True  # let pytest hide these frames, so that it shows the line of user code


@final
class LoggedMetrics:
    """Writes the metrics that a script logs, and compares the last value of each metric across ranks."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._values: dict[str, str] = {}  # the `repr` of each metric's last value, which has all digits
        self._compared = False

    def log(self, metrics: Mapping[str, float | Tensor]) -> None:
        """Write metrics of the last step. See `Run.log`."""
        try:
            values = {name: float(value) for name, value in metrics.items()}
        except (TypeError, ValueError, RuntimeError) as error:
            raise make_refusal(f"run.log: {error}", "pass numbers, or tensors with a single element") from None
        if reserved_name := find_reserved_name(values, RESERVED_BY_EVENTS):
            raise make_refusal(f"run.log: {reserved_name} is a reserved name", "choose a different name")
        self._rank.world.add_metrics(values)
        self._values.update({name: repr(value) for name, value in values.items()})
        self._rank.write(Logged(**self._rank.progress.event_fields, figures=values))

    def warn_about_differences(self) -> None:
        """Warn, at most once per run, if the logged values of a metric differ between ranks."""
        world = self._rank.world
        if not world.metrics_differ or self._compared:
            return
        self._compared = True
        rank_0_values, *other_values = world.all_gather_json(self._values)
        if names := [
            name
            for name in rank_0_values
            if any(values.get(name, rank_0_values[name]) != rank_0_values[name] for values in other_values)
        ]:
            self._rank.warn(
                f"run.log: {', '.join(names)}: values differ between ranks, and only those of rank 0 are written; to "
                f"sum over all ranks, call step.sum in training steps and run.sum in an evaluation; otherwise, call "
                f"run.log on rank 0 only"
            )
