"""ZeRO as DeepSpeed does it, on the same network and data, ends with our weights but for rounding."""

import os
import subprocess
import sys
from pathlib import Path

import ours
import pytest
import worlds
from component import require_package
from safetensors.torch import load_file
from small_run import PROCESSES, RECIPES, TOLERANCE, furthest, wrong

pytestmark = pytest.mark.slow("other programs, or minutes")

PROGRAM = Path(__file__).with_name("deepspeed_program.py")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Let DeepSpeed train everything, once, and return the folder with what it came to."""
    require_package("deepspeed")
    folder = tmp_path_factory.mktemp("deepspeed")
    command = [sys.executable, str(PROGRAM), str(folder)]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder


@pytest.mark.slow(
    "test_torch.py has torch's ZeRO beside ours, parallel/test_deepspeed_engine.py DeepSpeed's beside one"
)
@pytest.mark.worlds
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_comes_to_our_weights(stage: int, name: str, weights: Path) -> None:
    theirs = load_file(weights / f"{stage}-{name}.safetensors")
    mine, *_ = worlds.run(PROCESSES, ours.trained, f"zero{stage}", RECIPES[name])
    assert furthest(mine, theirs) < TOLERANCE
    other, *_ = worlds.run(PROCESSES, ours.trained, f"zero{stage}", wrong(RECIPES[name]))
    assert furthest(other, theirs) > 10 * TOLERANCE
