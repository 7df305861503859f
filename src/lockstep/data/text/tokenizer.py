"""Tokenizers that encode text as bytes, as characters, or with a tokenizer file of the library `tokenizers`."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Protocol, final

import numpy as np
from numpy.typing import NDArray

from lockstep.common import plainfile
from lockstep.common.importing import import_extra
from lockstep.errors import UsageError, convert_error, convert_os_error

_MAX_BYTES: Final = 1 << 28  # maximum size of a tokenizer file


class Tokenizer(Protocol):
    """The interface of a tokenizer, which encodes text as tokens and decodes tokens to text."""

    @property
    def vocab_size(self) -> int:
        """The vocabulary size. Token IDs are integers from 0 to `vocab_size` - 1."""

    @property
    def saved_properties(self) -> dict[str, Any]:
        """The properties that are saved in checkpoints. `tokenizer_of` restores the tokenizer from them."""

    @property
    def library(self) -> Any:
        """The equivalent `tokenizers.Tokenizer`. For bytes and characters, it adds no special tokens."""

    def encode(self, text: str) -> NDArray[Any]:
        """Encode a text. The tokens have the smallest unsigned integer dtype that can represent the vocabulary."""

    def decode(self, tokens: NDArray[Any]) -> str:
        """Decode tokens to text."""


@final
class ByteTokenizer:
    """A tokenizer whose tokens are the UTF-8 bytes of the text."""

    vocab_size: int = 256

    @property
    def saved_properties(self) -> dict[str, Any]:
        """See Tokenizer."""
        return {"by": "byte"}

    @property
    def library(self) -> Any:
        """See Tokenizer."""
        tokenizers = _import_tokenizers()
        codes = {character: number for number, character in enumerate(_get_byte_characters())}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(codes, []))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        return tokenizer

    def encode(self, text: str) -> NDArray[Any]:
        """See Tokenizer."""
        return np.frombuffer(text.encode(), np.uint8)

    def decode(self, tokens: NDArray[Any]) -> str:
        """Decode tokens to text. Invalid UTF-8, such as an incomplete character, is replaced with U+FFFD."""
        return np.asarray(tokens).astype(np.uint8).tobytes().decode(errors="replace")


@final
@dataclass(frozen=True)
class CharTokenizer:
    """A tokenizer whose tokens are characters. A token ID is an index into the sorted `characters`."""

    characters: str

    @property
    def vocab_size(self) -> int:
        """See Tokenizer."""
        return len(self.characters)

    @property
    def saved_properties(self) -> dict[str, Any]:
        """See Tokenizer."""
        return {"by": "character", "characters": self.characters}

    @property
    def library(self) -> Any:
        """See Tokenizer."""
        tokenizers = _import_tokenizers()
        codes = {character: number for number, character in enumerate(self.characters)}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(codes, unk_token=""))
        # Use [\s\S] instead of a dot, because a dot doesn't match line breaks.
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = tokenizers.decoders.Fuse()
        return tokenizer

    @cached_property
    def _code_points(self) -> NDArray[np.uint32]:
        return _to_code_points(self.characters)

    def encode(self, text: str) -> NDArray[Any]:
        """See Tokenizer. Raises UsageError if a character isn't in the vocabulary."""
        points = _to_code_points(text)
        tokens = np.searchsorted(self._code_points, points).astype(np.min_scalar_type(len(self.characters)))
        is_unknown = self._code_points[np.minimum(tokens, len(self.characters) - 1)] != points
        if is_unknown.any():
            index = int(is_unknown.argmax())
            raise UsageError(f"character {text[index]!r} at index {index:,} is not in the vocabulary; remove it")
        return tokens

    def decode(self, tokens: NDArray[Any]) -> str:
        """See Tokenizer."""
        points: bytes = self._code_points[np.asarray(tokens)].astype("<u4").tobytes()
        return points.decode("utf-32-le")


@final
class FileTokenizer:
    """A tokenizer from a JSON file of the library `tokenizers`, such as the tokenizer.json of a model."""

    def __init__(self, file: str) -> None:
        tokenizers = _import_tokenizers(f"tokenizer {file}")
        read_errors = convert_os_error(UsageError, f"tokenizer {file}: cannot be read", "; pass a tokenizer file")
        with read_errors, plainfile.open_reader(Path(file), links=True) as stream:
            content = stream.read(_MAX_BYTES)
        # If the file is invalid, the library raises a plain Exception.
        with convert_error(UsageError, Exception, f"tokenizer {file}: not a file of the library tokenizers"):
            self.library = tokenizers.Tokenizer.from_str(content.decode())
        self.vocab_size: int = self.library.get_vocab_size(with_added_tokens=True)
        # The file can have several megabytes, so only its hash is saved. To decode tokens later, the user must pass the
        # file again.
        self.saved_properties = {"by": "tokenizer", "sha256": hashlib.sha256(content).hexdigest()}

    def encode(self, text: str) -> NDArray[Any]:
        """See Tokenizer. Adds no special tokens before or after the text."""
        ids = self.library.encode(text, add_special_tokens=False).ids
        return np.array(ids, np.min_scalar_type(self.vocab_size))

    def decode(self, tokens: NDArray[Any]) -> str:
        """See Tokenizer."""
        text: str = self.library.decode(np.asarray(tokens).tolist(), skip_special_tokens=False)
        return text


def tokenizer_of(facts: Mapping[str, Any], file: str = "") -> Tokenizer:
    """Restore a tokenizer from the properties that were saved in a checkpoint.

    `file` is the tokenizer file, if the run used one. Raises UsageError if its hash differs from the saved hash.
    """
    if facts["by"] == "byte":
        return ByteTokenizer()
    if facts["by"] == "character":
        return CharTokenizer(facts["characters"])
    tokenizer = FileTokenizer(file)
    if tokenizer.saved_properties != facts:
        advice = "pass the tokenizer file of the run"
        raise UsageError(
            f"tokenizer {file}: expected sha256 {facts['sha256']}, got {tokenizer.saved_properties['sha256']}; {advice}"
        )
    return tokenizer


def build_char_tokenizer(text: str) -> CharTokenizer:
    """Return a tokenizer whose vocabulary is the characters of a text."""
    return CharTokenizer(np.unique(_to_code_points(text)).astype("<u4").tobytes().decode("utf-32-le"))


def _to_code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le"), "<u4")


def _import_tokenizers(label: str = "tokenizer") -> Any:
    return import_extra("tokenizers", "text", label)


def _get_byte_characters() -> list[str]:
    """Return the characters that represent the 256 byte values in tokenizer files.

    This is the mapping of GPT-2 (bytes_to_unicode). A printable byte is mapped to its own character. All other bytes
    are mapped to the characters from U+0100 on, in order.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte) if byte in visible else chr(256 + hidden.index(byte)) for byte in range(256)]
