"""Accelerate's configuration, and the Trainer's arguments: keys that need more than a row in their tables.

Neither needs its library here.
"""

from typing import Final

from lockstep.config.elsewhere.translation import Translation
from lockstep.errors import UsageError

_KINDS: Final = {"MULTI_GPU": "ddp", "MULTI_CPU": "ddp", "NO": "single"}
_FSDP: Final = (  # what stands for FSDP 1, by name and by number
    ("zero3", "FULL_SHARD", "1"),
    ("zero2", "SHARD_GRAD_OP", "2"),
    ("ddp", "NO_SHARD", "3"),
    ("hsdp", "HYBRID_SHARD", "4", "HYBRID_SHARD_ZERO2", "5"),
)
_SHARDING: Final = {name: strategy for strategy, *names in _FSDP for name in names}
_STAGES: Final = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}
_PRECISIONS: Final = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}
_CURVES: Final = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
_OPTIMIZERS: Final = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "sgd": "sgd", "adafactor": "adafactor"}


def accelerate(keys: Translation, model_given: bool) -> None:
    """Translate what needs more than a row of accelerate.yaml."""
    kind = keys["distributed_type"]
    if kind == "FSDP":
        _fsdp(keys)
    elif kind == "DEEPSPEED":
        _deepspeed(keys)
    elif isinstance(kind, str) and kind in _KINDS:
        keys.set("placement.strategy", _KINDS[kind], "distributed_type")
    else:
        raise UsageError(
            f"distributed_type: {kind!r}; NO, MULTI_GPU, MULTI_CPU, FSDP and DEEPSPEED can be imported: choose a "
            f"strategy for it from lockstep strategies"
        )
    if keys["num_processes"] > 0:
        keys.take("num_processes", "placement.processes")
    if keys["num_machines"] > 1:
        keys.note(f"the processes are those of {keys['num_machines']} machines: lockstep launch --nodes, or Slurm")
    if keys["use_cpu"] or kind == "MULTI_CPU":
        keys.set("placement.device", "cpu", "use_cpu" if "use_cpu" in keys else "distributed_type")
    keys.choose("mixed_precision", "recipe.precision", _PRECISIONS)
    if keys["dynamo_config.dynamo_backend"] != "NO":
        keys.set("recipe.compile", True, "dynamo_config.dynamo_backend")
    if not keys["enable_cpu_affinity"]:
        keys.leave("a rank runs near its card; placement.affinity: off leaves it to the system", "enable_cpu_affinity")


def _fsdp(keys: Translation) -> None:
    reshard = "fsdp_config.fsdp_reshard_after_forward"
    given = keys["fsdp_config.fsdp_sharding_strategy"], keys[reshard]
    sharding = next((str(each) for each in given if each is not None), "FULL_SHARD")
    if keys["fsdp_config.fsdp_version"] == 2 or sharding in ("True", "False"):
        strategy = "zero3" if keys[reshard] in (None, True, "true") else "zero2"
        origin = reshard
    elif sharding in _SHARDING:
        strategy, origin = _SHARDING[sharding], "fsdp_config.fsdp_sharding_strategy"
    else:
        raise UsageError(f"fsdp_config.fsdp_sharding_strategy: {sharding!r}; use {', '.join(_SHARDING)}")
    offload = keys["fsdp_config.fsdp_offload_params"] and strategy != "ddp"
    _set_strategy(keys, strategy, offload, f"{origin}, fsdp_offload_params" if offload else origin)
    if keys["fsdp_config.fsdp_activation_checkpointing"]:
        keys.set("placement.recompute", "full", "fsdp_config.fsdp_activation_checkpointing")


def _deepspeed(keys: Translation) -> None:
    if "deepspeed_config.deepspeed_config_file" in keys:
        raise UsageError("deepspeed_config.deepspeed_config_file: give the keys themselves, such as zero_stage: 2")
    stage = keys["deepspeed_config.zero_stage"]
    if stage not in _STAGES:
        raise UsageError(f"deepspeed_config.zero_stage: {stage!r}; use 0, 1, 2 or 3")
    devices = [keys[f"deepspeed_config.offload_{what}_device"] for what in ("optimizer", "param")]
    if "nvme" in devices:
        raise UsageError("deepspeed_config: offload to nvme; placement.strategy: {name: deepspeed, ...} has that")
    offload = "cpu" in devices and stage > 0
    origin = "deepspeed_config.zero_stage, offload_*_device" if offload else "deepspeed_config.zero_stage"
    _set_strategy(keys, _STAGES[stage], offload, origin)
    if keys["deepspeed_config.gradient_clipping"] not in (None, "auto"):
        clip = keys.get("deepspeed_config.gradient_clipping", 0.0)
        keys.set("recipe.clip_norm", float(clip), "deepspeed_config.gradient_clipping")
    keys.note("ZeRO is Lockstep's own here, with the bits of one process; strategy deepspeed runs DeepSpeed's engine")


