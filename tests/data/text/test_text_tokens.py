"""Token files: what nanoGPT writes is read, never unpickled, and never wholly."""

import json
import pickle
import resource
from pathlib import Path

import numpy as np
import pytest

from lockstep.data.base import DataSet
from lockstep.data.request import DataRequest
from lockstep.data.sources import open_data
from lockstep.data.text.tokens import TokenFile
from lockstep.errors import TrainingError, UsageError


def _open(root: Path, **options: object) -> DataSet:
    return open_data(DataRequest("tokens", str(root), options=options))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "train.bin")
    np.arange(30, dtype=np.uint16).tofile(tmp_path / "val.bin")
    return tmp_path


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_windows_are_those_of_the_file(tmp_path: Path, dtype: str) -> None:
    tokens = np.random.default_rng(0).integers(0, 60_000, 1000).astype(dtype)
    tokens.tofile(tmp_path / "train.bin")
    data = _open(tmp_path, context=7, stride=3, vocabulary=60_000, dtype=dtype)
    assert data.validation is None
    inputs, targets = data.train.fetch(np.array([5, 0, 330]), None)
    assert len(data.train) == 331
    for row, start in enumerate((15, 0, 990)):
        assert inputs[row].tolist() == tokens[start : start + 7].tolist()
        assert targets[row].tolist() == tokens[start + 1 : start + 8].tolist()


def test_meta_json_says_what_is_left_out(root: Path) -> None:
    with pytest.raises(UsageError, match=r"size of the vocabulary is unknown; set recipe\.data\.options\.vocabulary"):
        _open(root)
    (root / "meta.json").write_text(json.dumps({"vocab_size": 100, "tokenizer": {"by": "byte"}}))
    data = _open(root, context=8)
    assert data.facts == {"vocabulary": 100, "tokenizer": {"by": "byte"}, "context": 8}
    assert len(data.validation) == 4


class _Runs:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exec, ("raise SystemExit('it ran')",))


def test_a_pickle_is_not_opened(root: Path) -> None:
    (root / "meta.pkl").write_bytes(pickle.dumps(_Runs()))
    with pytest.raises(UsageError, match=r"\(meta\.pkl is not read, since a pickle can run code\); set"):
        _open(root)
    assert len(_open(root, vocabulary=100, context=9).train) == 11


@pytest.mark.parametrize(
    "text", ["[1]", '{"vocab_size": "many"}', '{"vocab_size": 65, "dtype": "float32"}', "{", "[" * 100_000]
)
def test_a_strange_meta_json_is_named(root: Path, text: str) -> None:
    (root / "meta.json").write_text(text)
    with pytest.raises(UsageError, match=r"meta\.json"):
        _open(root)


def test_tokens_beyond_the_vocabulary_are_named(root: Path) -> None:
    beyond = r"train\.bin: token \d+ is \d+, but the vocabulary has 65 tokens; correct"
    with pytest.raises(UsageError, match=beyond):  # before a run, as some are looked at
        _open(root, vocabulary=65, context=4)
    np.arange(100, dtype=np.uint16).clip(max=64).tofile(root / "train.bin")
    data = _open(root, vocabulary=65, context=4)
    np.arange(100, dtype=np.uint16).tofile(root / "train.bin")
    with pytest.raises(TrainingError, match=beyond):
        data.train.fetch(np.array([1, 16]), None)
    with pytest.raises(UsageError, match=r"dtype uint16 cannot hold a vocabulary of 65,537 tokens; set a larger"):
        _open(root, vocabulary=65_537)


def test_a_file_that_is_cut_off_is_an_error_and_no_signal(root: Path) -> None:
    data = _open(root, vocabulary=100, context=8)
    with (root / "train.bin").open("r+b") as file:
        file.truncate(20)
    with pytest.raises(TrainingError, match=r"train\.bin: truncated while in use, at byte 20"):
        data.train.fetch(np.array([1]), None)
    (root / "train.bin").write_bytes(b"123")
    with pytest.raises(UsageError, match="has 3 bytes, not a multiple of 2, the size of uint16"):
        _open(root, vocabulary=100)
    (root / "train.bin").unlink()
    with pytest.raises(UsageError, match=r"cannot read .*train\.bin: No such file .*; set recipe\.data\.root"):
        _open(root, vocabulary=100)


def test_a_file_of_many_tokens_takes_no_memory(tmp_path: Path) -> None:
    """Two billion tokens, all zeros on a disk that keeps no zeros."""
    with (tmp_path / "train.bin").open("wb") as file:
        file.truncate(4_000_000_000)
    tokens = TokenFile(tmp_path / "train.bin", "uint16", 10)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    starts = np.random.default_rng(0).integers(0, 2_000_000_000 - 1024, 2000)
    for start in np.split(starts, 200):
        tokens.get_windows(start, 1024)
    assert len(tokens) == 2_000_000_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KiB
