"""Reports each save to Ray Train: the latest metrics, and a checkpoint that points to the run folder."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, final

from lockstep.training.events import Done, Evaluated, Event, Logged, Saved, Stepped

POINTER_FILE: Final = "lockstep.json"


@final
class RayReport:
    """An event sink for Ray Train. Every rank needs this sink, because Ray waits for a report from each rank.

    Set `is_rank_0` on rank 0, the only rank whose report Ray keeps. Instead of weights, the Ray checkpoint contains a
    reference to the run folder, from which the run can resume on any number of workers.
    """

    def __init__(self, folder: str, is_rank_0: bool) -> None:
        self._folder, self._is_rank_0 = folder, is_rank_0
        self._figures: dict[str, float] = {}
        self.reported = -1  # step of the last report

    def write(self, event: Event, time: float) -> None:
        """See Sink."""
        if isinstance(event, Stepped):
            self._figures["loss"] = event.loss
        elif isinstance(event, Evaluated | Logged):
            self._figures |= event.figures
        # If Ray loses a worker after the last step, it can lose the final report too. The restarted run then has no
        # steps left, but repeats the report when it is done.
        elif isinstance(event, Saved) or (isinstance(event, Done) and event.step != self.reported):
            self.reported = event.step
            progress = {"step": event.step, "epoch": event.epoch, "samples": event.samples}
            self._report({**self._figures, **progress, "weights_sha256": event.weights_sha256, "run_dir": self._folder})

    def _report(self, metrics: dict[str, Any]) -> None:
        import ray.train

        with TemporaryDirectory() as folder:
            (Path(folder) / POINTER_FILE).write_text(json.dumps({"run_dir": self._folder}) + "\n", encoding="utf-8")
            ray.train.report(metrics, ray.train.Checkpoint.from_directory(folder) if self._is_rank_0 else None)

    def close(self) -> None:
        """See Sink."""
