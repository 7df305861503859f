"""The GPT: its size, its first weights, what it may see, and rotary positions against their definition."""

import math

import pytest
import torch
from torch import nn

from lockstep.errors import UsageError
from lockstep.models.gpt import Positions, RotaryEmbedding, gpt


def small(**options: object) -> nn.Module:
    torch.manual_seed(0)
    return gpt(**{"vocabulary": 17, "context": 12, "layers": 2, "heads": 2, "width": 16, **options})  # type: ignore[arg-type]


def test_size_of_the_published_recipe() -> None:
    """nanoGPT prints 0.80M for its character model on the CPU, in which it leaves positions out."""
    with torch.device("meta"):
        model = gpt(vocabulary=65, context=64)
    positions = 64 * 128
    assert sum(parameter.numel() for parameter in model.parameters()) - positions == 795_904


def test_first_weights() -> None:
    torch.manual_seed(0)
    model = gpt(vocabulary=65, context=64, bias=True)
    ends = {"attention.out.weight", "down.weight"}
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif parameter.ndim == 1:
            assert (parameter == 1).all(), name
        else:
            ends_branch = any(name.endswith(end) for end in ends)
            expected = 0.02 / math.sqrt(2 * 4) if ends_branch else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.03), name


def test_a_fresh_model_knows_nothing() -> None:
    torch.manual_seed(0)
    model = gpt(vocabulary=65, context=64)
    ids = torch.randint(65, (4, 64))
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), torch.randint(65, (256,)))
    assert loss.item() == pytest.approx(math.log(65), abs=0.05)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_no_token_sees_later_ones(positions: Positions) -> None:
    model = small(positions=positions).eval()
    ids = torch.randint(17, (3, 12))
    other = ids.clone()
    other[:, 7] = (other[:, 7] + 1) % 17
    one, two = model(ids), model(other)
    assert one.shape == (3, 12, 17)
    assert torch.equal(one[:, :7], two[:, :7])
    assert not torch.isclose(one[:, 7:], two[:, 7:]).all(-1).any()


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_positions_count(positions: Positions) -> None:
    """Without them the last token would see the others as a set."""
    model = small(positions=positions).eval()
    ids = torch.tensor([[1, 2, 3, 4], [2, 1, 3, 4]])
    one, two = model(ids)[:, -1]
    assert not torch.allclose(one, two, atol=1e-6)


def test_tied_weights_and_biases() -> None:
    names = [name for name, _ in small().named_parameters()]
    assert not [name for name in names if "bias" in name or name.startswith("head")]
    untied = dict(small(tied=False, bias=True).named_parameters())
    assert untied["head.weight"].shape == (17, 16)
    assert "blocks.1.up.bias" in untied
    assert "norm.bias" in untied
    assert "head.bias" not in untied


def test_dropout_only_in_training() -> None:
    model = small(dropout=0.5)
    ids = torch.randint(17, (2, 12))
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), model(ids))


def test_rotary_against_complex_numbers() -> None:
    rotary, x = RotaryEmbedding(8, 12), torch.randn(2, 3, 12, 8)
    speeds = torch.tensor([10_000.0 ** (-2 * i / 8) for i in range(4)])
    turns = torch.polar(torch.ones(12, 4), torch.outer(torch.arange(12.0), speeds))
    expected = torch.complex(x[..., :4], x[..., 4:]) * turns
    torch.testing.assert_close(rotary(x), torch.cat([expected.real, expected.imag], -1))
    assert not rotary.state_dict()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"heads": 3}, "3 heads do not divide width=16"),
        ({"positions": "none"}, "positions must be learned or rotary, got 'none'"),
        ({"positions": "rotary", "heads": 16}, "an even number of channels per head, got 1"),
    ],
)
def test_what_cannot_be(options: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        small(**options)


def test_a_sequence_beyond_the_context() -> None:
    with pytest.raises(UsageError, match="a sequence has 13 tokens, but context is 12"):
        small()(torch.zeros(1, 13, dtype=torch.int64))


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_positions_may_be_given(positions: Positions) -> None:
    model = small(positions=positions).eval()
    ids = torch.randint(17, (2, 6), generator=torch.Generator().manual_seed(1))
    from_0, later = torch.arange(6).unsqueeze(0), torch.arange(4, 10).expand(2, 6)
    assert torch.equal(model(ids, position_ids=from_0), model(ids))
    moved = (model(ids, position_ids=later) - model(ids)).abs().max()
    # Of rotary positions the distances alone count.
    assert moved < 1e-6 if positions == "rotary" else moved > 1e-4
