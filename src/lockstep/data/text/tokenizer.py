"""Tokenizers that encode text as bytes, as characters, or with a file of the library `tokenizers`."""

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
from lockstep.errors import UsageError, error_as, os_error_as

_MAX_BYTES: Final = 1 << 28  # the maximum size of a tokenizer file in bytes


class Tokenizer(Protocol):
    """Encodes text as tokens and decodes tokens to text."""

    @property
    def vocabulary(self) -> int:
        """The vocabulary size. Token ids are integers from 0 to one less than this size."""

    @property
    def facts(self) -> dict[str, Any]:
        """The properties to save in checkpoints. `tokenizer_of` restores the tokenizer from these properties."""

    @property
    def library(self) -> Any:
        """The equivalent `tokenizers.Tokenizer`. For bytes and characters, it adds no special tokens."""

    def encode(self, text: str) -> NDArray[Any]:
        """Encode a text. The tokens have the smallest unsigned integer dtype that the vocabulary fits in."""

    def decode(self, tokens: NDArray[Any]) -> str:
        """Decode tokens to text."""


@final
class Bytes:
    """A tokenizer whose tokens are the bytes of the text in UTF-8."""

    vocabulary: int = 256

    @property
    def facts(self) -> dict[str, Any]:
        """See Tokenizer."""
        return {"by": "byte"}

    @property
    def library(self) -> Any:
        """See Tokenizer."""
        tokenizers = _import_tokenizers()
        codes = {character: number for number, character in enumerate(_visible_bytes())}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(codes, []))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        return tokenizer

    def encode(self, text: str) -> NDArray[Any]:
        """See Tokenizer."""
        return np.frombuffer(text.encode(), np.uint8)

    def decode(self, tokens: NDArray[Any]) -> str:
        """Decode tokens to text. Invalid UTF-8, such as a part of a character, is replaced with U+FFFD."""
        return np.asarray(tokens).astype(np.uint8).tobytes().decode(errors="replace")


@final
@dataclass(frozen=True)
class Characters:
    """A tokenizer whose tokens are characters. The id of a token is its index in `characters`, which are sorted."""

    characters: str

    @property
    def vocabulary(self) -> int:
        """See Tokenizer."""
        return len(self.characters)

    @property
    def facts(self) -> dict[str, Any]:
        """See Tokenizer."""
        return {"by": "character", "characters": self.characters}

    @property
    def library(self) -> Any:
        """See Tokenizer."""
        tokenizers = _import_tokenizers()
        codes = {character: number for number, character in enumerate(self.characters)}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(codes, unk_token=""))
        # Use [\s\S] instead of a dot, because a dot doesn't match a line break.
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = tokenizers.decoders.Fuse()
        return tokenizer

    @cached_property
    def _points(self) -> NDArray[np.uint32]:
        return _points(self.characters)

    def encode(self, text: str) -> NDArray[Any]:
        """See Tokenizer. Raises UsageError if a character isn't in the vocabulary."""
        points = _points(text)
        tokens = np.searchsorted(self._points, points).astype(np.min_scalar_type(len(self.characters)))
        is_unknown = self._points[np.minimum(tokens, len(self.characters) - 1)] != points
        if is_unknown.any():
            index = int(is_unknown.argmax())
            raise UsageError(f"character {text[index]!r} at index {index:,} is not in the vocabulary; remove it")
        return tokens

    def decode(self, tokens: NDArray[Any]) -> str:
        """See Tokenizer."""
        points: bytes = self._points[np.asarray(tokens)].astype("<u4").tobytes()
        return points.decode("utf-32-le")


@final
class FromFile:
    """A tokenizer from a JSON file of the library `tokenizers`, such as the tokenizer.json of a model."""

    def __init__(self, file: str) -> None:
        tokenizers = _import_tokenizers(f"tokenizer {file}")
        read_errors = os_error_as(UsageError, f"tokenizer {file}: cannot be read", "; pass a tokenizer file")
        with read_errors, plainfile.reader(Path(file), links=True) as stream:
            content = stream.read(_MAX_BYTES)
        # For an invalid file, the library raises Exception itself.
        with error_as(UsageError, Exception, f"tokenizer {file}: not a file of the library tokenizers"):
            self.library = tokenizers.Tokenizer.from_str(content.decode())
        self.vocabulary: int = self.library.get_vocab_size(with_added_tokens=True)
        # Save only the hash of the file, because the file can have several megabytes. To decode tokens later, the user
        # must pass the file again.
        self.facts = {"by": "tokenizer", "sha256": hashlib.sha256(content).hexdigest()}

    def encode(self, text: str) -> NDArray[Any]:
        """See Tokenizer. Adds no special tokens before or after the text."""
        ids = self.library.encode(text, add_special_tokens=False).ids
        return np.array(ids, np.min_scalar_type(self.vocabulary))

    def decode(self, tokens: NDArray[Any]) -> str:
        """See Tokenizer."""
        text: str = self.library.decode(np.asarray(tokens).tolist(), skip_special_tokens=False)
        return text


def tokenizer_of(facts: Mapping[str, Any], file: str = "") -> Tokenizer:
    """Restore a tokenizer from its properties `facts` in a checkpoint.

    `file` is the tokenizer file if the run used one. Raises UsageError if the file has a different hash.
    """
    if facts["by"] == "byte":
        return Bytes()
    if facts["by"] == "character":
        return Characters(facts["characters"])
    tokenizer = FromFile(file)
    if tokenizer.facts != facts:
        advice = "pass the tokenizer file of the run"
        raise UsageError(
            f"tokenizer {file}: expected sha256 {facts['sha256']}, got {tokenizer.facts['sha256']}; {advice}"
        )
    return tokenizer


def build_char_tokenizer(text: str) -> Characters:
    """Return a tokenizer for all characters that occur in a text."""
    return Characters(np.unique(_points(text)).astype("<u4").tobytes().decode("utf-32-le"))


def _points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le"), "<u4")


def _import_tokenizers(label: str = "tokenizer") -> Any:
    return import_extra("tokenizers", "text", label)


def _visible_bytes() -> list[str]:
    """Return the characters that represent the 256 bytes in tokenizer files.

    This is the mapping of GPT-2 (bytes_to_unicode). A visible byte is mapped to its own character. All other bytes are
    mapped to the characters from 256 on, in order.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte) if byte in visible else chr(256 + hidden.index(byte)) for byte in range(256)]
