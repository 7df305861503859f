"""Experts in groups give what they give ungrouped, and each group sees its own pairs alone."""

import re

import cut_models
import pytest
import torch
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.parallel.tensor.plan import split_into_chunks


def grouped(experts: nn.Module, count: int) -> nn.Module:
    mixture = nn.ModuleDict({"experts": experts})
    split_into_chunks(mixture, {"experts": "experts:count"}, count)
    return experts


def results(experts: nn.Module, rows: Tensor, chosen: Tensor, weights: Tensor) -> dict[str, Tensor]:
    rows, weights = rows.clone().requires_grad_(), weights.clone().requires_grad_()
    outputs = experts(rows, chosen, weights)
    (outputs**2).sum().backward()
    of_parameters = {name: each.grad for name, each in experts.named_parameters()}
    return {"outputs": outputs, "rows": rows.grad, "weights": weights.grad, **of_parameters}


@pytest.mark.parametrize("chosen", [torch.randint(8, (9, 3)), torch.full((9, 3), 5)], ids=["any", "one group alone"])
@pytest.mark.parametrize("count", [2, 8])
def test_groups_give_what_all_give(count: int, chosen: Tensor) -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return cut_models.Experts().double().eval()

    rows, weights = torch.randn(9, 11, dtype=torch.float64), torch.rand(9, 3, dtype=torch.float64)
    expected = results(made(), rows, chosen, weights)
    found = results(grouped(made(), count), rows, chosen, weights)
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        assert (found[name] - each).abs().max() <= 1e-10 * each.abs().max(), name


def test_a_group_is_given_its_own_pairs_in_the_order_of_the_rows() -> None:
    seen = []

    class Noting(cut_models.Experts):
        def forward(self, rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
            seen.append((rows[:, 0].tolist(), experts.flatten().tolist(), weights.flatten().tolist(), self.count))
            return rows

    rows = torch.arange(3.0).repeat(11, 1).t()
    chosen, weights = torch.tensor([[7, 0], [4, 5], [1, 4]]), torch.tensor([[0.5, 1.0], [2.0, 3.0], [4.0, 5.0]])
    grouped(Noting(), 4)(rows, chosen, weights)
    assert seen == [
        ([0.0, 2.0], [0, 1], [1.0, 4.0], 2),
        ([1.0, 1.0, 2.0], [0, 1, 0], [2.0, 3.0, 5.0], 2),
        ([0.0], [1], [0.5], 2),
    ]


def test_rows_of_another_shape_are_refused() -> None:
    experts = grouped(cut_models.Experts(), 4)
    with pytest.raises(
        UsageError, match=re.escape("experts is set to experts, but was called with rows of shape [2, 3, 11]")
    ):
        experts(torch.empty(2, 3, 11), torch.zeros(6, 2).long(), torch.empty(6, 2))


def test_on_the_meta_device_there_are_shapes() -> None:
    experts = grouped(cut_models.Experts(), 4).to("meta")
    experts.forward._forward = lambda rows, numbers, weights: rows * weights  # its own code looks at values
    rows, chosen, weights = (torch.empty(9, width, device="meta") for width in (11, 3, 3))
    assert experts(rows, chosen.long(), weights).shape == (9, 11)
