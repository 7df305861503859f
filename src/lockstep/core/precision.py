"""The precisions of a recipe. docs/precision.md lists their dtypes for storage, computation, communication and sums."""

from collections.abc import Mapping
from typing import Final, Literal

Precision = Literal["fp32", "tf32", "bf16", "bf16-compute", "fp16", "fp16-compute", "fp16-true"]

# Precisions that use loss scaling, because gradients or parts of the computation are in fp16.
SCALED_PRECISIONS: Final[frozenset[Precision]] = frozenset({"fp16", "fp16-compute", "fp16-true"})

# The optimization levels of NVIDIA apex. Many existing recipes use these names.
APEX_LEVELS: Final[Mapping[str, Precision]] = {"O0": "fp32", "O1": "fp16", "O2": "fp16-compute", "O3": "fp16-true"}

# The names of precisions in other frameworks, with their Lockstep names.
_FOREIGN_NAMES: Final = {"32-true": "fp32", "bf16-mixed": "bf16", "16-mixed": "fp16", "16-true": "fp16-true"}


_UNSUPPORTED: Final = {
    "fp8": (
        "its products require a GPU with compute capability 8.9 or higher, and have not been shown to give the same "
        "bits on every placement; use bf16-compute, or bf16"
    ),
    "bf16-true": (
        "the second moment of AdamW would never decay, because 0.999 times any bf16 number rounds back to the same "
        "number; use bf16-compute, which keeps weights and optimizer state in fp32 and computes in bf16"
    ),
}


def translate_precision(name: object) -> object:
    """Translate optimization levels of apex to Lockstep precisions. All other values are returned unchanged.

    Raises ValueError for precisions that Lockstep doesn't support, and for other frameworks' precision names. In the
    latter case, the message contains the Lockstep name.
    """
    text = str(name)
    if text in APEX_LEVELS:
        return APEX_LEVELS[text]
    for prefix, reason in _UNSUPPORTED.items():
        if text.startswith(prefix):
            raise ValueError(f"{text} is not supported: {reason}")
    if text in _FOREIGN_NAMES:
        raise ValueError(f"{text} is named {_FOREIGN_NAMES[text]} in Lockstep; use {_FOREIGN_NAMES[text]}")
    return name


def get_default_static_scale(precision: object) -> float | None:
    """Return the default static loss scale of a precision, or None if its default is dynamic loss scaling."""
    return 1.0 if precision == "fp16-true" else None
