"""The peak FLOP/s of known GPUs for dense matrix products, by precision.

The numbers are from data sheets and architecture whitepapers of NVIDIA, in TFLOP/s without sparsity. If a source only
lists a number with sparsity, the table contains half of it. The fp16 and bf16 numbers are for tensor cores that
accumulate in fp32. The fp32 numbers are for CUDA cores, because TF32 isn't fp32.
"""

import re
from collections.abc import Mapping
from typing import Final, NamedTuple


class PeakTeraflops(NamedTuple):
    """The peak TFLOP/s of a GPU by precision, or None if the GPU has no hardware support for the precision."""

    fp32: float
    tf32: float | None
    fp16: float
    bf16: float | None


# By a pattern that must match the full name from the driver, because MIG instances and mobile GPUs have similar names
# but lower peaks.
_PEAKS: Final[Mapping[str, PeakTeraflops]] = {
    r"Tesla V100-SXM2-\d+GB(-LS)?": PeakTeraflops(15.7, None, 125, None),  # V100 data sheet
    r"Tesla V100-PCIE-\d+GB": PeakTeraflops(14, None, 112, None),
    r"Tesla V100S-PCIE-\d+GB": PeakTeraflops(16.4, None, 130, None),
    r"Tesla T4": PeakTeraflops(8.1, None, 65, None),  # T4 data sheet
    r"NVIDIA A100.*(SXM|PCI).*": PeakTeraflops(19.5, 156, 312, 312),  # A100 data sheet
    r"NVIDIA A30": PeakTeraflops(10.3, 82, 165, 165),  # A30 data sheet
    r"NVIDIA A40": PeakTeraflops(37.4, 74.8, 149.7, 149.7),  # A40 data sheet
    r"NVIDIA A10": PeakTeraflops(31.2, 62.5, 125, 125),  # A10 data sheet
    r"NVIDIA RTX A6000": PeakTeraflops(38.7, 77.4, 154.8, 154.8),  # GA102 whitepaper
    r"NVIDIA GeForce RTX 3090": PeakTeraflops(35.6, 35.6, 71, 71),
    r"NVIDIA L4": PeakTeraflops(30.3, 60, 121, 121),  # L4 data sheet
    r"NVIDIA L40": PeakTeraflops(90.5, 90.5, 181, 181),  # L40 data sheet
    r"NVIDIA L40S": PeakTeraflops(91.6, 183, 362, 362),  # L40S data sheet
    r"NVIDIA GeForce RTX 4090": PeakTeraflops(82.6, 82.6, 165.2, 165.2),  # Ada whitepaper
    r"NVIDIA GeForce RTX 5090": PeakTeraflops(104.8, 104.8, 209.5, 209.5),  # RTX Blackwell whitepaper
    r"NVIDIA H100 PCIe": PeakTeraflops(51, 378, 756, 756),  # H100 data sheet
    r"NVIDIA H100 NVL": PeakTeraflops(60, 417.5, 835, 835),
    r"NVIDIA H100 80GB HBM3": PeakTeraflops(67, 494.5, 989, 989),
    r"NVIDIA GH200 \d+GB": PeakTeraflops(67, 494.5, 989, 989),  # GH200 data sheet
    r"NVIDIA H200": PeakTeraflops(67, 494.5, 989, 989),  # H200 data sheet
    r"NVIDIA H200 NVL": PeakTeraflops(60, 417.5, 835, 835),
    r"NVIDIA B200": PeakTeraflops(75, 1125, 2250, 2250),  # HGX B200 data sheet, divided by its 8 GPUs
}


def find_peak_flops(device_name: str, precision: str) -> float | None:
    """Return the peak FLOP/s of the GPU with the name `device_name` for a precision, or None if it is unknown."""
    for name, peak in _PEAKS.items():
        if re.fullmatch(name, device_name) and " MIG " not in device_name:
            teraflops: float | None = peak._asdict().get(precision)
            return None if teraflops is None else teraflops * 1e12
    return None
