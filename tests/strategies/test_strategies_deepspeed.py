"""What DeepSpeed is given, and what it is not asked for: refused before any process starts."""

import re
from functools import partial
from typing import Any

import pytest
import torch
from component import require_package

from lockstep.core.engine_recipe import PlainRecipe
from lockstep.errors import UsageError
from lockstep.parallel.numerics import Numerics
from lockstep.parallel.optimize import make_optimizer
from lockstep.strategies import deepspeed
from lockstep.strategies.deepspeed import Strategy

ADAMW = partial(make_optimizer, name="adamw", lr=0.1)


def test_its_json_is_made_of_recipe_and_placement() -> None:
    numerics = Numerics(PlainRecipe(microbatches=4, clip_norm=1.5, batch=30))
    assert Strategy(stage=3, offload="cpu", bucket_mib=1).make_config_files(numerics) == {
        "deepspeed.json": {
            "train_micro_batch_size_per_gpu": 8,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 1.5,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {
                "stage": 3,
                "reduce_bucket_size": 262144,
                "allgather_bucket_size": 262144,
                "memory_efficient_linear": False,
                "stage3_prefetch_bucket_size": 262144,
                "offload_optimizer": {"device": "cpu"},
                "offload_param": {"device": "cpu"},
            },
        }
    }
    plain = Strategy(stage=1).make_configuration(Numerics(PlainRecipe(microbatches=4)))
    assert plain["gradient_clipping"] == 0.0  # left out, it is 1.0
    assert plain["zero_optimization"].keys() == {"stage", "reduce_bucket_size", "allgather_bucket_size"}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"stage": 2, "offload": "nvme", "nvme_path": "/tmp"}, "requires stage=3 and nvme_path"),
        ({"stage": 3, "offload": "nvme"}, "but nvme_path is not set"),
        ({"offload": "cpu", "nvme_path": "/tmp"}, "nvme_path requires offload=nvme, got offload=cpu"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: Any, problem: str) -> None:
    require_package("deepspeed")
    with pytest.raises(UsageError, match=re.escape(problem)):
        Strategy(**options).check(2, 4)


def test_more_processes_than_micro_batches_are_refused() -> None:
    require_package("deepspeed")
    with pytest.raises(UsageError, match="5 processes but only 4 micro-batches"):
        Strategy().check(5, 4)


def test_a_missing_library_is_named_with_its_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=re.escape("pip install 'lockstep-train[deepspeed]'")):
        Strategy().check(2, 4)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "adagrad", "rmsprop", "lion"])
def test_optimizers_that_work_element_by_element_are_handed_over(name: str) -> None:
    make = partial(make_optimizer, name=name, lr=0.1, weight_decay=0.1, decay_bias_and_norm=False)
    Strategy().check_recipe(Numerics(PlainRecipe(1, precision="bf16")), make)


@pytest.mark.parametrize(
    ("name", "options"), [("lars", {}), ("lamb", {}), ("adafactor", {}), ("muon", {}), ("adamw", {"fused": True})]
)
def test_optimizers_that_look_at_whole_tensors_are_not(name: str, options: dict[str, Any]) -> None:
    make = partial(make_optimizer, name=name, lr=0.1, weight_decay=0.01, options=options)
    with pytest.raises(UsageError, match="is not supported, because it updates flattened pieces"):
        Strategy().check_recipe(Numerics(PlainRecipe(1)), make)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weights_that_would_be_trained_in_another_dtype_are_refused(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(UsageError, match=f"head.weight is in {name}, but DeepSpeed would train it in float32"):
        Strategy().check_trained_dtypes({"stem.weight": torch.float32, "head.weight": dtype})
    Strategy().check_trained_dtypes({"stem.weight": torch.float32})


@pytest.mark.parametrize(
    ("numerics", "problem"),
    [
        (Numerics(PlainRecipe(1, precision="bf16-compute")), "use fp32, tf32, bf16, fp16, or a different strategy"),
        (Numerics(PlainRecipe(1, compile=True)), "recipe.compile is not supported"),
        (Numerics(PlainRecipe(1), offload_activations=True), "placement.offload_activations is not supported"),
    ],
)
def test_what_is_not_offered_is_refused(numerics: Numerics, problem: str) -> None:
    with pytest.raises(UsageError, match=re.escape(problem)):
        Strategy().check_recipe(numerics, ADAMW)
