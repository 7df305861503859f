"""A recipe is told what another framework's name for a precision is here, and why some are not to be had."""

import pytest

from lockstep.core.precision import translate_precision


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("bf16-mixed", "bf16-mixed is named bf16 in Lockstep; use bf16"),
        ("16-mixed", "16-mixed is named fp16 in Lockstep; use fp16"),
        ("16-true", "16-true is named fp16-true in Lockstep; use fp16-true"),
        ("fp8", "fp8 is not supported: .* capability 8.9 .*; use bf16-compute"),
        ("fp8-e4m3", "fp8-e4m3 is not supported"),
        ("bf16-true", "bf16-true is not supported: .* never decay, because .*; use bf16-compute"),
    ],
)
def test_other_names(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        translate_precision(name)


@pytest.mark.parametrize("name", ["fp32", "tf32", "bf16-compute", "fp61", 16])
def test_what_is_not_known_elsewhere_is_left_alone(name: object) -> None:
    assert translate_precision(name) == name


def test_levels_of_apex_are_precisions_of_ours() -> None:
    levels = {"O0": "fp32", "O1": "fp16", "O2": "fp16-compute", "O3": "fp16-true"}
    assert {level: translate_precision(level) for level in levels} == levels
