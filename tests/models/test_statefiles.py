"""Tensors of others' files: each form that is read, and what is said of what is none."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from lockstep.errors import UsageError
from lockstep.models.statefiles import read_tensors, strip_prefix

TENSORS = {"a.weight": torch.arange(6.0).view(2, 3), "a.bias": torch.tensor([1, 2])}


class Runs:
    """Makes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._file),)


def same(found: dict[str, Tensor]) -> bool:
    return found.keys() == TENSORS.keys() and all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)


def sharded(folder: Path) -> Path:
    folder.mkdir()
    places = {name: f"model-{number}.safetensors" for number, name in enumerate(TENSORS)}
    for name, file in places.items():
        safetensors.torch.save_file({name: TENSORS[name]}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def test_each_form_is_read(tmp_path: Path) -> None:
    safetensors.torch.save_file(TENSORS, tmp_path / "model.safetensors")
    torch.save(TENSORS, tmp_path / "plain.pth")
    torch.save({"epoch": 3, "state_dict": TENSORS}, tmp_path / "nested.ckpt")
    torch.save({"epoch": 3, "state_dict": TENSORS, "best_acc1": 0.5}, tmp_path / "distribuuuu.pth.tar")
    torch.save({"epoch": 3, "model_state": TENSORS, "optimizer_state": {}}, tmp_path / "pycls.pyth")
    for name in ("model.safetensors", "plain.pth", "nested.ckpt", "distribuuuu.pth.tar", "pycls.pyth", "."):
        assert same(read_tensors(tmp_path / name)), name
    assert same(read_tensors(sharded(tmp_path / "sharded")))


def test_a_pickle_runs_no_code(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    torch.save({"state_dict": TENSORS, "config": Runs(trap)}, tmp_path / "model.pth")
    (tmp_path / "model.bin").write_bytes(pickle.dumps(Runs(trap)))
    with pytest.raises(UsageError, match="contains more than tensors, and is not loaded, since it could run code"):
        read_tensors(tmp_path / "model.pth")
    with pytest.raises(UsageError, match=r"model.bin: "):
        read_tensors(tmp_path / "model.bin")
    assert not trap.exists()


@pytest.mark.parametrize("name", ["model.safetensors", "model.pth"])
def test_a_truncated_file_is_told(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    if name.endswith("pth"):
        torch.save(TENSORS, file)
    else:
        safetensors.torch.save_file(TENSORS, file)
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(UsageError, match=f"{name}: not a complete"):
        read_tensors(file)


def test_what_has_no_weights_is_told(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.onnx").write_bytes(b"")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"step": 3}, tmp_path / "dict.pt")
    os.mkfifo(tmp_path / "pipe.safetensors")
    for name, text in {
        "nowhere.safetensors": "not found",
        "empty": "contains no weights",
        "model.onnx": "unknown file type",
        "list.pt": "expected a state_dict, got list",
        "dict.pt": "expected a state_dict, got the entries step",
        "pipe.safetensors": "not a regular file",
    }.items():
        with pytest.raises(UsageError, match=text):
            read_tensors(tmp_path / name)


@pytest.mark.parametrize(
    ("index", "text"),
    [
        ({"weight_map": {"a": "../model.safetensors"}}, "all shards must be .safetensors files in the same folder"),
        ({"weight_map": {"a": "model.bin"}}, "all shards must be .safetensors files in the same folder"),
        ({"weight_map": {"a": "gone.safetensors"}}, "gone.safetensors: not found"),
        ({"weight_map": {"b": "model-0.safetensors"}}, "tensors missing in the listed files: b"),
        ({"weights": {}}, "not a valid index of weights"),
        ([1], "not a valid index of weights"),
    ],
)
def test_an_index_that_leads_nowhere_is_told(tmp_path: Path, index: object, text: str) -> None:
    folder = sharded(tmp_path / "sharded")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UsageError, match=text):
        read_tensors(folder)


def test_names_lose_what_a_wrapper_or_a_larger_model_put_before_them() -> None:
    for wrapper in ("module.", "_orig_mod.", "module._orig_mod."):
        assert same(strip_prefix({f"{wrapper}{name}": each for name, each in TENSORS.items()}, "file", ""))
    mixed = {**{f"encoder.{name}": each for name, each in TENSORS.items()}, "head.weight": torch.ones(1)}
    assert same(strip_prefix(mixed, "file", "encoder."))
    assert strip_prefix(mixed, "file", "").keys() == mixed.keys()
    with pytest.raises(UsageError, match=r"file: no name begins with 'encodr.'; did you mean 'encoder.'"):
        strip_prefix(mixed, "file", "encodr.")


def test_a_header_that_claims_a_million_tensors_is_refused_at_once(tmp_path: Path) -> None:
    entry = '"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    text = ("{" + ",".join(entry % number for number in range(400_000)) + "}").encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(UsageError, match=r"not a complete safetensors file: .*its header has"):
        read_tensors(tmp_path)
