"""BoTNet-50: its size, its shapes and its relative positions."""

import pytest
import torch

from lockstep.errors import UsageError
from lockstep.models.botnet import Attention, RelativePosition, botnet50


@pytest.mark.parametrize(("last_stride", "parameters"), [(1, 20_859_176), (2, 20_852_008)])
def test_parameters(last_stride: int, parameters: int) -> None:
    with torch.device("meta"):
        model = botnet50(last_stride=last_stride)
        outputs = model(torch.zeros(1, 3, 224, 224))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert outputs.shape == (1, 1000)


@pytest.mark.parametrize(("last_stride", "rows"), [(1, [7, 7, 7]), (2, [7, 3, 3])])
def test_positions_follow_the_image_size(last_stride: int, rows: list[int]) -> None:
    with torch.device("meta"):
        model = botnet50(num_classes=10, image_size=64, last_stride=last_stride)
        outputs = model(torch.zeros(2, 3, 64, 64))
    positions = [module for module in model.modules() if isinstance(module, RelativePosition)]
    assert [len(position.rows) for position in positions] == rows
    assert outputs.shape == (2, 10)


def test_no_3x3_convolution_is_left_in_the_last_stage() -> None:
    with torch.device("meta"):
        last = botnet50().get_submodule("layer4")
    kernels = [module.kernel_size for module in last.modules() if isinstance(module, torch.nn.Conv2d)]
    assert set(kernels) == {(1, 1)}


def test_relative_position_against_the_definition() -> None:
    torch.manual_seed(0)
    height, width = 3, 4
    position = RelativePosition(5, height, width)
    queries = torch.randn(2, 2, height * width, 5)
    found = position(queries)
    expected = torch.empty_like(found)
    for q in range(height * width):
        for k in range(height * width):
            row = position.rows[k // width - q // width + height - 1]
            column = position.columns[k % width - q % width + width - 1]
            expected[:, :, q, k] = queries[:, :, q] @ (row + column)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_attention_against_torch(memory_format: torch.memory_format) -> None:
    torch.manual_seed(0)
    attention = Attention(8, heads=2, height=3, width=3)
    x = torch.randn(2, 8, 3, 3).to(memory_format=memory_format)
    queries, keys, values = (
        part.reshape(2, 2, 4, 9).transpose(2, 3) for part in attention.queries_keys_values(x).chunk(3, dim=1)
    )
    bias = attention.position(queries * 4**-0.5)
    expected = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=bias)
    torch.testing.assert_close(attention(x), expected.transpose(2, 3).reshape(2, 8, 3, 3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"image_size": 100}, "100 is not a multiple of 16; use 96"),
        ({"image_size": 48, "last_stride": 2}, "48 is not a multiple of 32; use 64"),
        ({"heads": 3}, "3 heads do not divide 512"),
        ({"last_stride": 4}, "last_stride must be 1 or 2, got 4"),
    ],
)
def test_refuses(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        botnet50(**arguments)
