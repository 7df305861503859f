"""The settings that decide whether kernels are exact are read before and after a run sets them."""

import json
import os
import subprocess
import sys

import pytest

SHOW = """
import json
from dataclasses import asdict
from lockstep.device.kernel_settings import doubts, settings
found = settings(1)
print(json.dumps([[[each.name, each.now, each.in_run] for each in found], doubts("fp32")]))
"""


def shown(**env: str) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """Return the settings of a process that starts with these variables, and what is doubtful about them."""
    clean = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    ran = subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True, env=clean | env, check=True)
    found, doubtful = json.loads(ran.stdout)
    return {name: (now, in_run) for name, now, in_run in found}, doubtful


@pytest.mark.commands
def test_what_a_run_sets() -> None:
    found, doubtful = shown()
    assert found["CUBLAS_WORKSPACE_CONFIG"] == ("unset", ":4096:8")
    assert found["torch.use_deterministic_algorithms"] == ("False", "True")
    assert found["torch.backends.cudnn.conv.fp32_precision"][1] == "ieee"
    assert found["torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction"] == ("True", "False")
    assert doubtful == []


@pytest.mark.commands
@pytest.mark.parametrize(
    ("env", "doubt"),
    [
        ({"CUBLAS_WORKSPACE_CONFIG": ":0:0"}, "CUBLAS_WORKSPACE_CONFIG=:0:0: cuBLAS may then compute"),
        ({"NVIDIA_TF32_OVERRIDE": "1"}, "recipe.precision: fp32, but NVIDIA_TF32_OVERRIDE=1 makes products"),
    ],
)
def test_variables_of_the_users_that_break_it_are_named(env, doubt) -> None:
    _, [found] = shown(**env)
    assert found.startswith(doubt)
