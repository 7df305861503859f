"""Datasets from the token files train.bin and val.bin, in the format of nanoGPT's prepare.py."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, final

import numpy as np
from numpy.typing import NDArray

from lockstep.common import plainfile
from lockstep.data.base import DataSet
from lockstep.data.options import Count
from lockstep.data.request import DataRequest
from lockstep.data.text.windows import make_window_dataset
from lockstep.errors import DataError, TrainingError, UsageError, convert_error, convert_os_error

_MAX_META_BYTES: Final = 1 << 26  # maximum size of meta.json
_CHECKS: Final = 16  # number of positions that are checked when a file is opened
_CHECK_LENGTH: Final = 64  # number of tokens that are checked at each position


@dataclass(frozen=True)
class Options:
    """The window size and the file format. `context` and `stride` are the same as for dataset `text`.

    - `vocabulary`: The size of the vocabulary. Defaults to the value in meta.json next to the files.
    - `dtype`: The dtype of a token. Defaults to the value in meta.json, or to uint16.
    """

    context: Count = 1024
    stride: Count | None = None
    vocabulary: Count | None = None
    dtype: Literal["uint16", "uint32"] | None = None


def open_data(request: DataRequest, options: Options) -> DataSet:
    """Open the tokens in `root/train.bin` and, if it exists, in `root/val.bin`."""
    root = Path(request.root)
    meta = _read_meta(root / "meta.json")
    vocabulary = options.vocabulary or meta.get("vocabulary") or meta.get("vocab_size")
    dtype = options.dtype or meta.get("dtype") or "uint16"
    if dtype not in ("uint16", "uint32") or not (vocabulary is None or isinstance(vocabulary, int)):
        raise UsageError(
            f"dataset tokens: {root / 'meta.json'}: expected dtype uint16 or uint32, and an integer vocab_size, got "
            f"{dtype!r} and {vocabulary!r}; correct the file"
        )
    if vocabulary is None:
        pickled = (root / "meta.pkl").exists()
        note = " (meta.pkl is not read, since a pickle can run code)" if pickled else ""
        raise UsageError(
            f"dataset tokens: the size of the vocabulary is unknown{note}; set recipe.data.options.vocabulary (50257 "
            f'for GPT-2), or write {{"vocab_size": 65}} to {root / "meta.json"}'
        )
    if vocabulary > 1 << 8 * np.dtype(dtype).itemsize:
        raise UsageError(
            f"dataset tokens: dtype {dtype} cannot hold a vocabulary of {vocabulary:,} tokens; set a larger "
            f"recipe.data.options.dtype or a smaller recipe.data.options.vocabulary"
        )
    train = TokenFile(root / "train.bin", dtype, vocabulary)
    validation = TokenFile(root / "val.bin", dtype, vocabulary) if (root / "val.bin").exists() else None
    tokenizer = {"tokenizer": meta["tokenizer"]} if "tokenizer" in meta else {}
    facts = {"vocabulary": vocabulary, **tokenizer}
    return make_window_dataset("tokens", train, validation, options.context, options.stride, facts)


@final
class TokenFile:
    """A sequence of tokens in a file of little-endian integers. Windows are read lazily.

    The file isn't memory-mapped, because a process is killed with SIGBUS if a mapped file is truncated, and because
    mapped pages count towards the memory usage of the process.
    """

    in_memory: bool = False

    def __init__(self, file: Path, dtype: str, vocabulary: int) -> None:
        self._file = file
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._vocabulary = vocabulary
        advice = "; set recipe.data.root to the folder of train.bin"
        with convert_os_error(UsageError, f"dataset tokens: cannot read {file}", advice):
            self._descriptor = plainfile.open_descriptor(file, links=True)
        size = os.fstat(self._descriptor).st_size
        if size % self._dtype.itemsize:
            raise UsageError(
                f"dataset tokens: {file} has {size:,} bytes, not a multiple of {self._dtype.itemsize}, the size of "
                f"{dtype}; correct recipe.data.options.dtype or the file"
            )
        self._length = size // self._dtype.itemsize
        self._check_sampled_tokens()

    def _check_sampled_tokens(self) -> None:
        """Raise UsageError if a token is outside the vocabulary, which usually means that the dtype is wrong.

        Only a few tokens at evenly spaced positions in the file are checked.
        """
        length = min(_CHECK_LENGTH, self._length)
        starts = np.linspace(0, self._length - length, min(_CHECKS, self._length)).astype(np.int64)
        with convert_error(UsageError, TrainingError, "dataset tokens"):
            self.get_windows(np.unique(starts), length)

    def __len__(self) -> int:
        return self._length

    def get_windows(self, starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """See TokenSequence. Raises TrainingError if the file can't be read or a token is outside the vocabulary."""
        tokens = np.empty((len(starts), length), self._dtype)
        for row, start in zip(tokens, starts.tolist(), strict=True):
            self._read_tokens(row, start)
        if tokens.size and tokens.max() >= self._vocabulary:
            position = int((starts[:, None] + np.arange(length))[tokens >= self._vocabulary][0])
            raise DataError(
                f"{self._file}: token {position:,} is {tokens.max()}, but the vocabulary has {self._vocabulary:,} "
                f"tokens; correct recipe.data.options.vocabulary or recipe.data.options.dtype"
            )
        return tokens.astype(np.int64)

    def _read_tokens(self, output: NDArray[Any], first_token: int) -> None:
        offset = first_token * self._dtype.itemsize
        with convert_os_error(DataError, f"{self._file}: cannot be read", "; check the disk it is on"):
            read = os.preadv(self._descriptor, [output.view(np.uint8).data], offset)
        if read != output.nbytes:
            raise DataError(f"{self._file}: truncated while in use, at byte {offset + read:,}; copy it again")


def _read_meta(file: Path) -> Mapping[str, Any]:
    if not os.path.lexists(file):
        return {}
    label = f"dataset tokens: {file}"
    with convert_os_error(UsageError, f"{label}: cannot be read"), plainfile.open_reader(file, links=True) as stream:
        content = stream.read(_MAX_META_BYTES)
    with convert_error(UsageError, ValueError, f"{label}: not valid JSON", "; correct the file"):
        meta = plainfile.parse_json(content)
    if not isinstance(meta, dict):
        raise UsageError(f"{label}: expected an object with vocab_size, got {type(meta).__name__}; correct the file")
    return meta
