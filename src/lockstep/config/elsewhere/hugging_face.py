"""Accelerate's configuration, which is a placement, and the Trainer's arguments, which lack model and data.

Neither needs its library here. Keys that only those have that nothing here stands for are named as such: new ones come
with each of their versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from lockstep.config.elsewhere.translation import Translated, Translation
from lockstep.errors import UsageError

ACCELERATE: Final = "Accelerate"
TRAINER: Final = "the Trainer"
OF_ACCELERATE: Final = "distributed_type"  # a key that each of its files has
OF_TRAINER: Final = ("per_device_train_batch_size", "num_train_epochs", "learning_rate", "output_dir")
_SHARDING: Final = {  # of FSDP 1, by name and by number
    "FULL_SHARD": "zero3",
    "1": "zero3",
    "SHARD_GRAD_OP": "zero2",
    "2": "zero2",
    "NO_SHARD": "ddp",
    "3": "ddp",
    "HYBRID_SHARD": "hsdp",
    "4": "hsdp",
    "HYBRID_SHARD_ZERO2": "hsdp",
    "5": "hsdp",
}
_STAGES: Final = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}
_PRECISIONS: Final = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}
_CURVES: Final = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
_OPTIMIZERS: Final = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "sgd": "sgd", "adafactor": "adafactor"}
_NOTHING: Final = "nothing here stands for it"


def accelerate(settings: Mapping[str, Any]) -> Translated:
    """Translate a configuration of Accelerate."""
    keys = Translation(settings, settings)
    kind = keys[OF_ACCELERATE]
    if kind == "FSDP":
        _fsdp(keys)
    elif kind == "DEEPSPEED":
        _deepspeed(keys)
    elif kind in ("MULTI_GPU", "MULTI_CPU"):
        keys.set("placement.strategy", "ddp", OF_ACCELERATE)
    elif kind == "NO":
        keys.set("placement.strategy", "single", OF_ACCELERATE)
    else:
        raise UsageError(
            f"{OF_ACCELERATE}: {kind!r}; NO, MULTI_GPU, MULTI_CPU, FSDP and DEEPSPEED can be imported: choose a "
            f"strategy for it from lockstep strategies"
        )
    if keys.get("num_processes", -1) > 0:
        keys.take("num_processes", "placement.processes")
    if keys.get("num_machines", 1) > 1:
        keys.note(f"the processes are those of {keys['num_machines']} machines: lockstep launch --nodes, or Slurm")
    if keys.get("use_cpu", False) or kind == "MULTI_CPU":
        keys.set("placement.device", "cpu", "use_cpu" if "use_cpu" in settings else OF_ACCELERATE)
    precision = str(keys.get("mixed_precision", "no"))
    if precision not in _PRECISIONS:
        raise UsageError(f"mixed_precision: {precision!r}; use {', '.join(_PRECISIONS)}")
    keys.set("recipe.precision", _PRECISIONS[precision], "mixed_precision")
    if keys.get("dynamo_config.dynamo_backend", "NO") != "NO":
        keys.set("recipe.compile", True, "dynamo_config.dynamo_backend")
    if not keys.get("enable_cpu_affinity", True):
        keys.leave("a rank runs near its card; placement.affinity: off leaves it to the system", "enable_cpu_affinity")
    keys.leave("ranks find each other by lockstep launch, or what starts them", "machine_rank", "main_process_ip")
    keys.leave("ranks find each other by lockstep launch, or what starts them", "main_process_port", "rdzv_backend")
    keys.leave("ranks find each other by lockstep launch, or what starts them", "same_network", "compute_environment")
    keys.leave("CUDA_VISIBLE_DEVICES says it", "gpu_ids")
    keys.leave("a script is started as it is", "main_training_function")
    keys.rest(_NOTHING)
    return keys.done()


def _fsdp(keys: Translation) -> None:
    version, reshard = keys.get("fsdp_config.fsdp_version", 1), "fsdp_config.fsdp_reshard_after_forward"
    given = (keys.get("fsdp_config.fsdp_sharding_strategy"), keys.get(reshard))
    sharding = next((str(each) for each in given if each is not None), "FULL_SHARD")
    if version == 2 or sharding in ("True", "False"):
        strategy = "zero3" if keys.get(reshard) in (None, True, "true") else "zero2"
        origin = reshard
    elif sharding in _SHARDING:
        strategy, origin = _SHARDING[sharding], "fsdp_config.fsdp_sharding_strategy"
    else:
        raise UsageError(f"fsdp_config.fsdp_sharding_strategy: {sharding!r}; use {', '.join(_SHARDING)}")
    offload = keys.get("fsdp_config.fsdp_offload_params", False) and strategy != "ddp"
    _set_strategy(keys, strategy, offload, f"{origin}, fsdp_offload_params" if offload else origin)
    if keys.get("fsdp_config.fsdp_activation_checkpointing", False):
        keys.set("placement.recompute", "full", "fsdp_config.fsdp_activation_checkpointing")
    keys.leave("blocks are found in the model", "fsdp_config.fsdp_auto_wrap_policy")
    keys.leave("blocks are found in the model", "fsdp_config.fsdp_transformer_layer_cls_to_wrap")
    keys.leave("blocks are found in the model", "fsdp_config.fsdp_min_num_params")
    keys.leave("a checkpoint has whole tensors, in one form", "fsdp_config.fsdp_state_dict_type")
    keys.leave("every rank begins with the weights of the seed", "fsdp_config.fsdp_sync_module_states")
    keys.leave("every rank begins with the weights of the seed", "fsdp_config.fsdp_cpu_ram_efficient_loading")


def _deepspeed(keys: Translation) -> None:
    if "deepspeed_config.deepspeed_config_file" in keys:
        raise UsageError("deepspeed_config.deepspeed_config_file: give the keys themselves, such as zero_stage: 2")
    stage = keys.get("deepspeed_config.zero_stage", 2)
    if stage not in _STAGES:
        raise UsageError(f"deepspeed_config.zero_stage: {stage!r}; use 0, 1, 2 or 3")
    devices = [keys.get(f"deepspeed_config.offload_{what}_device", "none") for what in ("optimizer", "param")]
    if "nvme" in devices:
        raise UsageError("deepspeed_config: offload to nvme; placement.strategy: {name: deepspeed, ...} has that")
    offload = "cpu" in devices and stage > 0
    origin = "deepspeed_config.zero_stage, offload_*_device" if offload else "deepspeed_config.zero_stage"
    _set_strategy(keys, _STAGES[stage], offload, origin)
    if keys.get("deepspeed_config.gradient_clipping") not in (None, "auto"):
        clip = keys.get("deepspeed_config.gradient_clipping", 0.0)
        keys.set("recipe.clip_norm", float(clip), "deepspeed_config.gradient_clipping")
    keys.note("ZeRO is Lockstep's own here, with the bits of one process; strategy deepspeed runs DeepSpeed's engine")
    keys.leave("recipe.microbatches says it for the whole step", "deepspeed_config.gradient_accumulation_steps")
    keys.leave("checkpoints have whole tensors", "deepspeed_config.zero3_save_16bit_model")
    keys.leave("models are built on each rank", "deepspeed_config.zero3_init_flag")


def trainer(settings: Mapping[str, Any], gpus: int) -> Translated:
    """Translate TrainingArguments, for a training on so many GPUs: a batch is that of a GPU there."""
    keys = Translation(settings, settings)
    each, rounds = keys.get("per_device_train_batch_size", 8), keys.get("gradient_accumulation_steps", 1)
    keys.set("recipe.task", "language", "the Trainer's loss")
    keys.set("recipe.batch", each * rounds * gpus, f"per_device_train_batch_size, accumulation and {gpus} GPUs")
    keys.set("recipe.microbatches", rounds * gpus, f"gradient_accumulation_steps and {gpus} GPUs")
    keys.note(f"a batch is that of a GPU there: {each * rounds * gpus} for {gpus}, on any number of processes (--gpus)")
    if "per_device_eval_batch_size" in keys:
        keys.take("per_device_eval_batch_size", "recipe.evaluation_batch")
    if keys.get("max_steps", -1) > 0:
        keys.take("max_steps", "recipe.steps")
        keys.leave("max_steps is given", "num_train_epochs")
    else:
        epochs = keys.get("num_train_epochs", 3.0)
        if epochs != int(epochs):
            raise UsageError(f"num_train_epochs: {epochs}; give a whole number, or max_steps")
        keys.set("recipe.epochs", int(epochs), "num_train_epochs")
    _optimizer(keys)
    _schedule(keys)
    clip = keys.get("max_grad_norm", 1.0)
    if clip:
        keys.set("recipe.clip_norm", float(clip), "max_grad_norm")
    precision = next((each for each in ("bf16", "fp16", "tf32") if keys.get(each)), "fp32")
    keys.set("recipe.precision", precision, "bf16, fp16, tf32")
    if keys.get("torch_compile", False):
        keys.set("recipe.compile", True, "torch_compile")
    if smoothing := keys.get("label_smoothing_factor", 0.0):
        keys.set("recipe.loss", {"name": "cross_entropy", "label_smoothing": smoothing}, "label_smoothing_factor")
    keys.set("recipe.seed", keys.get("seed", 42), "seed")
    _sharding(keys)
    if keys.get("use_cpu", False):
        keys.set("placement.device", "cpu", "use_cpu")
    if keys.get("gradient_checkpointing", False):
        keys.set("placement.recompute", "full", "gradient_checkpointing")
    if keys.get("dataloader_drop_last", False):
        keys.set("recipe.last_batch", "drop", "dataloader_drop_last")
    for key, path in (
        ("dataloader_num_workers", "placement.workers"),
        ("output_dir", "run.dir"),
        ("logging_steps", "run.log_every"),
        ("save_total_limit", "run.keep"),
    ):
        if keys.get(key) is not None:
            keys.take(key, path)
    for what, path in (("save", "run.save_every"), ("eval", "run.evaluate_every")):
        if keys.get(f"{what}_strategy", "no") == "steps" and (steps := keys.get(f"{what}_steps", 0)):
            keys.set(path, {"steps": int(steps)}, f"{what}_steps")
        keys.leave("that is after each epoch", f"{what}_strategy", f"{what}_steps")
    keys.leave("a run is deterministic, always", "full_determinism", "data_seed")
    keys.leave("the same command resumes at the next step", "resume_from_checkpoint", "ignore_data_skip")
    keys.leave("the best checkpoint is beside the latest", "load_best_model_at_end")
    keys.leave("a step is divided by all its tokens, always", "average_tokens_across_devices")
    keys.rest(_NOTHING)
    return keys.done()


def _sharding(keys: Translation) -> None:
    """Translate `fsdp`, a list of words or a text of them; DeepSpeed's configuration is another file."""
    if keys.get("deepspeed"):
        raise UsageError(
            "deepspeed: a configuration of its own; set placement.strategy, such as zero2, and leave it out"
        )
    given = keys.get("fsdp") or []
    if not (given is True or isinstance(given, str | list)):
        raise UsageError(f"fsdp: expected text or a list, got {given!r}")
    words = given.split() if isinstance(given, str) else [] if given is True else [str(each) for each in given]
    named = [_SHARDING[word.upper()] for word in words if word.upper() in _SHARDING] or ["zero3"]
    if given:
        _set_strategy(keys, named[0], "offload" in words, "fsdp")


