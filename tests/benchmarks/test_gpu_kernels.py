"""The list of exact kernels is the page's and the benchmark's; on a card each is exact, and torch refuses the rest."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torchvision.ops  # noqa: F401 - has operations of its own
from torch import Tensor
from torch.nn import functional as F

from benchmarks import gpu_kernels
from benchmarks.gpu_uses import EXACT
from lockstep.device import kernels
from lockstep.device.precision import select_deterministic_kernels

pytestmark = pytest.mark.slow("other programs, or minutes")

ROOT = Path(__file__).parent.parent.parent
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_the_tables_are_those_of_the_code() -> None:
    script = ROOT / "scripts" / "kernel-table"
    checked = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_refused_operation_exists_in_torch() -> None:
    for entry in kernels.NONDETERMINISTIC_OPERATIONS:
        space, _, name = entry.name.partition("::")
        packet = getattr(getattr(torch.ops, space), name, None)
        assert packet or getattr(getattr(torch.ops, space), f"{name}_"), entry.name


@pytest.mark.parametrize("name", EXACT)
def test_each_line_gives_the_same_bits_here(name: str) -> None:
    work = EXACT[name].make(CPU, 1)
    first: dict[str, object] = {}
    for _ in range(2):
        assert gpu_kernels._measured(name, work, first, 1)["same"] is True
    assert all(each.isfinite().all() for each in work())


def test_other_bits_are_noticed() -> None:
    numbers = iter(range(9))

    def work() -> list[Tensor]:
        return [torch.tensor([0.0 if next(numbers) < 2 else -0.0])]

    first: dict[str, object] = {}
    assert gpu_kernels._measured("zero", work, first, 1)["same"] is True
    assert gpu_kernels._measured("zero", work, first, 1)["same"] is False


def answer(ms: float, same: bool = True) -> dict[str, object]:
    lines = {name: {"ms": ms, "same": same} for name in EXACT}
    return {"lines": lines, "refused": {"aten::put": "", "aten::histc": "computed it"}, "attention": "math"}


def test_prices_are_ratios_and_what_differs_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        gpu_kernels.DEFAULT: [answer(99.0), answer(2.0)],
        gpu_kernels.RUN: [answer(99.0), answer(3.0)],
        gpu_kernels.FILLED: [answer(99.0), answer(6.0)],
    }
    monkeypatch.setattr(gpu_kernels, "take_turns", lambda *_: (answers, {}))
    result = gpu_kernels.run(CPU, 1.0)
    assert result["lines"]["softmax"]["price"] == 1.5
    assert result["lines"]["softmax"]["price of filling"] == 2.0
    assert result["failures"] == ["aten::histc: torch did not refuse it: computed it"]
    assert "| softmax | yes | yes | 1.50 x | 2.00 x |" in gpu_kernels.table(result)
    answers[gpu_kernels.RUN][1] = answer(3.0, same=False)
    assert "softmax: not the same bits each time" in gpu_kernels.run(CPU, 1.0)["failures"]


@pytest.mark.gpu
def test_each_line_gives_the_same_bits_on_a_card() -> None:
    select_deterministic_kernels(1)
    found = {}
    for name, make in gpu_kernels.here().items():
        work, first = make(CUDA, 32), {}
        found[name] = [gpu_kernels._measured(name, work, first, 20) for _ in range(5)]
    assert not {name: turns for name, turns in found.items() if not all(each.get("same") for each in turns)}


@pytest.mark.gpu
def test_torch_refuses_what_is_refused() -> None:
    select_deterministic_kernels(1)
    assert not {name: did for name, did in gpu_kernels._refusals(CUDA) if did}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "features", "masked", "backend"),
    [
        (torch.bfloat16, 64, False, 1),
        (torch.bfloat16, 64, True, 2),
        (torch.float32, 64, False, 2),
        (torch.float32, 5, False, 0),
    ],
    ids=["flash", "memory-efficient, mask", "memory-efficient, fp32", "math"],
)
def test_attention_takes_the_kernel_that_the_page_says(
    dtype: torch.dtype, features: int, masked: bool, backend: int
) -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("flash attention needs compute capability 8.0")
    select_deterministic_kernels(1)
    query = torch.rand(1, 4, 64, features, device=CUDA, dtype=dtype, requires_grad=True)
    mask = torch.zeros(64, 64, device=CUDA, dtype=dtype) if masked else None
    assert torch._fused_sdp_choice(query, query, query, mask) == backend
    assert F.scaled_dot_product_attention(query, query, query, mask).shape == query.shape
