"""A model that mixes positions outside of attention, or does not heed where it is, is found by its loss in chunks."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.models.gpt import gpt
from lockstep.parallel.tensor.built_in import known_plan
from lockstep.parallel.tensor.plan import cut_into_chunks
from lockstep.tasks.language import Language
from lockstep.verification.sequence_check import departure

IDS = torch.randint(20, (2, 17), generator=torch.Generator().manual_seed(0))


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
        logits: Tensor = self.head(x + y.transpose(1, 2).reshape(n, t, -1))
        return logits


def _model(fault: str, narrow: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return Mixing(fault, narrow)


@pytest.mark.parametrize("narrow", [False, True])
def test_what_is_right_agrees(narrow: bool) -> None:
    assert departure(_model("", narrow), Language(), IDS, 2) is None


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_ours_agrees(positions: str) -> None:
    model = gpt(vocabulary=20, context=16, layers=2, heads=4, width=32, positions=positions)  # type: ignore[arg-type]
    assert departure(model.eval(), Language(), IDS, 4) is None


@pytest.mark.parametrize(("parts", "what"), [(3, None), (1, "the loss")])
def test_what_a_plan_does_wrong_in_chunks_of_both_kinds_is_found(parts: int, what: str | None) -> None:
    model = gpt(vocabulary=20, context=16, layers=2, heads=4, width=32).eval()
    plan = {**known_plan(model), "blocks.1.attention.queries_keys_values": f"colwise:{parts}"}
    found = departure(model, Language(), IDS, 2, partial(cut_into_chunks, plan=plan, count=2))
    assert (found and found[0]) == what


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize(
    ("fault", "what"),
    [("convolves", "the loss"), ("ignores", "the loss"), ("shifts", "the gradient of table.weight")],
)
def test_what_mixes_positions_is_found(fault: str, what: str, narrow: bool) -> None:
    found = departure(_model(fault, narrow), Language(), IDS, 2)
    assert found is not None
    assert found[0] == what
    assert found[1] > 1e-3
