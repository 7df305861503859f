"""The forward pass runs in the precision asked for, gradients of fp16 are scaled, and kernels are fixed."""

import inspect
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep
from lockstep.comm import world
from lockstep.core.engine_recipe import PlainLossScale
from lockstep.core.precision import Precision
from lockstep.device.precision import (
    autocast,
    check_precision,
    make_loss_scaler,
    select_deterministic_kernels,
    set_cublas_workspace,
    unscale_,
)
from lockstep.errors import PreflightError, UsageError

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_a_product_has_the_precision_asked_for_each_time(precision: Precision, dtype: torch.dtype) -> None:
    context, matrix = autocast(precision, CPU), torch.ones(2, 2)
    for _ in range(2):
        with context:
            assert (matrix @ matrix).dtype == dtype
        assert (matrix @ matrix).dtype == torch.float32


@pytest.mark.parametrize(
    ("precision", "enabled"),
    [
        ("fp32", False),
        ("tf32", False),
        ("bf16", False),
        ("bf16-compute", False),
        ("fp16", True),
        ("fp16-compute", True),
        ("fp16-true", True),
    ],
)
def test_only_fp16_is_scaled(precision: Precision, enabled: bool) -> None:
    scaler = make_loss_scaler(precision, PlainLossScale(8.0, 2), CPU)
    assert scaler.is_enabled() is enabled
    assert scaler.scale(torch.tensor(3.0)).item() == (24.0 if enabled else 3.0)


def test_a_scaler_is_ready_before_it_has_scaled_a_loss() -> None:
    """A rank without a micro-batch in its first step takes part in the update all the same."""
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.tensor([8.0])
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    scaler = make_loss_scaler("fp16", PlainLossScale(8.0, 1), CPU)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert parameter.item() == 0.5
    assert scaler.get_scale() == 16.0  # grows after an interval of 1


@pytest.mark.parametrize("gradient", [24.0, torch.inf])
def test_gradients_of_any_dtype_are_unscaled_by_a_scale_that_stays(gradient: float) -> None:
    parameters = [torch.nn.Parameter(torch.ones(1, dtype=dtype)) for dtype in (torch.float16, torch.float32)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, gradient)
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    scaler = make_loss_scaler("fp16-true", PlainLossScale(65536.0, 1, static=8.0), CPU)
    unscale_(scaler, optimizer)
    assert [parameter.grad.item() for parameter in parameters if parameter.grad is not None] == [gradient / 8] * 2
    assert [bool(each) for each in scaler._found_inf_per_device(optimizer).values()] == [gradient == torch.inf]
    scaler.update(8.0)
    assert scaler.get_scale() == 8.0


_PRECISIONS = ["", "cuda.matmul", "cudnn", "cudnn.conv", "cudnn.rnn", "mkldnn", "mkldnn.matmul", "mkldnn.conv"]
_LESS_THAN_ASKED = [
    "cudnn.allow_tf32",
    "cuda.matmul.allow_tf32",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_fp16_accumulation",
]

READ = f"""
import json, operator, sys, torch
from lockstep.device.precision import select_deterministic_kernels, list_attention_backends
exec(sys.argv[1])
exec(sys.argv[2])
try:
    torch.nn.functional.max_unpool2d(torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1, 1, dtype=torch.int64), 2)
    refused = ""
except RuntimeError as error:
    refused = str(error)
names = {[*(f"{name}.fp32_precision".lstrip(".") for name in _PRECISIONS), *_LESS_THAN_ASKED]}
print(json.dumps({{
    **{{name: operator.attrgetter(name)(torch.backends) for name in names}},
    "matmul": torch.get_float32_matmul_precision(),
    "attention": list_attention_backends(),
    "math attention": torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed(),
    "fused attention layers": torch.backends.mha.get_fastpath_enabled(),
    "cudnn.benchmark": torch.backends.cudnn.benchmark,
    "cudnn.deterministic": torch.backends.cudnn.deterministic,
    "deterministic": "does not have a deterministic implementation" in refused,
    "threads": torch.get_num_threads(),
    "fill": torch.utils.deterministic.fill_uninitialized_memory,
}}))
"""
LOWERED = """
torch.set_float32_matmul_precision("medium")
torch.backends.cudnn.benchmark = True
torch.backends.cuda.enable_flash_sdp(False)
torch.backends.cudnn.conv.fp32_precision = torch.backends.cuda.matmul.fp32_precision = "tf32"
torch.backends.mkldnn.conv.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = "bf16"
"""
STARTS = pytest.mark.parametrize(
    "before",
    [
        pytest.param("", id="as torch starts", marks=pytest.mark.slow("what is lowered has to be set too")),
        pytest.param(LOWERED, id="lowered"),
    ],
)