def trainer(keys: Translation, model_given: bool) -> None:
    """Translate what needs more than a row of trainer.yaml: a batch is that of a GPU there."""
    gpus = keys.gpus
    each, rounds = keys["per_device_train_batch_size"], keys["gradient_accumulation_steps"]
    keys.set("recipe.task", "language", "the Trainer's loss")
    keys.set("recipe.batch", each * rounds * gpus, f"per_device_train_batch_size, accumulation and {gpus} GPUs")
    keys.set("recipe.microbatches", rounds * gpus, f"gradient_accumulation_steps and {gpus} GPUs")
    keys.note(f"a batch is that of a GPU there: {each * rounds * gpus} for {gpus}, on any number of processes (--gpus)")
    if keys["max_steps"] > 0:
        keys.take("max_steps", "recipe.steps")
        keys.leave("max_steps is given", "num_train_epochs")
    else:
        epochs = keys["num_train_epochs"]
        if epochs != int(epochs):
            raise UsageError(f"num_train_epochs: {epochs}; give a whole number, or max_steps")
        keys.set("recipe.epochs", int(epochs), "num_train_epochs")
    _optimizer(keys)
    _schedule(keys)
    if clip := keys["max_grad_norm"]:
        keys.set("recipe.clip_norm", float(clip), "max_grad_norm")
    precision = next((each for each in ("bf16", "fp16", "tf32") if keys[each]), "fp32")
    keys.set("recipe.precision", precision, "bf16, fp16, tf32")
    if keys["label_smoothing_factor"]:
        keys.set("recipe.loss.name", "cross_entropy", "label_smoothing_factor")
    keys.set("recipe.seed", keys["seed"], "seed")
    _sharding(keys)
    for what, path in (("save", "run.save_every"), ("eval", "run.evaluate_every")):
        if keys[f"{what}_strategy"] == "steps" and (steps := keys[f"{what}_steps"]):
            keys.set(path, {"steps": int(steps)}, f"{what}_steps")


def _sharding(keys: Translation) -> None:
    """Translate `fsdp`, a list of words or a text of them; DeepSpeed's configuration is another file."""
    if keys["deepspeed"]:
        raise UsageError(
            "deepspeed: a configuration of its own; set placement.strategy, such as zero2, and leave it out"
        )
    given = keys["fsdp"] or []
    if not (given is True or isinstance(given, str | list)):
        raise UsageError(f"fsdp: expected text or a list, got {given!r}")
    words = given.split() if isinstance(given, str) else [] if given is True else [str(each) for each in given]
    named = [_SHARDING[word.upper()] for word in words if word.upper() in _SHARDING] or ["zero3"]
    if given:
        _set_strategy(keys, named[0], "offload" in words, "fsdp")


def _set_strategy(keys: Translation, name: str, offload: bool, origin: str) -> None:
    keys.set("placement.strategy", {"name": name, "offload": True} if offload else name, origin)


def _optimizer(keys: Translation) -> None:
    name = keys.choose("optim", "recipe.optimizer.name", _OPTIMIZERS)
    keys.set("recipe.optimizer.lr", float(keys["learning_rate"]), "learning_rate")
    keys.set("recipe.optimizer.weight_decay", float(keys["weight_decay"]), "weight_decay")
    keys.set("recipe.optimizer.decay_bias_and_norm", False, "its rule for decay")
    if name == "adamw":
        betas = [float(keys["adam_beta1"]), float(keys["adam_beta2"])]
        options = {"betas": betas, "eps": float(keys["adam_epsilon"])}
        keys.set("recipe.optimizer.options", options, "adam_beta1, adam_beta2, adam_epsilon")
    keys.leave(f"of AdamW, and this is {keys['optim']}", "adam_beta1", "adam_beta2", "adam_epsilon")


def _schedule(keys: Translation) -> None:
    keys.choose("lr_scheduler_type", "recipe.schedule.name", _CURVES)
    name = keys["lr_scheduler_type"]
    steps, ratio = keys["warmup_steps"], keys["warmup_ratio"]
    if name == "constant":
        keys.leave("a constant rate has no warm-up there", "warmup_steps", "warmup_ratio")
    elif 0 < steps < 1 or (ratio and not steps):
        raise UsageError("warmup_ratio: a part of steps that only its own run knows; give warmup_steps")
    elif steps:
        keys.set("recipe.schedule.warmup_steps", int(steps), "warmup_steps")
        keys.note("the rate warms up beside the curve here, which begins behind the warm-up there")
