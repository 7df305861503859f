"""A model that does not fit the data is refused with what to do."""

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.models.check import ModelSummary, check_dtype, check_model, check_weights
from lockstep.models.digits_convnet import digits_convnet
from lockstep.parallel.weights import convert_compute_dtype
from lockstep.tasks.batches import get_predictions
from lockstep.tasks.classification import check_outputs


class _ReadsValues(nn.Linear):
    """Cannot run on the meta device: its forward looks at a value."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.sum().item() == 0
        return super().forward(x)


class _Two(nn.Linear):
    """Returns two tensors while it trains, as models with an auxiliary head do."""

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:  # type: ignore[override]
        outputs = super().forward(x)
        return (outputs, outputs) if self.training else outputs


def check(build: Callable[[], nn.Module], inputs: Tensor, classes: int, smallest: int = 2) -> ModelSummary:
    """Check a model `m` on two samples like the first of `inputs` in evaluation, and on `smallest` in training."""
    rows = torch.arange(max(2, smallest)) % len(inputs)
    return check_model(
        build,
        name="m",
        evaluation=(inputs[rows[:2]],),
        training=(inputs[rows[:smallest]],),
        check=lambda outputs, samples: check_outputs("m", classes, get_predictions(outputs, "model m"), samples),
    )


def test_summary_counts_parameters_and_names_buffers() -> None:
    summary = check(digits_convnet, torch.zeros(1, 1, 8, 8), 10)
    assert (summary.num_parameters, summary.has_active_batchnorm) == (151_274, True)
    assert len(summary.buffers) == 24
    assert "4.shortcut.1.running_mean" in summary.buffers


def test_summary_has_the_form_of_each_tensor() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.frozen = nn.Linear(4, 4, dtype=torch.float64), nn.Linear(4, 3).requires_grad_(False)
            self.again = self.into

        def forward(self, x: Tensor) -> Tensor:
            return self.frozen(self.into(x.double()).float())

    summary = check(Tied, torch.zeros(1, 4), 3)
    assert {name: str(form) for name, form in summary.trained_parameters.items()} == {
        "into.weight": "float64 of shape [4, 4]",
        "into.bias": "float64 of shape [4]",
    }
    assert {*summary.tensors} == {
        f"{each}.{kind}" for each in ("into", "again", "frozen") for kind in ("weight", "bias")
    }


def test_values_are_read_on_the_cpu() -> None:
    assert check(lambda: _ReadsValues(4, 3), torch.zeros(1, 4), 3).num_parameters == 15


def test_nothing_is_computed_where_meta_will_do() -> None:
    def build() -> nn.Module:
        assert torch.empty(0).device.type == "meta"
        return nn.Linear(4, 3)

    assert check(build, torch.zeros(1, 4), 3).num_parameters == 15


def test_other_number_of_classes() -> None:
    with pytest.raises(UsageError, match=r"m: expected outputs of shape \(2, 10\) .*, got \(2, 1000\); set.* to 10"):
        check(lambda: nn.Linear(4, 1000), torch.zeros(1, 4), 10)


def test_several_outputs_in_training_only() -> None:
    with pytest.raises(UsageError, match=r"expected a tensor, or outputs .*, got a tuple of 2; return"):
        check(lambda: _Two(4, 3), torch.zeros(1, 4), 3)


def test_inputs_that_do_not_fit() -> None:
    with pytest.raises(UsageError, match=r"forward failed with inputs of shape \(2, 5\) and torch.float32: Runtime"):
        check(lambda: nn.Linear(4, 3), torch.zeros(1, 5), 3)
    pair = ((torch.zeros(2, 4), torch.zeros(2, 4)),)
    with pytest.raises(UsageError, match="let forward accept a single argument of type tuple"):
        check_model(lambda: nn.Bilinear(4, 4, 3), name="m", evaluation=pair, training=pair, check=lambda *_: None)


def test_single_sample_and_batchnorm() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))

    check(build, torch.zeros(1, 4), 3, smallest=2)
    with pytest.raises(UsageError, match=r"1 sample, but BatchNorm requires at least 2 in each micro-batch; use a"):
        check(build, torch.zeros(1, 4), 3, smallest=1)


def test_single_sample_is_enough_with_more_than_one_position() -> None:
    check(digits_convnet, torch.zeros(1, 1, 8, 8), 10, smallest=1)


def test_whole_numbers_as_inputs() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(20, 3))

    check(build, torch.zeros(1, 5, dtype=torch.int64), 3)


class _Tokens(nn.Module):
    """Looks tokens up, and at one of them."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(tokens, 4), nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        assert x.max().item() == 8
        return self.head(self.embed(x).flatten(1))


