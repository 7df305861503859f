"""Tokenizers by byte and by character as those of the library `tokenizers`, which other programs read."""

from __future__ import annotations

from typing import Any

from lockstep.data.text.tokenizer import Bytes, Characters, FromFile, Tokenizer
from lockstep.errors import UsageError


def as_library(tokenizer: Tokenizer) -> Any:
    """Return a `tokenizers.Tokenizer` that gives the same tokens, nothing before or after them."""
    if isinstance(tokenizer, FromFile):
        return tokenizer.library
    try:
        from tokenizers import Regex, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as Library
    except ModuleNotFoundError:
        raise UsageError("the library tokenizers is not installed; run: pip install 'lockstep-train[text]'") from None
    if isinstance(tokenizer, Characters):
        # \s\S: a dot leaves the end of a line out.
        found = Library(
            models.WordLevel({each: number for number, each in enumerate(tokenizer.characters)}, unk_token="")
        )
        found.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        found.decoder = decoders.Fuse()
        return found
    assert isinstance(tokenizer, Bytes)
    found = Library(models.BPE({each: number for number, each in enumerate(_of_bytes())}, []))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.decoder = decoders.ByteLevel()
    return found


def _of_bytes() -> list[str]:
    """Return the characters that stand for the 256 bytes in such files: a byte's own where it is visible.

    So GPT-2's tokenizer has it (bytes_to_unicode); the others follow from 256 on, in their order.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte) if byte in visible else chr(256 + hidden.index(byte)) for byte in range(256)]
