"""A step adds the gradients of all its micro-batches under ZeRO-2."""

from functools import partial

from benchmarks.zoo.loops import Task, accelerate, contestants, reference
from benchmarks.zoo.program import Numbers, Program

TASK = Task(samples=32, batch=16, micro=2, clip=10.0, strategy="zero2", stage=2)


def with_deepspeed() -> Numbers:
    """Train with Accelerate's plugin for DeepSpeed, stage 2."""
    import deepspeed
    from accelerate import DeepSpeedPlugin

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    config = {
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": TASK.clip,
        "train_micro_batch_size_per_gpu": TASK.micro,
    }
    return accelerate(TASK, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))


PROGRAM = Program(
    report="huggingface/accelerate#3877",
    date="2025-12",
    expects="norms and update of 2 steps of 4 micro-batches on each rank",
    reported=("accelerate", "deepspeed"),
    reference=partial(reference, TASK),
    contestants=contestants(TASK, accelerate=with_deepspeed),
)
