"""Text datasets from a file, or from all .txt files in a folder."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from lockstep.common import plainfile
from lockstep.common.patterns import list_some
from lockstep.data.base import DataSet
from lockstep.data.options import Count, Fraction, Text
from lockstep.data.request import DataRequest
from lockstep.data.text.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, build_char_tokenizer
from lockstep.data.text.windows import TokenArray, make_window_dataset
from lockstep.data.validation_split import HELD_OUT_NAMES, TRAIN_NAMES, get_validation_fraction
from lockstep.errors import UsageError

_MAX_SHOWN: Final = 5
_DIGITS: Final = re.compile(r"\d+")


@dataclass(frozen=True)
class Options:
    """The settings for tokenizing a text and splitting it into samples.

    - `context`: The number of tokens per sample.
    - `stride`: The number of tokens between the starts of consecutive training samples. Defaults to `context`.
    - `by`: Whether a token is a character or a byte if no `tokenizer` is set.
    - `tokenizer`: A tokenizer file, such as the tokenizer.json of a model.
    - `validation`: The fraction of characters at the end of the text for validation if there is no validation text.
      Defaults to 0.1. 0 means no validation.
    """

    context: Count = 128
    stride: Count | None = None
    by: Literal["character", "byte"] = "character"
    tokenizer: Text | None = None
    validation: Fraction | None = None


def open_data(request: DataRequest, options: Options) -> DataSet:
    """Open the text at `root`, which is a file or a folder.

    The files in a folder are concatenated in the order of their names. If the folder contains the subfolders train/ and
    val/, or the files train.txt and val.txt, they are the two splits, and the option `validation` must not be set.
    Raises UsageError if other files or subfolders have the names of splits, because the text would include test data.
    """
    return make_text_dataset(request.name, *_read_splits(Path(request.root), options), options)


def make_text_dataset(name: str, train: str, validation: str, options: Options) -> DataSet:
    """Return a dataset from a training and a validation text. An empty validation text means no validation split."""
    tokenizer = _make_tokenizer(train, validation, options)
    train_tokens = TokenArray(tokenizer.encode(train))
    validation_tokens = TokenArray(tokenizer.encode(validation)) if validation else None
    facts = {"vocabulary": tokenizer.vocab_size, "tokenizer": tokenizer.saved_properties}
    return make_window_dataset(
        name, train_tokens, validation_tokens, options.context, options.stride, facts, tokenizer.decode
    )


def split_text(text: str, validation_fraction: float) -> tuple[str, str]:
    """Split a text into a training and a validation text. The validation text is the given fraction at the end."""
    end = int(len(text) * (1 - validation_fraction))
    return text[:end], text[end:]


def _make_tokenizer(train_text: str, validation_text: str, options: Options) -> Tokenizer:
    if options.tokenizer is not None:
        return FileTokenizer(options.tokenizer)
    return ByteTokenizer() if options.by == "byte" else build_char_tokenizer(train_text + validation_text)


def _read_splits(root: Path, options: Options) -> tuple[str, str]:
    pairs = ((root / "train", root / "val"), (root / "train.txt", root / "val.txt"))
    train, validation = next((pair for pair in pairs if pair[0].exists() and pair[1].exists()), (root, None))
    fraction = get_validation_fraction("text", options.validation, validation)
    if validation is None:
        return split_text(_read_text(train), fraction)
    return _read_text(train), _read_text(validation)


def _read_text(path: Path) -> str:
    if not path.is_dir():
        return _read_file(path)
    paths = []
    for folder, folders, files in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths += [Path(folder) / name for name in sorted(files) if name.endswith(".txt") and not name.startswith(".")]
    if not paths:
        raise UsageError(
            f"dataset text: no .txt files under {path}; set recipe.data.root to a text file, or to a folder with .txt "
            f"files"
        )
    _check_no_splits(path, paths)
    return "".join(map(_read_file, paths))


def _check_no_splits(root: Path, files: Sequence[Path]) -> None:
    """Raise UsageError if some of the files, which would be read as one text, seem to be a held-out split.

    This is the case if a name is equal to that of training data except for the word of the split, such as
    wiki-train.txt and wiki-test.txt, or if a name directly in `root` is only this word, such as test.txt.
    """
    held_out_word = re.compile(rf"(?<![a-z])(?:{'|'.join(HELD_OUT_NAMES)})(?![a-z])")
    names_by_folder: dict[Path, dict[Path, str]] = {}
    for file in files:
        relative = file.relative_to(root)
        for entry in (relative, *relative.parents[:-1]):  # without the root itself
            name = entry.stem if entry is relative else entry.name
            names_by_folder.setdefault(entry.parent, {})[entry] = _DIGITS.sub("0", name.lower())
    held_out = [
        str(entry)
        for folder, names in names_by_folder.items()
        for entry, name in names.items()
        if (held_out_word.search(name) and any(held_out_word.sub(word, name) in names.values() for word in TRAIN_NAMES))
        or (folder == Path() and len(names) > 1 and held_out_word.fullmatch(name))
    ]
    if held_out:
        raise UsageError(
            f"dataset text: {root} would be read as one text, but contains {list_some(held_out, _MAX_SHOWN)}, named "
            f"like a validation or test split; set recipe.data.root to the training text, name the splits train.txt "
            f"and val.txt (or the folders train and val), or rename these files if they are part of the text"
        )


def _read_file(file: Path) -> str:
    try:
        with plainfile.open_reader(file, links=True) as stream:
            text = stream.read().decode()
    except OSError as error:
        problem = f"cannot read {file}: {error.strerror}"
        raise UsageError(f"dataset text: {problem}; set recipe.data.root to a readable file or folder") from None
    except UnicodeDecodeError as error:
        raise UsageError(
            f"dataset text: {file} is not valid UTF-8: byte {error.start:,} is {error.object[error.start]:#04x}; "
            f"convert the file to UTF-8"
        ) from None
    if not text:
        raise UsageError(f"dataset text: {file} is empty; add text to it, or remove it")
    return text