def test_inputs_have_the_values_of_the_data_on_the_cpu() -> None:
    check(lambda: _Tokens(9), torch.tensor([[0, 3, 8, 1, 2]]), 3)
    with pytest.raises(UsageError, match=r"IndexError: index out of range in self \(.*test_check\.py:\d+\)"):
        check(lambda: _Tokens(8), torch.tensor([[0, 3, 8, 1, 2]]), 3)


def test_own_weights_are_loaded_without_warnings_of_the_trial(tmp_path: Path) -> None:
    """On the meta device torch warns of each of them. What the function itself warns of is for the real build."""
    torch.save(nn.Linear(4, 3).state_dict(), tmp_path / "weights.pt")

    def build() -> nn.Module:
        warnings.warn("weights of an old version", stacklevel=1)
        model = nn.Linear(4, 3)
        model.load_state_dict(torch.load(tmp_path / "weights.pt", map_location="cpu", weights_only=True))
        return model

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        check(build, torch.zeros(1, 4), 3)
        assert not told
        build()
    assert [str(each.message) for each in told] == ["weights of an old version"]


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize(
    ("options", "told"),
    [({"max_norm": 1.5}, "inner.embed has max_norm=1.5, which changes the weights"), ({"sparse": True}, "sparse=")],
)
def test_embeddings_that_no_two_processes_could_agree_on_are_refused(layer, options, told) -> None:  # type: ignore[no-untyped-def]
    model = nn.ModuleDict({"inner": nn.ModuleDict({"embed": layer(4, 2, **options)})})
    with pytest.raises(UsageError, match=f"model m: .*{told}"):
        check_weights("m", model)
    check_weights("m", layer(4, 2))


class _Extra(nn.Linear):
    """Keeps state that is neither a parameter nor a buffer."""

    def __init__(self, state: object) -> None:
        super().__init__(4, 3)
        self.state = state

    def get_extra_state(self) -> object:
        return self.state

    def set_extra_state(self, state: object) -> None:
        self.state = state


@pytest.mark.parametrize("state", [None, {"calls": 3}, torch.ones(2)])
def test_state_that_a_checkpoint_would_lose_is_refused(state: object) -> None:
    message = "defines get_extra_state, but only parameters and buffers are saved; keep .* in buffers"
    with pytest.raises(UsageError, match=rf"^model m: inner\.0 \(_Extra\) {message}"):
        check(lambda: nn.ModuleDict({"inner": nn.Sequential(_Extra(state))}), torch.zeros(1, 4), 3)
    with pytest.raises(UsageError, match=f"^model m: _Extra {message}"):
        check_weights("m", _Extra(state))


class _Mixes(nn.Linear):
    """Multiplies by a buffer of its own, which stays as it is when its weights are converted."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(4, 3, dtype=dtype)
        self.register_buffer("mask", torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x @ self.mask)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (
            _Mixes,
            "recipe.precision: forward mixes dtypes with weights in torch.bfloat16: .*mm of tensors with dtypes torch",
        ),
        (lambda: _Mixes(torch.float64), "model m: weight has torch.float64, but recipe.precision requires float32"),
    ],
)
def test_a_model_that_cannot_compute_in_another_dtype_is_refused(build: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_dtype(build, convert_compute_dtype, name="m", inputs=(torch.zeros(2, 4),), dtype=torch.bfloat16)


def test_a_model_that_can_is_not() -> None:
    check_dtype(
        digits_convnet, convert_compute_dtype, name="m", inputs=(torch.zeros(2, 1, 8, 8),), dtype=torch.bfloat16
    )


def clamp_gradient(parameter: nn.Parameter) -> object:
    return parameter.register_hook(lambda gradient: gradient.clamp(-1, 1))


def clamp_accumulated_gradient(parameter: nn.Parameter) -> object:
    return parameter.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.clamp_(-1, 1))  # type: ignore[union-attr]


def clamp_in_its_node(parameter: nn.Parameter) -> object:
    node = parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    node.register_prehook(lambda gradients: tuple(gradient.clamp(-1, 1) for gradient in gradients))
    return node  # keeps it, and its hook, alive


@pytest.mark.parametrize("add_hook", [clamp_gradient, clamp_accumulated_gradient, clamp_in_its_node])
def test_a_hook_of_a_gradient_which_sharded_strategies_would_drop_is_refused(
    add_hook: Callable[[nn.Parameter], object],
) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    check_weights("m", model)
    hook = add_hook(model[1].weight)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"model m: 1\.weight has a gradient hook"):
        check_weights("m", model)
    del hook
