"""A model that computes something else in chunks is found: by its region, its loss or its gradients."""

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.config.load import load
from lockstep.config.recipe import ModelConfig
from lockstep.errors import UsageError
from lockstep.models.gpt import gpt
from lockstep.parallel.tensor.built_in import get_built_in_plan
from lockstep.parallel.tensor.plan import split_into_chunks
from lockstep.setup.build import Setup
from lockstep.setup.chunk_check import (
    check_plan,
    check_saved_model,
    find_feature_difference,
    find_quick_difference,
    find_sequence_difference,
)
from lockstep.setup.prepare import prepare_run
from lockstep.tasks.language import Language

IDS = torch.randint(20, (2, 17), generator=torch.Generator().manual_seed(0))


def _gpt(plan: dict[str, str]) -> tuple[nn.Module, nn.Module]:
    whole = gpt(vocabulary=20, context=8, layers=2, heads=2, width=16).eval()
    for parameter in whole.parameters():
        nn.init.normal_(parameter, std=0.3)
    in_chunks = copy.deepcopy(whole)
    split_into_chunks(in_chunks, plan | get_built_in_plan(whole) | plan, 2)
    return whole, in_chunks


@pytest.mark.parametrize("plan", [{}, {"*.tokens": "vocab", "head": "vocab"}])
def test_a_right_plan_agrees(plan: dict[str, str]) -> None:
    assert find_feature_difference(*_gpt(plan), (IDS[:, :8],)) is None


def test_heads_that_were_forgotten_are_found_where_they_are() -> None:
    found = find_feature_difference(*_gpt({"blocks.1.attention": "whole"}), (IDS[:, :8],))
    assert found[0] == "blocks.1.attention"
    assert found[1] > 1e-3