def _set_strategy(keys: Translation, name: str, offload: bool, origin: str) -> None:
    keys.set("placement.strategy", {"name": name, "offload": True} if offload else name, origin)


def _optimizer(keys: Translation) -> None:
    name = keys.get("optim", "adamw_torch")
    if name not in _OPTIMIZERS:
        raise UsageError(f"optim: {name!r}; {', '.join(_OPTIMIZERS)} can be imported: choose another one, or set optim")
    keys.set("recipe.optimizer.name", _OPTIMIZERS[name], "optim")
    keys.set("recipe.optimizer.lr", float(keys.get("learning_rate", 5e-5)), "learning_rate")
    keys.set("recipe.optimizer.weight_decay", float(keys.get("weight_decay", 0.0)), "weight_decay")
    keys.set("recipe.optimizer.decay_bias_and_norm", False, "its rule for decay")
    if _OPTIMIZERS[name] == "adamw":
        betas = [float(keys.get("adam_beta1", 0.9)), float(keys.get("adam_beta2", 0.999))]
        options = {"betas": betas, "eps": float(keys.get("adam_epsilon", 1e-8))}
        keys.set("recipe.optimizer.options", options, "adam_beta1, adam_beta2, adam_epsilon")
    keys.leave(f"of AdamW, and this is {name}", "adam_beta1", "adam_beta2", "adam_epsilon")


def _schedule(keys: Translation) -> None:
    name = keys.get("lr_scheduler_type", "linear")
    if name not in _CURVES:
        raise UsageError(f"lr_scheduler_type: {name!r}; {', '.join(_CURVES)} can be imported")
    keys.set("recipe.schedule.name", _CURVES[name], "lr_scheduler_type")
    steps, ratio = keys.get("warmup_steps", 0.0), keys.get("warmup_ratio", 0.0)
    if name == "constant":
        keys.leave("a constant rate has no warm-up there", "warmup_steps", "warmup_ratio")
    elif 0 < steps < 1 or (ratio and not steps):
        raise UsageError("warmup_ratio: a part of steps that only its own run knows; give warmup_steps")
    elif steps:
        keys.set("recipe.schedule.warmup_steps", int(steps), "warmup_steps")
        keys.note("the rate warms up beside the curve here, which begins behind the warm-up there")
