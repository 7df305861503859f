"""Train a recipe on Ray: each worker of Ray Train is a rank of the run.

A loop of one's own needs nothing from here: `lockstep.join` in a `train_loop_per_worker` finds its place by itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.load import Loaded
from lockstep.config.load import load as load_recipe
from lockstep.errors import EXIT_DONE, TrainingError, UsageError
from lockstep.launchers import ray as launcher
from lockstep.ranks.external import join_ranks
from lockstep.reporting.ray import RayReport
from lockstep.run.background import as_words
from lockstep.run.training import training_as_rank
from lockstep.setup.completed import completed

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
    """Train a recipe as `ray.train.torch.TorchTrainer` does on so many workers, and return Ray's result.

    `recipe` is the name of a shipped recipe or a file, `overrides` are dotted: `{"recipe.epochs": 3}`. `workers` are a
    number, or the fewest and the most: Ray starts as many as the cluster has room for. Each has a GPU with `gpus`. A
    `run.dir` that is relative, or left out, lies in the folder of Ray's run, `Result.path`; a run that Ray starts again
    (`FailureConfig`) resumes there.

    UsageError where Ray is not installed, or the recipe or an override is wrong; what fails on a worker raises what Ray
    raises, `ray.train.TrainingFailedError`.
    """
    if find_spec("ray") is None:
        raise UsageError("lockstep.ray: Ray is not installed; pip install 'lockstep-train[ray]'")
    # Ray waits for the reports of all ranks, which would notice the end of a save in the background at different steps.
    keys = {"run.dir": "run", **(overrides or {}), "run.save_async": False}
    loaded = load_recipe(str(recipe), as_words(keys))
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    scaling = ScalingConfig(num_workers=workers, use_gpu=gpus)
    config = {"loaded": loaded}
    return TorchTrainer(_work, train_loop_config=config, scaling_config=scaling, run_config=run_config).fit()


def _work(config: Mapping[str, Loaded]) -> None:
    """Be a rank of the recipe's run, in a worker of Ray Train."""
    worker, loaded = launcher.worker(), config["loaded"]
    assert worker is not None
    info = launcher.place(worker, os.environ)
    assert loaded.config.run.dir is not None
    folder = launcher.run_folder(worker, loaded.config.run.dir)
    loaded = loaded.changed("run", {"dir": folder})
    report = RayReport(folder, lead=info.rank == 0)
    placement, work = training_as_rank(loaded, info, report)
    rendezvous = join_ranks(info, placement.rendezvous, placement.timeout_s)
    code = work(rendezvous)
    if report.reported < 0 and (done := completed(loaded)) is not None:  # by an earlier start
        report.write(done, time.time())
    rendezvous.leave()
    if code != EXIT_DONE:
        raise TrainingError(f"the run ended with exit code {code}")
