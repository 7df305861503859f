"""Where models are cut, what a stage is, and why a model cannot be cut: it is told, never guessed."""

import random as python_random
import warnings
from collections.abc import Callable

import pipeline_models
import pytest
import torch
import toys
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lockstep.errors import UsageError
from lockstep.parallel.pipeline.cut import build_stage_module, find_cut, find_owners
from lockstep.parallel.pipeline.graph_trace import PipelineCut
from lockstep.parallel.pipeline.part import extract_local_module, keep_tensors

SAMPLE = (torch.empty(2, 3, 6, 6, device="meta"),)


def costs(model: nn.Module, cut: PipelineCut, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return operations and parameters of each stage, by running the stages on real tensors."""
    found = []
    values = [torch.zeros(2, *shape)]
    for number in range(len(cut.stage_starts) + 1):
        stage = build_stage_module(model, cut, number)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            values = stage(*values)
        found.append((counter.get_total_flops(), sum(p.numel() for p in stage.parameters())))
    assert sum(parameters for _, parameters in found) == sum(p.numel() for p in model.parameters())
    return found


@pytest.mark.parametrize(
    ("name", "size", "classes", "worst"),
    [
        ("resnet18", 32, 1, 0.45),
        pytest.param("vit_tiny_patch16_224", 224, 1, 0.3, marks=pytest.mark.slow("large models")),
        pytest.param("efficientnet_b0", 64, 1, 0.4, marks=pytest.mark.slow("large models")),
        pytest.param("regnetx_002", 64, 1, 0.4, marks=pytest.mark.slow("large models")),
    ],
)
def test_shipped_models_are_cut_into_four_stages_of_like_cost(name: str, size: int, classes: int, worst: float) -> None:
    import timm

    with torch.device("meta"):
        blank = timm.create_model(name, num_classes=5)
    cut = find_cut(blank, 4, (torch.empty(2, 3, size, size, device="meta"),))
    assert len(cut.stage_starts) == 3
    model = timm.create_model(name, num_classes=5)
    found = costs(model, cut, (3, size, size))
    operations, parameters = (sum(column) for column in zip(*found, strict=True))
    shares = [ops / operations / 2 + own / parameters / 2 for ops, own in found]
    assert max(shares) < worst


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", pipeline_models.MODELS)
def test_stages_one_after_the_other_are_the_model(name: str, training: bool) -> None:
    """For any number of samples, in both modes: outputs, drawn numbers and BatchNorm's buffers."""
    model = toys.build(pipeline_models.recipe(name)).train(training)
    size = 32 if name == "resnet18" else 6
    cut = find_cut(model, 3, (torch.empty(2, 3, size, size, device="meta"),))
    stages = [build_stage_module(model, cut, number) for number in range(3)]
    for samples in (2, 3):
        images = torch.randn(samples, 3, size, size)
        before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        torch.manual_seed(5)
        expected, drawn = model(images), torch.get_rng_state()
        after = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        model.load_state_dict(before)
        torch.manual_seed(5)
        values = [images]
        for stage in stages:
            values = stage(*values)
        assert torch.equal(values[0], expected)
        assert torch.equal(torch.get_rng_state(), drawn)
        assert all(torch.equal(tensor, after[key]) for key, tensor in model.state_dict().items())


def test_a_model_is_left_as_it_was() -> None:
    model = pipeline_models.Skipping().eval()
    model.twice.train()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    find_cut(model, 2, SAMPLE)
    assert not model.training
    assert model.twice.training
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_cut_by_hand_begins_where_it_says() -> None:
    model = pipeline_models.mlp()
    cut = find_cut(model, 3, SAMPLE, ("4", "10"))
    assert {name: stage for name, stage in find_owners(model, cut).owner.items() if name.endswith("weight")} == {
        "1.weight": 0, "4.weight": 1, "7.weight": 1, "10.weight": 2, "13.weight": 2, "16.weight": 2, "19.weight": 2,
        "21.weight": 2,
    }  # fmt: skip


class Wrapped(nn.Module):
    """A user's model, which keeps its layers one level down."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, images: Tensor) -> Tensor:
        return self.inner(images)


def test_modules_are_entered_where_they_must_be() -> None:
    model = Wrapped(Wrapped(pipeline_models.Skipping()))
    cut = find_cut(model, 3, SAMPLE)
    assert {"inner", "inner.inner"} <= cut.expanded
    by_hand = find_cut(model, 2, SAMPLE, ("inner.inner.mix",))
    assert by_hand.expanded == {"inner", "inner.inner"}
    assert find_owners(model, by_hand).owner["inner.inner.norm.weight"] == 0
    assert find_owners(model, by_hand).owner["inner.inner.mix.weight"] == 1


class Straight(nn.Module):
    """Two layers with something between them."""

    def __init__(self, between: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.flat = nn.Flatten()
        self.first = nn.Linear(108, 16)
        self.second = nn.Linear(16, 16)
        self.third = nn.Linear(16, 5)
        self.between = between

    def forward(self, images: Tensor) -> Tensor:
        x = self.between(self, self.first(self.flat(images)))
        return self.third(x)


def by_value(model: nn.Module, x: Tensor) -> Tensor:
    return model.second(x) if x.sum() > 0 else x


def by_shape(model: nn.Module, x: Tensor) -> Tensor:
    for _ in range(len(x)):
        x = model.second(x)
    return x


def drawing(model: nn.Module, x: Tensor) -> Tensor:
    return model.second(x) * python_random.random()


def making(model: nn.Module, x: Tensor) -> Tensor:
    return model.second(x) + torch.ones(16)


def tying(model: nn.Module, x: Tensor) -> Tensor:
    return model.second(x) @ model.second.weight + model.first.bias


def splitting(model: nn.Module, x: Tensor) -> Tensor:
    parts = x.split(8, dim=1)
    x = model.second(x)
    for number in range(2):
        x = x + parts[number].sum()
    return x


@pytest.mark.parametrize(
    ("between", "said"),
    [
        (
            by_value,
            r"its code at .*test_pipeline_cut.py:\d+, `return model.second\(x\) if x.sum\(\) > 0 else x`, depends",
        ),
        (drawing, "its forward method draws random numbers"),
        (tying, r"its forward pass calls 4 modules .*not before second, since first.bias is used on both sides"),
        (splitting, "not before second, since code between modules also uses an output of first after second"),
    ],
)
def test_a_model_that_cannot_be_cut_says_why(between: Callable[[nn.Module, Tensor], Tensor], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        find_cut(Straight(between), 3, SAMPLE)


@pytest.mark.parametrize("between", [by_shape, making])
def test_code_that_no_trace_can_follow_is_run(between: Callable[[nn.Module, Tensor], Tensor]) -> None:
    model = Straight(between)
    cut = find_cut(model, 3, SAMPLE)
    assert cut.replayed
    assert cut.stage_starts == ("second", "third")
    assert set(find_owners(model, cut).owner.values()) == {0, 1, 2}


def test_what_modules_keep_of_a_computation_is_no_obstacle() -> None:
    """The old weight_norm keeps a weight that is computed, and so has no copy."""
    model = Straight(by_shape)
    inner = nn.TransformerEncoderLayer(16, 2, 16)  # stays whole
    with warnings.catch_warnings(action="ignore"):
        nn.utils.weight_norm(inner.linear1)  # type: ignore[no-untyped-call]
    model.second = inner
    assert find_cut(model, 3, SAMPLE).stage_starts == ("second", "third")


@pytest.mark.parametrize(
    ("stages", "names", "said"),
    [
        (3, ("mix",), "cut: the number of modules must be 2 for 3 stages, got 1"),
        (2, ("mixx",), "the model has no module mixx; did you mean 'mix'"),
        (2, ("stem",), "stage 0 has no trainable parameters; list different modules in cut"),
        (3, ("twice", "mix"), "no stage can begin at mix; list modules in the order of their calls: stem, norm, drop"),
        (2, ("twice.again",), "no stage can begin at twice.again: twice.once.weight is used on both sides"),
        (3, ("act", "twice"), "stage 1 has no trainable parameters"),
    ],
)
def test_a_cut_by_hand_that_cannot_be_says_why(stages: int, names: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        find_cut(pipeline_models.Skipping(), stages, SAMPLE, names)


def test_too_many_stages_say_how_many_modules_there_are() -> None:
    with pytest.raises(UsageError, match=r"cannot be split into 9 stages .* calls 22 modules in sequence"):
        find_cut(pipeline_models.mlp(), 9, SAMPLE)


def test_a_part_keeps_names_and_order_and_the_rest_has_no_memory() -> None:
    model = pipeline_models.Skipping()
    names = [name for name, _ in model.named_parameters()]
    own = {"position", "norm.weight", "norm.running_mean", "twice.unused", "head.weight", "head.bias"}
    keep_tensors(model, own, torch.device("cpu"), torch.preserve_format)
    part = extract_local_module(model, own)
    assert {name for name, tensor in model.state_dict().items() if not tensor.is_meta} == own
    assert part.state_dict().keys() == own
    assert part.head is model.head  # itself, with all it can do
    assert [name for name, _ in model.named_parameters()] == names
    assert [name for name, _ in part.named_parameters()] == [name for name in names if name in own]
    assert model.twice.once.weight is model.twice.again.weight
