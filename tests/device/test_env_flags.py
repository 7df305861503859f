"""Variables that change what kernels compute are recorded where they count, and refused where a recipe forbids it."""

import pytest
import torch

from lockstep.device.env_flags import NO_FLAGS, check_env_flags, read_env_flags
from lockstep.errors import UsageError

VARIABLES = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "PYTORCH_TUNABLEOP_ENABLED")


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, "CUBLAS_WORKSPACE_CONFIG", "TIMM_FUSED_ATTN"):
        monkeypatch.delenv(name, raising=False)


def test_what_is_set_is_recorded_where_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_env_flags(torch.device("cuda")) == NO_FLAGS
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setenv("TIMM_FUSED_ATTN", "0")
    assert read_env_flags(torch.device("cuda")) == "TIMM_FUSED_ATTN=0 CUBLAS_WORKSPACE_CONFIG=:16:8"
    assert read_env_flags(torch.device("cpu")) == "TIMM_FUSED_ATTN=0"


@pytest.mark.parametrize("name", VARIABLES)
def test_what_would_break_fp32_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "0")
    check_env_flags("fp32")
    monkeypatch.setenv(name, "1")
    with pytest.raises(UsageError, match=name):
        check_env_flags("fp32")


def test_tf32_may_be_forced_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    check_env_flags("tf32")
    check_env_flags("bf16")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    with pytest.raises(UsageError, match="disables TF32"):
        check_env_flags("tf32")
