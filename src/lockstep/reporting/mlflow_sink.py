"""The MLflow sink. Each run is logged as an MLflow run, which a resumed run continues.

If neither `uri` nor MLFLOW_TRACKING_URI specifies a tracking server, the MLflow run is stored in a database in the run
folder. To view it, run `mlflow ui --backend-store-uri sqlite:///<run>/mlflow/mlflow.db`.
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, final

from lockstep.reporting.curves import select_tracked_metrics
from lockstep.reporting.tracker_id import read_id, write_id
from lockstep.training.events import Done, Event, Stopped

OPTIONS = ("uri", "experiment", "name")
_MAX_PARAM_CHARS: Final = 500  # longer parameter values are truncated
_MAX_PARAMS_PER_REQUEST: Final = 100
# Training waits for each request. If the server doesn't respond, mlflow retries for 20 minutes by default, which is
# longer than the other ranks wait (placement.timeout_s).
_REQUEST_LIMITS: Final = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "30", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}


@final
class Mlflow:
    """A run in an MLflow tracking store.

    If `folder` contains the ID of an MLflow run, that run is continued. Otherwise, a new MLflow run is created with the
    `recipe` as its parameters. Non-finite metrics are dropped, because not every tracking store supports them.
    """

    def __init__(self, folder: Path, options: Mapping[str, Any], recipe: Mapping[str, Any]) -> None:
        for name, value in _REQUEST_LIMITS.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient  # imported lazily, because it takes seconds and only rank 0 needs it

        local = folder.absolute() / "mlflow"
        uri = options.get("uri") or os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            local.mkdir(exist_ok=True)
            uri = f"sqlite:///{local / 'mlflow.db'}"
        self._client: Any = MlflowClient(tracking_uri=uri)
        self._end_status = "FAILED"  # reported if the run ends without a `done` or `stopped` event
        self._run = read_id(folder, "mlflow")
        if self._run:
            self._client.update_run(self._run, status="RUNNING")
        else:
            self._run = _create_run(self._client, local if "mlflow.db" in uri else None, options, folder.name, recipe)
            write_id(folder, "mlflow", self._run)

    def write(self, event: Event, time: float) -> None:
        from mlflow.entities import Metric

        finite = {name: float(value) for name, value in select_tracked_metrics(event).items() if math.isfinite(value)}
        if finite:
            metrics = [Metric(name, value, int(time * 1000), event.step) for name, value in finite.items()]
            self._client.log_batch(self._run, metrics=metrics)
        if isinstance(event, Done | Stopped):
            self._end_status = "FINISHED" if isinstance(event, Done) else "KILLED"

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.set_terminated(self._run, self._end_status)


def _create_run(
    client: Any, folder: Path | None, options: Mapping[str, Any], name: str, recipe: Mapping[str, Any]
) -> str:
    from mlflow.entities import Param

    experiment_name = options.get("experiment", "lockstep")
    existing = client.get_experiment_by_name(experiment_name)
    artifacts = None if folder is None else (folder / "artifacts").as_uri()
    experiment_id = (
        existing.experiment_id if existing else client.create_experiment(experiment_name, artifact_location=artifacts)
    )
    run_id = str(client.create_run(experiment_id, run_name=options.get("name", name)).info.run_id)
    params_list = [Param(key, str(value)[:_MAX_PARAM_CHARS]) for key, value in recipe.items()]
    for first in range(0, len(params_list), _MAX_PARAMS_PER_REQUEST):
        client.log_batch(run_id, params=params_list[first : first + _MAX_PARAMS_PER_REQUEST])
    return run_id
