"""MLflow: a run there for a run here, and the same one again after a resume.

Without a tracking server, named by `uri` or MLFLOW_TRACKING_URI, it is a database in the run folder:
`mlflow ui --backend-store-uri sqlite:///<run>/mlflow/mlflow.db`.
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, final

from lockstep.reporting.tracker_id import read_id, write_id

OPTIONS = ("uri", "experiment", "name")
_LONGEST: Final = 500  # characters of a parameter
_MOST: Final = 100  # parameters at once
_ENDS: Final = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


@final
class Mlflow:
    """A run of a tracking store. Figures that are not finite are left out: not every store takes them."""

    def __init__(self, client: Any, number: str) -> None:
        self._client = client
        self._number = number

    def log(self, step: int, figures: Mapping[str, float], time: float) -> None:
        """Take figures of a step."""
        from mlflow.entities import Metric

        finite = {name: float(value) for name, value in figures.items() if math.isfinite(value)}
        metrics = [Metric(name, value, int(time * 1000), step) for name, value in finite.items()]
        self._client.log_batch(self._number, metrics=metrics)

    def finish(self, how: str) -> None:
        """End."""
        self._client.set_terminated(self._number, _ENDS[how])


def open_remote(folder: Path, options: Mapping[str, Any], recipe: Mapping[str, Any]) -> Mlflow:
    """Open the run that the folder keeps the id of, or a new one."""
    from mlflow import MlflowClient

    place = folder / "mlflow"
    uri = options.get("uri") or os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        place.mkdir(exist_ok=True)
        uri = f"sqlite:///{place / 'mlflow.db'}"
    client = MlflowClient(tracking_uri=uri)
    number = read_id(folder, "mlflow")
    if number:
        client.update_run(number, status="RUNNING")
    else:
        number = _create(client, place if "mlflow.db" in uri else None, options, folder.name, recipe)
        write_id(folder, "mlflow", number)
    return Mlflow(client, number)


def _create(client: Any, place: Path | None, options: Mapping[str, Any], name: str, recipe: Mapping[str, Any]) -> str:
    from mlflow.entities import Param

    title = options.get("experiment", "lockstep")
    found = client.get_experiment_by_name(title)
    artifacts = None if place is None else (place / "artifacts").as_uri()
    experiment = found.experiment_id if found else client.create_experiment(title, artifact_location=artifacts)
    number = str(client.create_run(experiment, run_name=options.get("name", name)).info.run_id)
    given = [Param(key, str(value)[:_LONGEST]) for key, value in recipe.items()]
    for first in range(0, len(given), _MOST):
        client.log_batch(number, params=given[first : first + _MOST])
    return number
