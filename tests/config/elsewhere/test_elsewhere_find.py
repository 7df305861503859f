"""Configurations of Distribuuuu and pycls as recipes: each key has a counterpart, or a reason why it has none."""

import math
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from lockstep.config import write
from lockstep.config.elsewhere import pycls_networks
from lockstep.config.elsewhere.find import ImportedConfig, import_file
from lockstep.config.elsewhere.translation import read_key_table
from lockstep.core.rate import RateSchedule
from lockstep.errors import ConfigError, UsageError
from lockstep.models.find import build_model

REGNET = {"DEPTH": 16, "W0": 48, "WA": 27.89, "WM": 2.09, "GROUP_W": 8, "SE_ON": True}
RESNEXT = {
    "STEM_TYPE": "res_stem_in",
    "DEPTHS": [3, 4, 6, 3],
    "WIDTHS": [256, 512, 1024, 2048],
    "BOT_MULS": [0.5, 0.5, 0.5, 0.5],
    "GROUP_WS": [4, 8, 16, 32],
}
OF_PYCLS: dict[str, Any] = {
    "MODEL": {"TYPE": "regnet"},
    "REGNET": REGNET,
    "TRAIN": {"DATASET": "imagenet", "BATCH_SIZE": 1024},
    "TEST": {"BATCH_SIZE": 800},
    "NUM_GPUS": 8,
}


def imported(folder: Path, values: dict[str, Any], *words: str, gpus: int = 8) -> ImportedConfig:
    file = folder / "old.yaml"
    file.write_text("\n".join(write.format_block(values, dict.fromkeys(_dotted(values), "x"))))
    return import_file(str(file), words, gpus)


def _dotted(values: dict[str, Any]) -> list[str]:
    return [".".join(map(str, path)) for path, _ in write.iterate_leaves(values)]


def _nested(defaults: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in defaults.items():
        section, _, name = key.rpartition(".")
        (values.setdefault(section, {}) if section else values)[name] = value
    return values


@pytest.mark.parametrize(
    ("framework", "changed"),
    [
        ("distribuuuu", {}),
        ("distribuuuu", {"OPTIM.LR_POLICY": "steps", "OPTIM.STEPS": [0, 30], "MODEL.DUMMY_INPUT": True}),
        ("pycls", {"MODEL.TYPE": "resnet", "MODEL.DEPTH": 50, "TRAIN.DATASET": "imagenet"}),
        ("pycls", {"MODEL.TYPE": "resnet", "MODEL.DEPTH": 50, "TRAIN.DATASET": "imagenet", "OPTIM.OPTIMIZER": "adamw"}),
    ],
)
def test_each_key_is_mapped_or_named(tmp_path: Path, framework: str, changed: dict[str, Any]) -> None:
    typed = {**read_key_table(framework).defaults, **changed}
    found = imported(tmp_path, _nested(typed)).translated
    words = " ".join([*found.origins.values(), *found.notes])
    off = [key for key, value in typed.items() if not value]  # a switch that is off leads to nothing, as a path of ""
    assert set(typed) - set(found.unmapped) - set(off) - {each for each in typed if each in words} <= {
        "TRAIN.AUTO_RESUME"
    }


def test_the_batch_of_a_gpu_becomes_that_of_all(tmp_path: Path) -> None:
    values = {"MODEL": {"ARCH": "resnet50"}, "TRAIN": {"BATCH_SIZE": 64}, "OPTIM": {"BASE_LR": 0.4}}
    recipe = imported(tmp_path, values, "OPTIM.BASE_LR", "6.4", gpus=4).load().config.recipe
    assert (recipe.batch, recipe.microbatches, recipe.optimizer.lr.value) == (256, 4, 6.4)
    assert (recipe.model.name, recipe.model.source) == ("resnet50", "torchvision")


@pytest.mark.parametrize("policy", ["cos", "steps"])
def test_rates_are_those_of_distribuuuu(tmp_path: Path, policy: str) -> None:
    """Its formula: a factor for each epoch between MIN_LR and 1, times BASE_LR, times that of the warm-up."""
    base, low, epochs, warm, factor, steps = 0.8, 0.05, 30, 4, 0.2, [0, 10, 20]
    optim = {"BASE_LR": base, "MIN_LR": low, "MAX_EPOCH": epochs, "LR_POLICY": policy, "STEPS": steps}
    values = {"MODEL": {"ARCH": "resnet18"}, "OPTIM": optim | {"WARMUP_EPOCHS": warm, "WARMUP_FACTOR": factor}}
    recipe = imported(tmp_path, values).load().config.recipe
    schedule = recipe.schedule
    rate = RateSchedule(
        base=recipe.optimizer.lr.value,
        samples_per_epoch=100,
        epochs=epochs,
        curve=schedule.name,  # type: ignore[arg-type]
        minimum=schedule.min_lr,
        milestones=schedule.milestones,
        gamma=schedule.gamma,
        warmup_epochs=schedule.warmup_epochs,
        warmup_factor=schedule.warmup_factor,
        update_interval=schedule.each,
    )
    for epoch in range(epochs):
        falling = {
            "cos": (1 - low) * 0.5 * (1 + math.cos(math.pi * epoch / epochs)) + low,
            "steps": 0.1 ** sum(epoch >= each for each in steps[1:]),
        }[policy]
        part = epoch / warm
        expected = base * falling * (factor * (1 - part) + part if epoch < warm else 1)
        assert rate.compute_rate(epoch * 100 + 50) == pytest.approx(expected)


def test_an_exponential_rate_falls_by_the_same_factor_after_each_epoch(tmp_path: Path) -> None:
    optim = {"LR_POLICY": "exp", "MIN_LR": 0.01, "MAX_EPOCH": 4}
    schedule = imported(tmp_path, OF_PYCLS | {"OPTIM": optim}).load().config.recipe.schedule
    assert schedule.milestones == (1, 2, 3)
    assert schedule.gamma**4 == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("values", "source", "name"),
    [
        ({}, "timm", "regnety_004"),
        ({"REGNET": REGNET | {"SE_ON": False, "DEPTH": 22, "W0": 24, "WA": 24.48, "WM": 2.54, "GROUP_W": 16}},
         "timm", "regnetx_004"),
        ({"MODEL": {"TYPE": "anynet"}, "ANYNET": RESNEXT}, "torchvision", "resnext50_32x4d"),
        ({"MODEL": {"TYPE": "resnet", "DEPTH": 101}}, "torchvision", "resnet101"),
    ],
)  # fmt: skip
def test_networks_of_pycls_are_found_by_their_numbers(
    tmp_path: Path, values: dict[str, Any], source: str, name: str
) -> None:
    recipe = imported(tmp_path, OF_PYCLS | values).load().config.recipe
    assert (recipe.model.source, recipe.model.name) == (source, name)
    assert (recipe.batch, recipe.microbatches, recipe.evaluation_batch) == (1024, 8, 100)


