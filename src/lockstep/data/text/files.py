"""Text in files, cut into windows: a file, or all files of a folder that end in .txt."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lockstep.common import plainfile
from lockstep.data.base import DataSet
from lockstep.data.options import Count, Share, Text
from lockstep.data.request import DataRequest
from lockstep.data.text.tokenizer import Bytes, FromFile, Tokenizer, characters_of
from lockstep.data.text.windows import TokenArray, build_windows
from lockstep.errors import UsageError


@dataclass(frozen=True)
class Options:
    """How a text becomes samples.

    `context` is the number of tokens of a sample, and `stride` the distance of two starts in training, which is
    `context` where it is left out. A token is what `by` says, or what `tokenizer`, a file, makes of the text.
    `validation` is the share of the characters, at the end, that are validation's; 0 is none.
    """

    context: Count = 128
    stride: Count | None = None
    by: Literal["character", "byte"] = "character"
    tokenizer: Text | None = None
    validation: Share = 0.1


def open_data(request: DataRequest, options: Options) -> DataSet:
    """Return the windows of the text at `root`.

    A folder is read in the order of its files' names, one text after the other; with folders `train` and `val` in it,
    or files train.txt and val.txt, these are the parts, whatever share is set for validation.
    """
    return text_data(request.name, *_parts(Path(request.root), options.validation), options)


def text_data(name: str, train: str, validation: str, options: Options) -> DataSet:
    """Return the windows of two texts; without the second there is no validation."""
    tokenizer = _tokenizer(train, validation, options)
    first = TokenArray(tokenizer.encode(train))
    second = TokenArray(tokenizer.encode(validation)) if validation else None
    facts = {"vocabulary": tokenizer.vocabulary, "tokenizer": tokenizer.facts}
    return build_windows(name, first, second, options.context, options.stride, facts, tokenizer.decode)


def cut(text: str, share: float) -> tuple[str, str]:
    """Return a text without the share at its end, and that."""
    here = int(len(text) * (1 - share))
    return text[:here], text[here:]


def _tokenizer(train: str, validation: str, options: Options) -> Tokenizer:
    if options.tokenizer is not None:
        return FromFile(options.tokenizer)
    return Bytes() if options.by == "byte" else characters_of(train + validation)


def _parts(root: Path, share: float) -> tuple[str, str]:
    if not root.is_dir():
        return cut(_read(root), share)
    for train, validation in ((root / "train", root / "val"), (root / "train.txt", root / "val.txt")):
        if train.exists() and validation.exists():
            return _text(train), _text(validation)
    return cut(_text(root), share)


def _text(place: Path) -> str:
    if not place.is_dir():
        return _read(place)
    found = []
    for folder, folders, files in os.walk(place):
        folders[:] = sorted(each for each in folders if not each.startswith("."))
        found += [Path(folder) / each for each in sorted(files) if each.endswith(".txt") and not each.startswith(".")]
    if not found:
        raise UsageError(f"data set text: no file below {place} ends in .txt; set recipe.data.root to a file or folder")
    return "".join(map(_read, found))


def _read(file: Path) -> str:
    try:
        with plainfile.reader(file, links=True) as stream:
            found = stream.read().decode()
    except OSError as error:
        raise UsageError(f"data set text: {file} cannot be read: {error.strerror}; set recipe.data.root") from None
    except UnicodeDecodeError as error:
        raise UsageError(
            f"data set text: {file} is no UTF-8: byte {error.start:,} is {error.object[error.start]:#04x}; convert it"
        ) from None
    if not found:
        raise UsageError(f"data set text: {file} is empty; put text into it, or remove it")
    return found
