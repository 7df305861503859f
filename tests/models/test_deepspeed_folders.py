"""Folders that DeepSpeed's save_checkpoint wrote: weights are read where they are whole, and nothing is unpickled."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.errors import UsageError
from lockstep.models.statefiles import read_tensors

WEIGHTS = {"a.weight": torch.arange(6.0).view(2, 3), "a.count": torch.tensor(2)}
MODEL = "mp_rank_00_model_states.pt"
OF_STAGE_3 = "zero_pp_rank_0_mp_rank_00_model_states.pt"


def saved(folder: Path, module: dict[str, Tensor], name: str = MODEL, latest: str = "global_step2") -> Path:
    """Write a checkpoint as DeepSpeed lays it out."""
    step = folder / "global_step2"
    step.mkdir(parents=True)
    content: dict[str, Any] = {"module": module, "buffer_names": ["a.count"], "global_steps": 2, "ds_version": "0.19.8"}
    torch.save(content, step / name)
    (folder / "latest").write_text(latest)
    return step


def test_the_whole_model_of_the_latest_step_is_read(tmp_path: Path) -> None:
    step = saved(tmp_path / "checkpoint", WEIGHTS)
    for path in (tmp_path / "checkpoint", step, step / MODEL):
        found = read_tensors(path)
        assert found.keys() == WEIGHTS.keys()
        assert all(torch.equal(found[name], WEIGHTS[name]) for name in WEIGHTS)


def test_parts_are_left_to_its_own_program(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    saved(folder, {}, OF_STAGE_3)
    command = f"python {folder}/zero_to_fp32.py {folder} OUT --tag global_step2 --safe_serialization, and use OUT"
    with pytest.raises(UsageError, match=re.escape(command)):
        read_tensors(folder)


def test_rounded_weights_are_read_only_where_they_are_named(tmp_path: Path) -> None:
    rounded = {"a.weight": torch.ones(2, dtype=torch.bfloat16)}
    step = saved(tmp_path / "checkpoint", rounded)
    with pytest.raises(UsageError, match="the weights are bfloat16, rounded from the weights in the optimizer files"):
        read_tensors(tmp_path / "checkpoint")
    assert read_tensors(step / MODEL)["a.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("latest", ["../elsewhere", "/etc", "gone", "x" * 1000])
def test_a_name_of_a_step_leads_nowhere_else(tmp_path: Path, latest: str) -> None:
    saved(tmp_path / "elsewhere", WEIGHTS)
    saved(tmp_path / "checkpoint", WEIGHTS, latest=latest)
    with pytest.raises(UsageError, match="contains no weights"):
        read_tensors(tmp_path / "checkpoint")