@pytest.mark.parametrize("name", [*pycls_networks._EFFICIENTNETS])
def test_efficientnets_of_pycls_are_those_of_timm(tmp_path: Path, name: str) -> None:
    """The numbers in the file are read off timm's network."""
    with torch.device("meta"):
        network = timm.create_model(name)
    firsts, lasts = [stage[0] for stage in network.blocks], [stage[-1] for stage in network.blocks]
    norms = [[each for each in last.modules() if isinstance(each, torch.nn.BatchNorm2d)] for last in lasts]
    numbers = {
        "STEM_W": network.conv_stem.out_channels,
        "STRIDES": [first.conv_dw.stride[0] for first in firsts],
        "DEPTHS": [len(stage) for stage in network.blocks],
        "WIDTHS": [each[-1].num_features for each in norms],
        "EXP_RATIOS": [1, *(first.conv_pw.out_channels // first.conv_pw.in_channels for first in firsts[1:])],
        "KERNELS": [first.conv_dw.kernel_size[0] for first in firsts],
        "HEAD_W": network.num_features,
        "DROPOUT_RATIO": 0.2,
    }
    values = OF_PYCLS | {"MODEL": {"TYPE": "effnet", "ACTIVATION_FUN": "silu"}, "EN": numbers}
    model = imported(tmp_path, values).load().config.recipe.model
    assert (model.source, model.name, model.options) == ("timm", name, {"drop_rate": 0.2})
    with pytest.raises(UsageError, match="no known library has this effnet"):
        imported(tmp_path, values | {"EN": numbers | {"HEAD_W": 1000}})


@pytest.mark.parametrize("kind", ["token", "pooled"])
def test_a_vision_transformer_of_pycls_is_built_by_its_numbers(tmp_path: Path, kind: str) -> None:
    vit = {"PATCH_SIZE": 8, "NUM_LAYERS": 3, "NUM_HEADS": 2, "HIDDEN_DIM": 48, "MLP_DIM": 96, "CLASSIFIER_TYPE": kind}
    values = OF_PYCLS | {"MODEL": {"TYPE": "vit"}, "VIT": vit, "TRAIN": OF_PYCLS["TRAIN"] | {"IM_SIZE": 32}}
    model = imported(tmp_path, values).load().config.recipe.model
    network = build_model(
        name=model.name, source=model.source, options=model.options, dataset_info={"classes": [*"0123456789"]}
    )
    tokens = 16 + (kind == "token")
    block = 4 * (48 * 48 + 48) + 2 * 48 * 96 + 96 + 48 + 2 * 2 * 48  # attention, the feed-forward net, two norms
    other = 3 * 8 * 8 * 48 + 48 + (tokens + (kind == "token")) * 48 + 2 * 48 + 10 * 48 + 10
    assert sum(each.numel() for each in network.parameters()) == 3 * block + other
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    with pytest.raises(UsageError, match="no known library has this vit"):
        imported(tmp_path, values | {"VIT": vit | {"STEM_TYPE": "conv"}})


def test_a_network_that_is_not_found_can_be_named(tmp_path: Path) -> None:
    values = OF_PYCLS | {"MODEL": {"TYPE": "effnet"}}
    with pytest.raises(UsageError, match=r"MODEL\.TYPE: .* effnet; set a model yourself, such as recipe\.model\.name="):
        imported(tmp_path, values)
    found = imported(tmp_path, values, "recipe.model.name=efficientnet_b0")
    assert found.load().config.recipe.model.name == "efficientnet_b0"
    assert "name: efficientnet_b0                 # override" in found.to_yaml()


def test_norms_and_biases_decay_as_pycls_sorts_them(tmp_path: Path) -> None:
    optim = {"WEIGHT_DECAY": 1e-4, "BIAS_USE_CUSTOM_WEIGHT_DECAY": True, "BIAS_CUSTOM_WEIGHT_DECAY": 0.0}
    groups = imported(tmp_path, OF_PYCLS | {"OPTIM": optim}).load().config.recipe.optimizer.groups
    assert [(each.match, each.weight_decay) for each in groups] == [(("*bn*",), 1e-4), (("*bias",), 0.0)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["OPTIM.BASE_RL", "1"], r"override OPTIM\.BASE_RL: Distribuuuu has no such key; did you mean 'OPTIM\.BASE"),
        (["OPTIM.BASE_LR", "x"], r"override OPTIM\.BASE_LR: expected a number, got 'x'"),
        (["TRAIN.BATCH_SIZE", "1.5"], r"TRAIN\.BATCH_SIZE: expected an integer"),
        (["OPTIM.LR_POLICY", "exp"], r"OPTIM\.LR_POLICY: 'exp' is not supported with OPTIM\.MIN_LR 0\.0; use cos"),
        (["TEST.SPLIT", "test"], r"TEST\.SPLIT: expected 'val', got 'test'"),
        (["OPTIM.BASE_LR"], r"OPTIM\.BASE_LR: a key without a value"),
        (["recipe.batch=0"], r"as imported:\d+:\d+  recipe\.batch: "),
    ],
)  # fmt: skip
def test_mistakes_are_named(tmp_path: Path, words: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        imported(tmp_path, {"MODEL": {"ARCH": "resnet18"}}, *words).load()


def test_a_recipe_of_ours_is_none_of_theirs(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="its keys do not match Distribuuuu or pycls"):
        imported(tmp_path, {"recipe": {"model": "resnet18"}})
    (tmp_path / "list.yaml").write_text("[1, 2")
    with pytest.raises(ConfigError):
        import_file(str(tmp_path / "list.yaml"), [], 1)


@pytest.mark.parametrize(
    ("settings", "library"),
    [
        ({"distributed_type": "FSDP", "num_processes": 4}, "Accelerate"),
        ({"output_dir": "out", "learning_rate": 1e-4}, "the Trainer"),
    ],
)
def test_those_that_have_a_table_in_the_documentation_are_refused_with_its_place(
    tmp_path: Path, settings: dict[str, Any], library: str
) -> None:
    with pytest.raises(UsageError, match=f"a configuration of {library} is not supported; see docs/") as told:
        imported(tmp_path, settings)
    page, _, section = str(told.value).split("; see ")[1].split(" ")[0].partition("#")
    headings = [
        line.strip("# ").lower().replace(" ", "-")
        for line in (Path(__file__).parents[3] / page).read_text(encoding="utf-8").splitlines()
        if line.startswith("#")
    ]
    assert section in headings


def test_steps_take_the_place_of_the_epochs_of_the_file(tmp_path: Path) -> None:
    loaded = imported(tmp_path, OF_PYCLS, "recipe.steps=3").load()
    assert (loaded.config.recipe.steps, loaded.config.recipe.epochs) == (3, None)
    assert any(note.startswith("recipe.steps replaces recipe.epochs=") for note in loaded.notes)


@pytest.mark.parametrize(
    ("framework", "key", "wrong", "told"),
    [
        ("distribuuuu", "MODEL.ARCH", None, "MODEL.ARCH: expected text"),
        ("distribuuuu", "OPTIM.BASE_LR", 10**400, "OPTIM.BASE_LR: expected a number"),
        ("distribuuuu", "OPTIM.MAX_EPOCH", None, "OPTIM.MAX_EPOCH: expected an integer"),
        ("distribuuuu", "OPTIM.MAX_EPOCH", 0, "a MAX_EPOCH from 1 to 10,000"),
        ("distribuuuu", "OPTIM.MAX_EPOCH", 10**12, "a MAX_EPOCH from 1 to 10,000"),
        ("pycls", "VIT.HIDDEN_DIM", 0, "VIT.HIDDEN_DIM: expected at least 1, got 0"),
        ("pycls", "VIT.MLP_DIM", None, "VIT.MLP_DIM: expected an integer"),
    ],
)
def test_values_that_no_arithmetic_takes_are_refused(
    tmp_path: Path, framework: str, key: str, wrong: Any, told: str
) -> None:
    settings = {"OPTIM.LR_POLICY": "exp", "OPTIM.MIN_LR": 0.1, key: wrong}
    settings |= {"MODEL.TYPE": "vit"} if framework == "pycls" else {}
    with pytest.raises(UsageError, match=told):
        imported(tmp_path, _nested(settings))