class OnlySingle(nn.Module):
    """Knows no float64, as some kernels do not."""

    def __init__(self, normed: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.normed = normed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float64:
            raise RuntimeError("not in float64")
        x = self.up(x)
        return self.down(x / x.norm(dim=-1, keepdim=True) if self.normed else x.relu())


@pytest.mark.parametrize("normed", [False, True])
def test_what_float64_cannot_be_tried_in_is_tried_in_float32(normed: bool) -> None:
    whole = OnlySingle(normed)
    in_chunks = copy.deepcopy(whole)
    split_into_chunks(in_chunks, {"up": "colwise", "down": "rowwise"}, 2)
    found = find_feature_difference(whole, in_chunks, (torch.randn(5, 6),))
    assert (found is not None) == normed


class Mixing(nn.Module):
    """A language model with a fault: it `convolves` over positions, `shifts` gradients alone, `ignores` positions."""

    def __init__(self, fault: str, narrow: bool = False) -> None:
        super().__init__()
        self.fault = fault
        self.narrow = narrow
        self.table = nn.Embedding(20, 16)
        self.places = nn.Embedding(16, 16)
        self.over = nn.Conv1d(16, 16, 3, padding=2)
        self.all = nn.Linear(16, 48)
        self.head = nn.Linear(16, 20)

    def forward(self, ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        n, t = ids.shape
        if self.narrow and self.head.weight.dtype == torch.float64:
            raise RuntimeError("not in float64")
        if position_ids is None or self.fault == "ignores":
            position_ids = torch.arange(t).unsqueeze(0)
        x: Tensor = self.table(ids) + self.places(position_ids)
        if self.fault == "convolves":
            x = x + self.over(x.transpose(1, 2)).transpose(1, 2)[:, :t]
        if self.fault == "shifts":  # what is added is 0, but not its gradient
            before = F.pad(x, (0, 0, 1, 0))[:, :-1]
            x = x + before - before.detach()
        q, k, v = self.all(x).view(n, t, 3, 2, 8).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + y.transpose(1, 2).reshape(n, t, -1))


def _model(fault: str, narrow: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return Mixing(fault, narrow)


@pytest.mark.parametrize("narrow", [False, True])
def test_what_is_right_agrees(narrow: bool) -> None:
    assert find_sequence_difference(_model("", narrow), Language(), IDS, 2) is None


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_ours_agrees(positions: str) -> None:
    model = gpt(vocabulary=20, context=16, layers=2, heads=4, width=32, positions=positions)  # type: ignore[arg-type]
    assert find_sequence_difference(model.eval(), Language(), IDS, 4) is None


@pytest.mark.parametrize(("parts", "what"), [(3, None), (1, "the loss")])
def test_what_a_plan_does_wrong_in_chunks_of_both_kinds_is_found(parts: int, what: str | None) -> None:
    model = gpt(vocabulary=20, context=16, layers=2, heads=4, width=32).eval()
    plan = {**get_built_in_plan(model), "blocks.1.attention.queries_keys_values": f"colwise:{parts}"}
    found = find_sequence_difference(model, Language(), IDS, 2, partial(split_into_chunks, plan=plan, num_chunks=2))
    assert (found and found[0]) == what


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize(
    ("fault", "what"),
    [("convolves", "the loss"), ("ignores", "the loss"), ("shifts", "the gradient of table.weight")],
)
def test_what_mixes_positions_is_found(fault: str, what: str, narrow: bool) -> None:
    found = find_sequence_difference(_model(fault, narrow), Language(), IDS, 2)
    assert found[0] == what
    assert found[1] > 1e-3


NETS = """
from torch import nn

def net(num_classes, flips):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), Block(False), Block(flips), nn.Linear(8, num_classes))

class Block(nn.Module):
    def __init__(self, flips):
        super().__init__()
        self.up, self.down, self.flips = nn.Linear(8, 16), nn.Linear(16, 8), flips

    def forward(self, x):
        h = self.up(x)
        return x + self.down(h.flip(-1) if self.flips else h.relu())
"""


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "its_blocks.py").write_text(NETS)
    monkeypatch.syspath_prepend(str(tmp_path))
    plan = "{'*.up': colwise, '*.down': rowwise}"
    return f"recipe.model={{name: 'its_blocks:net', chunks: 4, plan: {plan}, options: {{flips: FLIPS}}}}"


def _opened(net: str, flips: str) -> Setup:
    prepared = prepare_run(load("digits", [net.replace("FLIPS", flips), "placement.processes=1"]))
    check_plan(prepared.setup)
    return prepared.setup


def test_a_run_is_refused_before_it_starts_with_the_layer_that_mixes_features(net: str) -> None:
    with pytest.raises(UsageError, match=r"recipe\.model\.plan: 3 computes different outputs in 4 chunks "):
        _opened(net, "true")


def test_a_right_plan_is_compared_without_a_trace(net: str, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    ready = _opened(net, "false")
    torch.set_rng_state(before)
    assert check_plan(ready) == []
    assert torch.equal(torch.get_rng_state(), before)
    assert "not compared" not in capsys.readouterr().err


def test_a_large_model_is_warned_of(net: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = _opened(net, "false")
    monkeypatch.setattr("lockstep.setup.chunk_check.MAX_COMPARED_PARAMETERS", 100)
    [warning] = check_plan(ready)
    assert "was not compared with the whole model" in warning


def test_a_quick_comparison_takes_two_samples_and_short_sequences() -> None:
    seen = []

    class Seeing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.up, self.down = nn.Embedding(20, 6), nn.Linear(6, 8), nn.Linear(8, 6)

        def forward(self, ids: Tensor) -> Tensor:
            seen.append(tuple(ids.shape))
            found: Tensor = self.down(self.up(self.table(ids)).relu())
            return found

    plan = {"table": "whole", "up": "colwise", "down": "rowwise"}
    ids = torch.randint(20, (5, 100), generator=torch.Generator().manual_seed(0))
    assert find_quick_difference(Seeing(), partial(split_into_chunks, plan=plan, num_chunks=2), (ids,)) is None
    assert set(seen) == {(2, 64)}


def test_a_model_that_takes_nothing_less_is_given_all() -> None:
    class Exact(OnlySingle):
        def forward(self, x: Tensor) -> Tensor:
            assert len(x) == 5
            return super().forward(x)

    plan = {"up": "colwise", "down": "rowwise"}
    found = find_quick_difference(
        Exact(normed=True), partial(split_into_chunks, plan=plan, num_chunks=2), (torch.randn(5, 6),)
    )
    assert found is not None


def test_saved_weights_of_another_function_are_refused() -> None:
    config = ModelConfig.model_validate({"name": "x", "chunks": 2, "plan": {"up": "colwise", "down": "rowwise"}})
    given = (torch.randn(5, 6),)
    check_saved_model(Path("runs/a"), OnlySingle(normed=False), config, given)
    with pytest.raises(UsageError, match=r"^runs/a: recipe\.model\.plan: the model computes different outputs"):
        check_saved_model(Path("runs/a"), OnlySingle(normed=True), config, given)
