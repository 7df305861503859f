"""GRPO learns from its own answers with one hash on 1 to 4 processes, also resumed, and its formula is the paper's."""

import re
import shutil
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest
import torch

pytestmark = pytest.mark.slow("runs whole commands")

EXAMPLE: Final = Path(__file__).resolve().parent.parent / "examples" / "grpo.py"


def trained(folder: Path, processes: int, strategy: str = "auto", steps: int = 3) -> str:
    """Run the example, and return the hash of its weights."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    command = [sys.executable, *launcher, str(EXAMPLE), str(folder), strategy, str(steps)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=500, check=True)
    [sha256] = re.findall(r"weights sha256 ([0-9a-f]{64})", ended.stdout)
    return sha256


@pytest.mark.parametrize(("processes", "strategy"), [(2, "ddp"), (3, "zero3"), (4, "ddp")])
def test_it_has_one_hash_on_any_number_of_processes(tmp_path: Path, processes: int, strategy: str) -> None:
    assert trained(tmp_path / "some", processes, strategy) == trained(tmp_path / "alone", 1)


def test_it_resumes_to_the_same_hash(tmp_path: Path) -> None:
    alone = trained(tmp_path / "alone", 1, steps=22)
    left = tmp_path / "alone" / "checkpoints"
    for name in ("latest", "step-00000022"):  # as after a kill behind the checkpoint of step 20
        path = left / name
        path.unlink() if path.is_symlink() else shutil.rmtree(path, ignore_errors=True)
    assert (left / "step-00000020").is_dir()
    assert trained(tmp_path / "alone", 2, "ddp", steps=22) == alone


def test_verify_finds_no_difference(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lockstep", "verify", "--processes", "2", "--strategy", "zero3", str(EXAMPLE)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=tmp_path, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def _example() -> ModuleType:
    spec = spec_from_file_location("grpo", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rewards_and_the_loss_of_an_answer() -> None:
    module = _example()
    ids = module.prompts()[[7, 7, 7, 7]]  # 1+2=
    answers = torch.tensor([[3, 12, 5], [4, 12, 12], [3, 3, 12], [12, 3, 12]])
    assert module.rewards(ids, answers).tolist() == pytest.approx([1.0, 0.2, 0.0, 0.0])
    torch.manual_seed(0)
    model = module.language_model()
    losses = module.answer_loss(model, ids, answers, torch.tensor([1.0, -1.0, 2.0, 0.5]))
    assert losses.tolist() == pytest.approx([-1.0, 1.0, -2.0, -0.5])  # each ratio is 1
    gradient = torch.autograd.grad(losses.sum(), model.lm_head.weight)[0]
    chances = model(torch.cat([ids, answers], 1)).logits[:, 3:-1].log_softmax(2)
    tokens = chances.gather(2, answers[..., None]).squeeze(2)
    lengths = [2, 2, 3, 1]
    means = torch.stack([tokens[row, :length].mean() for row, length in enumerate(lengths)])
    expected = torch.autograd.grad(-(means * torch.tensor([1.0, -1.0, 2.0, 0.5])).sum(), model.lm_head.weight)[0]
    torch.testing.assert_close(gradient, expected)
