"""Trains a recipe on Ray. Each Ray Train worker is a rank of the run.

If you have a custom training loop, you don't need this module. Call `lockstep.join` in your `train_loop_per_worker`. It
detects the rank automatically.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.load import LoadedConfig
from lockstep.config.load import load as load_recipe
from lockstep.errors import EXIT_DONE, TrainingError, UsageError
from lockstep.launchers import ray as launcher
from lockstep.ranks.external import join_ranks
from lockstep.reporting.ray import RayReport
from lockstep.run.background import to_arguments
from lockstep.run.training import prepare_training_rank
from lockstep.setup.completed import find_completed_run

if TYPE_CHECKING:
    from ray.train import Result, RunConfig


def train(
    recipe: str | Path,
    *,
    workers: int | tuple[int, int] = 1,
    gpus: bool = False,
    overrides: Mapping[str, Any] | None = None,
    run_config: RunConfig | None = None,
) -> Result:
    """Train a recipe with `ray.train.torch.TorchTrainer`, and return Ray's result.

    - `recipe`: The name of a built-in recipe, or a recipe file.
    - `workers`: The number of workers, or a tuple of the minimum and maximum number. Ray starts as many workers as fit
      on the cluster.
    - `gpus`: Whether each worker gets a GPU.
    - `overrides`: Overrides with dotted keys, such as `{"recipe.epochs": 3}`.
    - `run_config`: Ray's RunConfig.

    If `run.dir` is relative or not set, the run folder is in the folder of the Ray run, `Result.path`. If Ray restarts
    the run (`FailureConfig`), it resumes from that folder.

    Raises UsageError if Ray isn't installed, or if the recipe or an override is invalid. If a worker fails, Ray raises
    `ray.train.TrainingFailedError`.
    """
    if find_spec("ray") is None:
        raise UsageError("lockstep.ray: Ray is not installed; pip install 'lockstep-train[ray]'")
    # Ray waits for a report from all ranks, but with background saves, ranks would notice the end of a save at
    # different steps.
    all_overrides = {"run.dir": "run", **(overrides or {}), "run.save_async": False}
    loaded = load_recipe(str(recipe), to_arguments(all_overrides))
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    scaling = ScalingConfig(num_workers=workers, use_gpu=gpus)
    config = {"loaded": loaded}
    return TorchTrainer(_run_worker, train_loop_config=config, scaling_config=scaling, run_config=run_config).fit()


def _run_worker(config: Mapping[str, LoadedConfig]) -> None:
    """Run a rank of the recipe in a Ray Train worker."""
    worker, loaded = launcher.get_train_context(), config["loaded"]
    assert worker is not None
    info = launcher.read_rank(worker, os.environ)
    assert loaded.config.run.dir is not None
    folder = launcher.resolve_run_folder(worker, loaded.config.run.dir)
    loaded = loaded.replace_values("run", {"dir": folder})
    report = RayReport(folder, is_rank_0=info.rank == 0)
    placement, work = prepare_training_rank(loaded, info, report)
    rendezvous = join_ranks(info, placement.rendezvous, placement.timeout_s)
    code = work(rendezvous)
    completed_event = find_completed_run(loaded, is_claimed=True) if report.reported < 0 else None
    if completed_event is not None:  # the run was already complete
        report.write(completed_event, time.time())
    rendezvous.leave()
    if code != EXIT_DONE:
        raise TrainingError(f"the run ended with exit code {code}; see the output of its workers for the cause")