def fixed(before: str, fix: str) -> dict[str, Any]:
    """Return the settings of a process which has begun with the code `before` and then fixed its kernels."""
    done = subprocess.run([sys.executable, "-c", READ, before, fix], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.slow("starts a Python of its own")
@STARTS
def test_kernels_are_fixed(before: str) -> None:
    """In a process of its own: what torch has set is the process's, and not all of it can be put back."""
    assert fixed(before, "select_deterministic_kernels(2)") == {
        **{f"{name}.fp32_precision".lstrip("."): "ieee" for name in _PRECISIONS},
        **dict.fromkeys(_LESS_THAN_ASKED, False),
        "matmul": "highest",
        "attention": "flash, memory-efficient, math",
        "math attention": False,
        "fused attention layers": False,
        "cudnn.benchmark": False,
        "cudnn.deterministic": True,
        "deterministic": True,
        "threads": 2,
        "fill": False,
    }


def test_threads_that_cannot_be_started_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    start, room = threading.Thread.start, iter(range(100))

    def start_some(thread: threading.Thread) -> None:
        if next(room) >= 50:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    before = threading.active_count()
    with pytest.raises(PreflightError, match=r"recipe\.threads: got 64, but this process could only start 50"):
        select_deterministic_kernels(64)
    assert threading.active_count() == before


@pytest.mark.parametrize(("chosen", "kept"), [(None, ":4096:8"), (":16:8", ":16:8")])
def test_the_workspace_of_cublas_is_an_exact_one(
    chosen: str | None, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", chosen or "")  # so that it is put back, also if it was not there
    if chosen is None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    set_cublas_workspace()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == kept


def test_another_workspace_of_cublas_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(UsageError, match=r"CUBLAS_WORKSPACE_CONFIG=:0:0: .* use :4096:8 or :16:8"):
        set_cublas_workspace()


def test_every_way_to_a_device_sets_the_workspace() -> None:
    """Only choose_device makes a card a process's own, and the workspace is set in it before."""
    source = Path(lockstep.__file__).parent
    users = [path.name for path in source.rglob("*.py") if "cuda.set_device" in path.read_text(encoding="utf-8")]
    assert users == ["world.py"]
    chooses = inspect.getsource(world.choose_device)
    assert 0 < chooses.index("set_cublas_workspace()") < chooses.index("torch.cuda.set_device")


ON_AMPERE = """
torch.cuda.get_device_capability = lambda device: (8, 0)
select_deterministic_kernels(2, "tf32", torch.device("cuda", 0))
"""


@pytest.mark.slow("starts a Python of its own")
@STARTS
def test_tf32_reaches_every_product_on_cuda_and_none_on_the_cpu(before: str) -> None:
    found = fixed(before, ON_AMPERE)
    taken = {name for name, value in found.items() if value == "tf32" or (value is True and "tf32" in name)}
    products = {"cuda.matmul.fp32_precision", "cudnn.conv.fp32_precision", "cudnn.rnn.fp32_precision"}
    assert taken == {*products, "cudnn.allow_tf32", "cuda.matmul.allow_tf32"}
    assert {found[f"{name}.fp32_precision".lstrip(".")] for name in ("mkldnn.matmul", "mkldnn.conv", "")} == {"ieee"}
    assert found["matmul"] == "high"
    assert not any(found[name] for name in _LESS_THAN_ASKED if "reduc" in name or "accum" in name)


def test_tf32_is_refused_where_it_would_be_another_thing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"^recipe\.precision: tf32 .* uses the CPU; use fp32, bf16"):
        check_precision("tf32", CPU)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(UsageError, match=r"8\.0 or higher, but Tesla T4 has 7\.5; use fp32 or fp16"):
        check_precision("tf32", torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    check_precision("tf32", torch.device("cuda", 0))
