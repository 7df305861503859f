"""Train the small run with DeepSpeed: `python deepspeed_program.py FOLDER`.

Every recipe at each of ZeRO's stages; the weights are left in FOLDER as STAGE-RECIPE.safetensors. Not done in the
test's own processes because DeepSpeed opens the process group itself, and keeps state of its own. Its import takes
seconds, so ranks are forked.
"""

import multiprocessing
import os
import sys
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import deepspeed
import torch
from safetensors.torch import save_file
from small_run import PROCESSES, RECIPES, SAMPLES, STEPS, Recipe, build, data
from torch.nn import functional as F

from lockstep.common.follow_parent import die_with_parent

STAGES = (1, 2, 3)


def main(folder: Path) -> int:
    """Start a process for each rank, and return whether any failed."""
    die_with_parent()
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=be_rank, args=(rank, folder), daemon=True) for rank in range(PROCESSES)]
    for process in processes:
        process.start()
    waiting = {process.sentinel: process for process in processes}
    while waiting:  # not join in their order: those that wait for one that is gone would be waited for
        for sentinel in wait(list(waiting)):
            process = waiting.pop(sentinel)
            process.join()
            if process.exitcode:
                return 1
    return 0


def be_rank(rank: int, folder: Path) -> None:
    """Do all runs, one after the other."""
    die_with_parent()
    torch.set_num_threads(1)
    os.environ.update(LOCAL_RANK=str(rank), GLOO_SOCKET_IFNAME="lo")
    # It would compile an all-reduce through shared memory, for inference alone.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        "gloo", auto_mpi_discovery=False, init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES
    )
    for stage in STAGES:
        for name, recipe in RECIPES.items():
            weights = trained(rank, stage, recipe)
            if rank == 0:
                save_file(weights, folder / f"{stage}-{name}.safetensors")


def trained(rank: int, stage: int, recipe: Recipe) -> dict[str, torch.Tensor]:
    """Train and return the weights, whole, on each rank."""
    model = build()
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=recipe.make(model.parameters()), config=config(stage, recipe)
    )
    assert engine.zero_optimization_stage() == stage
    for step in range(STEPS):
        inputs, targets = data(step, rank)
        engine.backward(F.cross_entropy(engine(inputs), targets))
        engine.step()
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    engine.destroy()
    return weights


def config(stage: int, recipe: Recipe) -> dict[str, Any]:
    """Return DeepSpeed's configuration: its defaults, but for the optimizer, which is torch's own."""
    return {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": recipe.max_norm or 0.0,  # left out, it is 1.0
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
