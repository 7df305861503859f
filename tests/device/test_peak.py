"""The peak of known GPUs, by the names that drivers give them."""

import pytest

from lockstep.device.peak import find_peak_flops


@pytest.mark.parametrize(
    ("device", "precision", "teraflops"),
    [
        ("NVIDIA H200", "bf16", 989),
        ("NVIDIA H200", "fp32", 67),
        ("NVIDIA H200", "tf32", 494.5),
        ("NVIDIA H200 NVL", "bf16", 835),
        ("NVIDIA H100 80GB HBM3", "fp16", 989),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100 80GB PCIe", "tf32", 156),
        ("NVIDIA L40", "bf16", 181),
        ("NVIDIA L40S", "bf16", 362),
        ("Tesla T4", "fp16", 65),
    ],
)
def test_known_cards(device: str, precision: str, teraflops: float) -> None:
    assert find_peak_flops(device, precision) == teraflops * 1e12


@pytest.mark.parametrize(
    ("device", "precision"),
    [
        ("NVIDIA H300", "bf16"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16"),
        ("Tesla T4", "bf16"),  # it has no unit for it
        ("NVIDIA H200", "fp8"),
    ],
)
def test_no_peak_is_invented(device: str, precision: str) -> None:
    assert find_peak_flops(device, precision) is None
