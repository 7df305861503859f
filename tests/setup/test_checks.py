"""What would not be exact on CUDA is refused before a run there; what a placement cannot do, and models do not fit."""

from pathlib import Path

import pytest
import torch

from lockstep.config.load import load
from lockstep.errors import UsageError
from lockstep.parallel.numerics import Numerics
from lockstep.setup.build import build_setup
from lockstep.setup.checks import check_kernels, check_placement, find_nondeterministic_cuda_calls
from lockstep.setup.resolved import resolve_config

MODEL = """
from torch import nn

def pooled(num_classes):
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(64, num_classes))

def normed(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, num_classes))

def synced(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.SyncBatchNorm(8), nn.Linear(8, num_classes))
"""

SYNC = "recipe.batchnorm=sync"


@pytest.fixture
def pooled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "its_pools.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "recipe.model.name=its_pools:pooled"


def test_it_is_refused_on_cuda_alone(pooled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "PYTORCH_TUNABLEOP_ENABLED"):
        monkeypatch.delenv(name, raising=False)
    config = load("digits", [pooled]).config
    ready = build_setup(config.recipe)
    check_kernels(config.placement, ready)  # there is no card
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UsageError, match=r"its_pools:pooled: .* on CUDA:\n  1 \(AdaptiveAvgPool2d\) uses .*backward"):
        check_kernels(config.placement, ready)
    check_kernels(config.placement, ready, training=False)  # which has no backward
    check_kernels(load("digits", [pooled, "placement.device=cpu"]).config.placement, ready)


def test_a_variable_that_breaks_the_precision_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load("digits", []).config
    ready = build_setup(config.recipe)
    assert find_nondeterministic_cuda_calls(ready) == []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    with pytest.raises(UsageError, match="NVIDIA_TF32_OVERRIDE"):
        check_kernels(config.placement, ready)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (
            ["placement.strategy=pipeline", "placement.processes=2"],
            "strategy pipeline does not run the forward passes of all micro-batches together",
        ),
        (
            ["placement.strategy={name: mesh, pipe: 2}", "placement.processes=2"],
            "use strategy single, ddp or zero1, or use zero2, zero3 or hsdp with 4 processes",
        ),
        (["placement.strategy=zero3", "placement.processes=2"], "2 processes share 4 micro-batches; use 4 processes"),
        (["placement.strategy={name: hsdp, replicate: 2}", "placement.processes=4"], ""),
        (["placement.strategy=zero1", "placement.processes=3"], ""),
        (["recipe.compile=true"], "cannot wait for other forward passes.* set recipe.compile=false"),
        (["recipe.model.chunks=2"], "unset recipe.model.chunks"),
        (["placement.recompute=full"], "unset placement.recompute"),
    ],
)
def test_where_forwards_cannot_go_together_batchnorm_cannot_be_synced(asked: list[str], text: str) -> None:
    resolved = resolve_config(load("digits", [SYNC, "recipe.microbatches=4", "placement.device=cpu", *asked]))
    if text:
        with pytest.raises(UsageError, match=rf"^recipe.batchnorm: sync: .*{text}"):
            check_placement(resolved)
    else:
        check_placement(resolved)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ("local", "its_pools:synced: 2 is a torch.nn.SyncBatchNorm, .* set recipe.batchnorm=sync"),
        ("sync", ""),
        ("frozen", ""),
    ],
)
def test_torchs_own_sync_layers_are_taken_over_where_that_is_asked_for(pooled: str, asked: str, text: str) -> None:
    recipe = load("digits", [pooled.replace("pooled", "synced"), f"recipe.batchnorm={asked}"]).config.recipe
    if text:
        with pytest.raises(UsageError, match=text):
            build_setup(recipe)
    else:
        assert Numerics(build_setup(recipe).recipe).sync_batchnorm is (asked == "sync")


def test_a_step_that_is_too_small_for_batchnorm_is_named_with_the_way_out(pooled: str) -> None:
    for words, step, advice in (
        (
            ("recipe.batch=4", "recipe.microbatches=2"),
            "the last step of an epoch has 1 sample",
            "set recipe.last_batch=drop, or change recipe.batch or recipe.microbatches",
        ),
        (
            ("recipe.batch=4", "recipe.microbatches=3", "recipe.last_batch=drop"),
            "a step has 4 samples in 3 micro-batches, the smallest of 1 sample",
            "use a larger recipe.batch or fewer recipe.microbatches",
        ),
    ):
        with pytest.raises(UsageError) as refused:
            build_setup(load("digits", [pooled.replace("pooled", "normed"), *words]).config.recipe)
        message = f": {step}, but BatchNorm requires at least 2 in each micro-batch; {advice}"
        assert str(refused.value).endswith(message)


def test_a_model_without_batchnorm_cannot_sync_or_freeze_it(pooled: str) -> None:
    for asked, text in {
        "sync": "no BatchNorm layer that computes batch statistics",
        "frozen": "no BatchNorm layer; remove the key",
    }.items():
        with pytest.raises(UsageError, match=text):
            build_setup(load("digits", [pooled, f"recipe.batchnorm={asked}"]).config.recipe)


def test_one_sample_in_each_micro_batch_is_enough_where_the_step_has_more(pooled: str) -> None:
    few = [
        pooled.replace("pooled", "synced"),
        SYNC,
        "recipe.last_batch=drop",
        "recipe.batch=4",
        "recipe.microbatches=4",
    ]
    assert build_setup(load("digits", few).config.recipe).warnings == ()
    warned = build_setup(load("digits", [*few[:3], "recipe.batch=2", "recipe.microbatches=2"]).config.recipe).warnings
    assert "BatchNorm normalizes over a step, which has only 2 samples" in warned[0]


@pytest.mark.parametrize(("model", "count"), [("mlp", 0), ("flat_net:flat", 1)])
def test_targets_of_a_large_scale_are_warned_of_unless_the_model_scales_them(
    model: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flat_net.py").write_text(
        "from torch import nn\n\n\ndef flat(shape, outputs):\n    return nn.Linear(shape[0], outputs)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    rows = "".join(f"{number},{number * 5000.5}\n" for number in range(40))
    (tmp_path / "prices.csv").write_text(f"size,price\n{rows}")
    (tmp_path / "r.yaml").write_text(
        f"""
recipe:
  model: {{name: "{model}"}}
  data: {{name: table, root: {tmp_path}/prices.csv, options: {{target: price, validation: 0}}}}
  batch: 8
  microbatches: 2
  epochs: 1
  optimizer: {{name: adamw, lr: 0.01}}
"""
    )
    recipe = load(str(tmp_path / "r.yaml"), []).config.recipe
    warnings = build_setup(recipe).warnings
    assert [line.startswith("target 'price' has mean 9.751e+04") for line in warnings] == [True] * count
