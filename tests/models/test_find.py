"""A name leads to one of ours, timm's, torchvision's or the user's models, and a wrong one to its likes."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.common.importing import import_object
from lockstep.errors import UsageError
from lockstep.models.find import OURS, build_model, make_construction
from lockstep.tasks.dataset_properties import make_dataset_info


class Plain(nn.Linear):
    """A user's model without any argument of ours."""

    def __init__(self, wide: int = 2) -> None:
        super().__init__(wide, 3)


def with_classes(num_classes: int, depth: int = 1) -> nn.Module:
    """Return a user's model that asks for the number of classes."""
    if depth < 1:
        raise ValueError("too flat")
    return nn.Linear(2, num_classes)


def regression(shape: list[int], outputs: int) -> nn.Module:
    """Return a user's model for rows of a table."""
    return nn.Linear(shape[0], outputs)


def open_ended(**options: Any) -> nn.Module:
    """Return a user's model that takes anything, and is given only what it may need for classes and tokens."""
    assert not options
    return nn.Identity()


def not_a_module() -> int:
    """Return something else."""
    return 3


def _build(name: str, **changes: Any) -> nn.Module:
    own = make_dataset_info([*map(str, range(changes.pop("classes", 10)))], changes.pop("shape", (3, 32, 32)))
    with torch.device("meta"):
        return build_model(name=name, dataset_info=own, **changes)


@pytest.mark.parametrize(
    ("name", "origin", "shape"),
    [
        ("digits_convnet", "torch.", (3, 8, 8)),
        ("botnet50", "torchvision.", (3, 64, 64)),
        ("resnet18", "timm.", (1, 32, 32)),
        ("shufflenet_v2_x1_0", "torchvision.", (3, 32, 32)),
    ],
)
def test_models_follow_the_data(name: str, origin: str, shape: tuple[int, int, int]) -> None:
    model = _build(name, shape=shape, classes=7)
    assert type(model).__module__.startswith(origin)
    assert model(torch.zeros(2, *shape, device="meta")).shape == (2, 7)


def test_every_name_of_ours_is_found() -> None:
    assert all(isinstance(_build(name), nn.Module) for name in OURS)


def test_timm_comes_before_torchvision() -> None:
    assert type(_build("resnet18")).__module__.startswith("timm.")
    assert type(_build("resnet18", source="torchvision")).__module__.startswith("torchvision.")


def test_torchvisions_of_segmentation_start_at_random_where_nobody_asks_for_weights() -> None:
    model = _build("fcn_resnet50", classes=3, options={"aux_loss": True})
    assert {name: each.shape for name, each in model(torch.zeros(2, 3, 32, 32, device="meta")).items()} == {
        "out": (2, 3, 32, 32),
        "aux": (2, 3, 32, 32),
    }


def test_import_path_with_the_number_of_classes_where_wanted() -> None:
    model = _build(f"{__name__}:with_classes")
    assert isinstance(model, nn.Linear)
    assert model.out_features == 10


def test_import_path_with_the_sizes_of_a_regression_where_they_are_named() -> None:
    model = build_model(name=f"{__name__}:regression", dataset_info={"shape": [6], "outputs": 2})
    assert isinstance(model, nn.Linear)
    assert (model.in_features, model.out_features) == (6, 2)
    assert isinstance(
        build_model(name=f"{__name__}:open_ended", dataset_info={"shape": [6], "outputs": 2}), nn.Identity
    )


def test_import_path_of_a_class_that_wants_nothing() -> None:
    model = _build(f"{__name__}:Plain", options={"wide": 4})
    assert isinstance(model, Plain)
    assert model.in_features == 4


LIKES = "model {name}: .*did you mean .*"
WIDTH = "widht=3.*unexpected keyword argument 'widht'"


@pytest.mark.parametrize(
    ("name", "asked", "message"),
    [
        ("resnet5O", {}, f"{LIKES}resnet50"),
        ("digits_convnte", {}, f"{LIKES}digits_convnet"),
        ("densnet121", {"source": "torchvision"}, f"{LIKES}densenet121"),
        ("botnet5", {"source": "lockstep"}, f"{LIKES}botnet50"),
        ("qqqqqqqqqq", {}, "not found in Lockstep, timm or torchvision; use a model of one of them"),
        ("digits_convnet", {"source": "torchvision"}, "not found in torchvision; use"),
        (
            "resnet18",
            {"source": "torchvision", "shape": (1, 32, 32)},
            "require images with 3 channels, but the data has 1; use a timm model",
        ),
        ("digits_convnet", {"options": {"widht": 3}}, WIDTH),
        ("resnet18", {"options": {"widht": 3}}, WIDTH),
        ("shufflenet_v2_x1_0", {"options": {"widht": 3}}, WIDTH),
        (f"{__name__}:Plain", {"options": {"widht": 3}}, WIDTH),
        (f"{__name__}:with_classes", {"options": {"depth": 0}}, "depth=0: ValueError: too flat"),
        (f"{__name__}:not_a_module", {}, "expected a torch.nn.Module, got an object of type int"),
        ("digits_convnet", {"pretrained": True}, "pretrained=false"),
        (f"{__name__}:Plain", {"pretrained": True}, "pretrained=false"),
    ],
)
def test_what_nobody_has_or_does_not_fit_is_refused(name: str, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message.format(name=name)):
        _build(name, **asked)


@pytest.mark.slow("starts a Python of its own")
def test_ours_import_neither_timm_nor_torchvision() -> None:
    code = (
        "import sys; from lockstep.models.find import build_model;"
        "build_model(name='digits_convnet', dataset_info={'classes': ['0'] * 10, 'shape': [1, 8, 8]});"
        "assert not {'timm', 'torchvision'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_model_of_tokens_gets_the_sizes_of_the_data_and_options_win() -> None:
    facts = {"vocabulary": 7, "context": 5}
    model = build_model(name="gpt", options={"layers": 1}, dataset_info=facts)
    assert (model.embedding.tokens.num_embeddings, model.embedding.positions.num_embeddings) == (7, 5)
    longer = build_model(name="gpt", options={"layers": 1, "context": 9}, dataset_info=facts)
    assert longer.embedding.positions.num_embeddings == 9


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("digits_convnet", "lockstep.models.digits_convnet:digits_convnet"),
        ("resnet10t", "timm:create_model"),
        ("squeezenet1_0", "torchvision.models:get_model"),
        (f"{__name__}:with_classes", f"{__name__}:with_classes"),
    ],
)
def test_the_call_that_builds_a_model_is_known(name: str, function: str) -> None:
    options = {"depth": 2} if ":" in name else {}
    made = make_construction(
        name=name, source="auto", options=options, dataset_info=make_dataset_info(["a", "b"], (3, 32, 32))
    )
    assert made.function == function
    with torch.device("meta"):
        built = import_object(made.function, "model")(*made.arguments, **made.options)
        own = build_model(name=name, options=options, dataset_info=make_dataset_info(["a", "b"], (3, 32, 32)))
    assert [each.shape for each in built.parameters()] == [each.shape for each in own.parameters()]
