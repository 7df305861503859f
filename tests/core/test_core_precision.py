"""A recipe is told what another framework's name for a precision is here, and why some are not to be had."""

import pytest
import torch

from lockstep.core.precision import translate_precision


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("bf16-mixed", "bf16-mixed is called bf16 here"),
        ("16-mixed", "16-mixed is called fp16 here"),
        ("16-true", "16-true is called fp16-true here"),
        ("fp8", "fp8 is not offered: .* capability 8.9 .*; use bf16-compute"),
        ("fp8-e4m3", "fp8-e4m3 is not offered"),
        ("bf16-true", "bf16-true is not offered: .* never decay: .*; use bf16-compute"),
    ],
)
def test_other_names(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        translate_precision(name)


@pytest.mark.parametrize("name", ["fp32", "tf32", "bf16-compute", "fp61", 16])
def test_what_is_not_known_elsewhere_is_left_alone(name: object) -> None:
    assert translate_precision(name) == name


def test_levels_of_apex_are_precisions_of_ours() -> None:
    assert [translate_precision(level) for level in ("O0", "O1", "O2", "O3")] == [
        "fp32",
        "fp16",
        "fp16-compute",
        "fp16-true",
    ]


def test_a_second_moment_of_bf16_never_decays() -> None:
    """Why weights and state in bf16 are not offered: 0.999 times any positive normal number rounds back to it."""
    numbers = torch.arange(0x0080, 0x7F80, dtype=torch.int16).view(torch.bfloat16)
    assert numbers.isfinite().all()
    assert torch.equal((numbers.float() * 0.999).bfloat16(), numbers)
    assert not torch.equal((numbers.float() * 0.99).bfloat16(), numbers)
