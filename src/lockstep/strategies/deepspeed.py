"""ZeRO stages 1 to 3 with the engine of DeepSpeed, and with DeepSpeed's offloading.

Rajbhandari et al. 2020, "ZeRO: Memory optimizations toward training trillion parameter models"; Rasley et al. 2020,
"DeepSpeed" (KDD); Rajbhandari et al. 2021, "ZeRO-Infinity", for the offload to NVMe.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar, Final, Literal, final

import torch
from torch.optim import Optimizer

from lockstep.comm.deepspeed import import_deepspeed
from lockstep.core.work import check_microbatches
from lockstep.errors import UsageError
from lockstep.parallel.deepspeed_engine import DeepSpeedEngine
from lockstep.parallel.optimizer_state import NamedParameter
from lockstep.parallel.optimizer_trials import check_flattened_updates
from lockstep.strategies.base import Engine, MakeOptimizer, Mesh, Mib, Numerics, Problem, Traits, World

_FP32_BYTES: Final = 4
_PRECISIONS: Final = ("fp32", "tf32", "bf16", "fp16")


@final
@dataclass(frozen=True)
class Strategy:
    """The options of ZeRO with DeepSpeed.

    - `stage`: 1 shards the optimizer state, 2 also shards the gradients, and 3 also shards the parameters.
    - `offload`: where to keep the shards: on the device (`none`), in CPU memory with the update on the CPU (`cpu`), or
      in files under `nvme_path` (`nvme`, which requires stage 3).
    - `bucket_mib`: the approximate bucket size of the communication.
    """

    stage: Literal[1, 2, 3] = 2
    offload: Literal["none", "cpu", "nvme"] = "none"
    nvme_path: str | None = None
    bucket_mib: Mib = 32.0

    traits: ClassVar[Traits] = Traits(
        cuts="the micro-batches of a step; the optimizer state; from stage 2 also gradients; in stage 3 also "
        "parameters",
        needs="the library deepspeed; an element-wise optimizer; with stage 3, a model that calls the same layers on "
        "every rank",
        communication="stage 1: gradients and new parameters once per step; stage 2: gradients of each micro-batch; "
        "stage 3: parameters twice and gradients once for each micro-batch",
        exactness="close",
        by_peers=True,
    )

    def check(self, processes: int, microbatches: int) -> None:
        """Raise UsageError if DeepSpeed isn't installed, if options conflict, or if there are too many processes."""
        if find_spec("deepspeed") is None:
            raise UsageError(
                "strategy deepspeed: the library deepspeed is not installed; run: pip install "
                "'lockstep-train[deepspeed]'"
            )
        if self.offload == "nvme" and (self.stage != 3 or self.nvme_path is None):
            problem = f"stage is {self.stage}" if self.stage != 3 else "nvme_path is not set"
            raise UsageError(
                f"strategy deepspeed: offload=nvme requires stage=3 and nvme_path (a folder on the disk), but "
                f"{problem}; set both, or use offload=cpu"
            )
        if self.nvme_path is not None and self.offload != "nvme":
            raise UsageError(
                f"strategy deepspeed: nvme_path requires offload=nvme, got offload={self.offload}; set offload=nvme, "
                f"or don't set nvme_path"
            )
        if self.offload == "nvme":
            _check_nvme()
        check_microbatches(processes, microbatches)

    def check_recipe(self, numerics: Numerics, make_optimizer: Callable[[Iterable[NamedParameter]], Optimizer]) -> None:
        """Raise UsageError if DeepSpeed doesn't support a part of the recipe.

        `make_optimizer` creates the optimizer.
        """
        precision = numerics.recipe.precision
        if precision not in _PRECISIONS:
            raise UsageError(
                f"strategy deepspeed: recipe.precision={precision} keeps copies of the weights, which DeepSpeed does "
                f"not support; use {', '.join(_PRECISIONS)}, or a different strategy"
            )
        if numerics.recipe.compile:
            raise UsageError(
                "strategy deepspeed: recipe.compile is not supported; set recipe.compile=false, or use strategy zero1, "
                "zero2 or zero3"
            )
        if numerics.offload_activations:
            raise UsageError(
                "strategy deepspeed: placement.offload_activations is not supported; use placement.recompute, or "
                "strategy zero1, zero2 or zero3"
            )
        check_flattened_updates(make_optimizer, "deepspeed")

    def check_trained_dtypes(self, dtypes: Mapping[str, torch.dtype]) -> None:
        """Raise UsageError if a trained parameter isn't float32, the dtype in which DeepSpeed trains all parameters."""
        mismatch = next((name for name, dtype in dtypes.items() if dtype != torch.float32), None)
        if mismatch is not None:
            raise UsageError(
                f"strategy deepspeed: {mismatch} is in {str(dtypes[mismatch]).removeprefix('torch.')}, but DeepSpeed "
                f"would train it in float32; convert the model to float32, or use strategy zero1, zero2 or zero3"
            )

    def preload(self) -> None:
        """Import DeepSpeed. Called before the CPU ranks are forked, so that they share its memory."""
        import_deepspeed("cpu")

    def make_config_files(self, numerics: Numerics) -> Mapping[str, Any]:
        """Return the contents of DeepSpeed's configuration file, by file name."""
        return {"deepspeed.json": self.make_configuration(numerics)}

    def make_configuration(self, numerics: Numerics) -> dict[str, Any]:
        """Return the DeepSpeed configuration. DeepSpeed uses its defaults for the keys that are missing."""
        # Number of elements; a multiple of 2 for alignment.
        bucket = 2 * max(1, int(self.bucket_mib * 2**19 / _FP32_BYTES))
        zero: dict[str, Any] = {"stage": self.stage, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
        if self.stage == 3:
            # Disable memory_efficient_linear, because it patches torch for the rest of the process.
            zero |= {"memory_efficient_linear": False, "stage3_prefetch_bucket_size": bucket}
        if self.offload != "none":
            device = {"device": self.offload} | ({"nvme_path": self.nvme_path} if self.nvme_path else {})
            zero |= {"offload_optimizer": device} | ({"offload_param": device} if self.stage == 3 else {})
        return {
            "train_micro_batch_size_per_gpu": numerics.largest_microbatch_size,
            "gradient_accumulation_steps": 1,  # the engine tells DeepSpeed when a step ends
            "gradient_clipping": numerics.recipe.clip_norm or 0.0,
            "zero_allow_untested_optimizer": True,  # DeepSpeed only tests its own optimizers
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": zero,
        }

    def mesh(self, processes: int) -> Mesh:
        """Return a mesh of one sharded replica. Ranks compute in rounds, because backward passes run collectives."""
        return Mesh(shard=processes)

    def start(self, problem: Problem, make_optimizer: MakeOptimizer, world: World, numerics: Numerics) -> Engine:
        """Return the engine of this rank."""
        configuration = self.make_configuration(numerics)
        return DeepSpeedEngine(problem, make_optimizer, world, numerics, self.mesh(world.size), configuration)


def _check_nvme() -> None:
    """Raise UsageError if DeepSpeed can't build its operation for asynchronous file I/O."""
    builders: Any = import_module("deepspeed.ops.op_builder")
    if not builders.AsyncIOBuilder().is_compatible(verbose=False):
        raise UsageError(
            "strategy deepspeed: offload=nvme requires DeepSpeed's async_io operation, which cannot be built here; "
            "install a compiler and libaio (on Debian: apt-get install libaio-dev), or use offload=cpu"
        )
