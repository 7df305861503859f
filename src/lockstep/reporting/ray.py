"""What is saved is reported to Ray Train: the last figures, and a checkpoint that says where the run folder is."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, final

from lockstep.training.events import Done, Evaluated, Event, Logged, Saved, Stepped

POINTER: Final = "lockstep.json"


@final
class RayReport:
    """Every rank has one, as Ray counts the reports of all; it keeps those of rank 0, which is to `lead`.

    The checkpoint holds no weights: a run resumes from its own folder, on any number of workers.
    """

    def __init__(self, folder: str, lead: bool) -> None:
        self._folder, self._lead = folder, lead
        self._figures: dict[str, float] = {}
        self.reported = -1  # the step

    def write(self, event: Event, time: float) -> None:
        """See Sink."""
        if isinstance(event, Stepped):
            self._figures["loss"] = event.loss
        elif isinstance(event, Evaluated | Logged):
            self._figures |= event.figures
        # The last report may be lost with a worker, and the next start then finds that nothing is left to do.
        elif isinstance(event, Saved) or (isinstance(event, Done) and event.step != self.reported):
            self.reported = event.step
            at = {"step": event.step, "epoch": event.epoch, "samples": event.samples}
            self._report({**self._figures, **at, "weights_sha256": event.weights_sha256, "run_dir": self._folder})

    def _report(self, metrics: dict[str, Any]) -> None:
        import ray.train

        with TemporaryDirectory() as place:
            (Path(place) / POINTER).write_text(json.dumps({"run_dir": self._folder}) + "\n", encoding="utf-8")
            ray.train.report(metrics, ray.train.Checkpoint.from_directory(place) if self._lead else None)

    def close(self) -> None:
        """See Sink."""
