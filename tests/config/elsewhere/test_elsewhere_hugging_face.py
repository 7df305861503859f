"""Configurations of Accelerate, and the Trainer's arguments, as what they have of a recipe."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from lockstep.config.base import values
from lockstep.config.elsewhere.find import ImportedConfig, import_file
from lockstep.errors import ConfigError, UsageError

MODEL = ("recipe.model=gpt", "recipe.data=shakespeare")


def imported(folder: Path, settings: dict[str, Any], *words: str, gpus: int = 2) -> ImportedConfig:
    file = folder / "config.json"
    file.write_text(json.dumps(settings))
    return import_file(str(file), words, gpus)


@pytest.mark.parametrize(
    ("settings", "placement"),
    [
        ({"distributed_type": "NO"}, {"strategy": "single"}),
        ({"distributed_type": "MULTI_GPU", "num_processes": 8}, {"strategy": "ddp", "processes": 8}),
        ({"distributed_type": "MULTI_CPU"}, {"strategy": "ddp", "device": "cpu"}),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}, {"strategy": "zero3"}),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": False}},
         {"strategy": "zero2"}),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"}}, {"strategy": "hsdp"}),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": 2, "fsdp_offload_params": True}},
         {"strategy": {"name": "zero2", "offload": True}}),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_activation_checkpointing": True}},
         {"strategy": "zero3", "recompute": "full"}),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 1}}, {"strategy": "zero1"}),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3, "offload_param_device": "cpu"}},
         {"strategy": {"name": "zero3", "offload": True}}),
    ],
)  # fmt: skip
def test_a_configuration_of_accelerate_is_a_placement(
    tmp_path: Path, settings: dict[str, Any], placement: dict[str, Any]
) -> None:
    found = imported(tmp_path, settings | {"mixed_precision": "bf16", "machine_rank": 0, "debug": False})
    assert found.translated.values["placement"] == placement
    assert found.translated.values["recipe"] == {"precision": "bf16"}
    assert set(found.translated.left) == {"machine_rank", "debug"}
    assert found.missing == ["recipe.model", "recipe.data", "recipe.batch", "recipe.optimizer"]
    with pytest.raises(ConfigError, match=r"recipe\.batch: missing"):
        found.load()


def test_what_accelerate_lacks_can_be_added(tmp_path: Path) -> None:
    rest = (*MODEL, "recipe.batch=8", "recipe.epochs=1", "recipe.optimizer.lr=0.1")
    config = imported(tmp_path, {"distributed_type": "FSDP", "num_processes": 4}, *rest).load().config
    assert (config.placement.strategy.name, config.placement.processes, config.recipe.batch) == ("zero3", 4, 8)


def test_the_batch_of_the_trainer_is_that_of_a_gpu(tmp_path: Path) -> None:
    settings = {
        "output_dir": "out",
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 3,
        "num_train_epochs": 2.0,
        "learning_rate": 3e-4,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 10,
        "fp16": True,
        "seed": 7,
        "report_to": [],
    }
    found = imported(tmp_path, settings, *MODEL, gpus=4)
    config = found.load().config
    recipe = config.recipe
    assert (recipe.batch, recipe.microbatches, recipe.epochs, recipe.steps) == (48, 12, 2, None)
    assert (recipe.precision, recipe.seed, recipe.clip_norm, config.run.dir) == ("fp16", 7, 1.0, "out")
    assert (recipe.schedule.name, recipe.schedule.warmup_steps) == ("cosine", 10)
    assert values(recipe.optimizer)["options"] == {"betas": [0.9, 0.999], "eps": 1e-8}
    assert set(found.translated.left) == {"report_to"}


def test_every_argument_of_the_trainer_is_mapped_or_named(tmp_path: Path) -> None:
    arguments = TrainingArguments(output_dir="out", use_cpu=True, max_steps=5)
    settings = json.loads(arguments.to_json_string())
    found = imported(tmp_path, settings, *MODEL)
    assert found.load().config.recipe.steps == 5
    named = {key.partition(".")[0] for key in found.translated.left} | {
        word for origin in found.translated.origins.values() for word in origin.replace(",", "").split()
    }
    # Switches that are off, and what is not set, lead to nothing.
    off = {key for key, value in settings.items() if value in (None, False, 0, 0.0, "no", [])}
    assert set(settings) - named <= off | {"save_strategy", "accelerator_config"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"distributed_type": "MEGATRON_LM"}, "'MEGATRON_LM'; NO, MULTI_GPU"),
        ({"distributed_type": "NO", "mixed_precision": "fp8"}, "mixed_precision: 'fp8'; use no, bf16, fp16"),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 7}}, "zero_stage: 7; use 0, 1, 2 or 3"),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"offload_param_device": "nvme"}}, "offload to nvme"),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "x"}}, "give the keys"),
        ({"output_dir": "out", "optim": "lion_8bit"}, "optim: 'lion_8bit'"),
        ({"output_dir": "out", "num_train_epochs": 1.5}, "give a whole number, or max_steps"),
        ({"output_dir": "out", "warmup_ratio": 0.1}, "give warmup_steps"),
        ({"output_dir": "out", "lr_scheduler_type": "polynomial"}, "lr_scheduler_type: 'polynomial'"),
        ({"output_dir": "out", "deepspeed": "ds.json"}, "a configuration of its own"),
    ],
)  # fmt: skip
def test_what_has_no_counterpart_is_refused(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        imported(tmp_path, settings)


TRAINER = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3,
    "max_steps": -1,
    "learning_rate": 5e-5,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.99,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "torch_compile": False,
    "label_smoothing_factor": 0.0,
    "seed": 1,
    "optim": "sgd",
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "warmup_ratio": 0.0,
    "fsdp": "",
    "use_cpu": True,
    "save_strategy": "steps",
    "save_steps": 5,
    "output_dir": "out",
    "logging_steps": 5,
    "save_total_limit": 3,
}
ACCELERATE = {
    "distributed_type": "FSDP",
    "num_processes": 4,
    "num_machines": 1,
    "use_cpu": True,
    "mixed_precision": "no",
    "fsdp_config": {"fsdp_sharding_strategy": "1", "fsdp_offload_params": False},
}
DEEPSPEED = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2, "gradient_clipping": 1.0}}
WRONG = (None, True, -1, 0.5, 10**400, float("nan"), float("inf"), "y", [], [[1]], {"a": 1})


@pytest.mark.parametrize("settings", [TRAINER, ACCELERATE, DEEPSPEED])
def test_a_value_of_any_kind_is_taken_or_refused_in_words(tmp_path: Path, settings: dict[str, Any]) -> None:
    for changed in _each_changed(settings):
        with suppress(UsageError):
            imported(tmp_path, changed).to_yaml()
    for key, wrong in (("learning_rate", "y"), ("num_train_epochs", 10**400), ("seed", 0.5)):
        with pytest.raises(UsageError, match=rf"{key}: expected a (whole )?number, got "):
            imported(tmp_path, {**TRAINER, key: wrong})


def _each_changed(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for key, value in settings.items():
        yield from ({**settings, key: wrong} for wrong in WRONG)
        if isinstance(value, dict):
            yield from ({**settings, key: below} for below in _each_changed(value))
