"""Variables of the environment that harm are named, the others listed."""

import pytest

from lockstep.checkup.variables import make_variable_findings


@pytest.mark.parametrize(
    ("name", "value", "level"),
    [
        ("NVIDIA_TF32_OVERRIDE", "1", "problem"),
        ("NVIDIA_TF32_OVERRIDE", "0", "ok"),
        ("PYTORCH_TUNABLEOP_ENABLED", "1", "problem"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "problem"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1", "ok"),
        ("OMP_NUM_THREADS", "4", "ok"),
        ("OMP_NUM_THREADS", "4,2", "ok"),
        ("OMP_NUM_THREADS", "many", "warning"),
        ("ATEN_CPU_CAPABILITY", "avx2", "warning"),
        ("NCCL_DEBUG", "info", "warning"),
        ("NCCL_DEBUG", "WARN", "ok"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "warning"),
        ("TORCH_DISTRIBUTED_DEBUG", "INFO", "ok"),
        ("PYTHONHASHSEED", "0", "ok"),
    ],
)
def test_a_variable(name: str, value: str, level: str) -> None:
    first, *rest = make_variable_findings({name: value})
    assert (first.level, first.found) == (level, f"{name}={value}")
    assert [each.found for each in rest] == (
        [] if level == "ok" else ["none is set that changes numbers or communication"]
    )


def test_none() -> None:
    [found] = make_variable_findings({})
    assert found.level == "ok"
