"""What others say a rank will need: `python -m benchmarks.estimators RECIPE STRATEGY PROCESSES` prints bytes by name.

Accelerate's `estimate-memory` is given the model alone, and says four times its weights for training with Adam.
DeepSpeed's estimators are given the number of parameters, for training in fp16 with Adam, without activations. torch's
FSDPMemTracker runs a step of FSDP2 with the recipe's optimizer on fake tensors, of one micro-batch: blocks that are
gathered are those of Lockstep. Where it fails, as on models that read a number from a tensor, it is left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout

import torch
import torch.distributed as dist
from accelerate.utils import calculate_maximum_sizes
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map

from lockstep.comm.world import World
from lockstep.common.rank import RankInfo
from lockstep.config.load import load
from lockstep.core.mesh import Mesh
from lockstep.parallel.blocks import find_blocks
from lockstep.parallel.layerwise import compute_full_norms
from lockstep.setup.build import Setup
from lockstep.setup.prepare import open_recipe_without_placement


def estimates(ready: Setup, strategy: str, processes: int) -> dict[str, float]:
    """Return what each of them says of one rank, in bytes."""
    model = ready.build_blank()
    whole, largest = calculate_maximum_sizes(model)
    found = {"accelerate": 4.0 * whole}
    parameters = sum(each.numel() for each in model.parameters())
    if strategy == "zero2":
        found["deepspeed"] = estimate_zero2_model_states_mem_needs(parameters, processes, 1, cpu_offload=False)[1]
    if strategy == "zero3":
        in_largest = largest[0] // 4
        found["deepspeed"] = estimate_zero3_model_states_mem_needs(
            parameters, in_largest, processes, 1, cpu_offload=False, cpu_offload_params=False
        )[1]
        try:
            found["FSDPMemTracker"] = _tracked(ready, model, processes)
        except (DataDependentOutputException, NotImplementedError, RuntimeError) as error:
            print(f"FSDPMemTracker: {error}", file=sys.stderr)
    return found


def _tracked(ready: Setup, model: torch.nn.Module, processes: int) -> float:
    world = World(RankInfo(0, 1, 0, 1, "estimators"), torch.device("cpu"))
    _, [microbatch, *_] = next(iter(ready.make_loader(world, Mesh(1).get_data_rank(0), 0).iterate_steps(0)))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
    mesh = init_device_mesh("cpu", (processes,))
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype)).train()
        for unit in (*find_blocks(model), model):
            fully_shard(unit, mesh=mesh)
        optimizer = ready.make_optimizer([*model.named_parameters()], compute_full_norms)
        batch = tree_map(lambda each: torch.empty_like(each) if isinstance(each, Tensor) else each, microbatch.batch)
        with FSDPMemTracker(model, optimizer) as tracker:
            for _ in range(2):  # the first makes the optimizer's state
                ready.task.loss(model(*ready.task.inputs(batch)), batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                tracker.reset_mod_stats()
        peak: Mapping[str, int] = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    return float(peak["Total"])


if __name__ == "__main__":
    file, strategy, processes = sys.argv[1:]
    with redirect_stdout(sys.stderr):
        said = estimates(open_recipe_without_placement(load(file, ["placement.device=cpu"])), strategy, int(processes))
    print(json.dumps(said))
