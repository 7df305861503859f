"""Formats text and quantities for output. Escapes untrusted text, so that it can't move the cursor or change colors."""

import re
from typing import Final

# The C0 and C1 control characters and DEL, invisible characters, characters that reorder text (bidirectional marks,
# embeddings, overrides and isolates), tags, Unicode line separators, and surrogates, which streams can't encode.
# Joiners are allowed, because some scripts need them.
_UNSAFE: Final = (
    r"\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    r"\ud800-\udfff\U000e0000-\U000e007f"
)
_UNITS: Final = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_UNSAFE_IN_TEXT: Final = re.compile(f"[{_UNSAFE}]")
_UNSAFE_IN_LINE: Final = re.compile(f"[{_UNSAFE}\t\n]")


def printable(text: str) -> str:
    r"""Return `text` with control and invisible characters replaced by escapes, such as \x1b. Keeps \n and \t."""
    return _UNSAFE_IN_TEXT.sub(_escape, text)


def printable_line(text: str) -> str:
    r"""Like `printable`, but also escape \n and \t. Use this function for names, which must stay on a single line."""
    return _UNSAFE_IN_LINE.sub(_escape, text)


def format_bytes(number: float) -> str:
    """Return a number of bytes as text, such as `1.5 GiB`."""
    for unit, name in _UNITS:
        if (count := number / unit) >= 1:
            return f"{count:.3g} {name}" if count < 1000 else f"{count:,.0f} {name}"
    return f"{number:.0f} B"


def format_count(number: int, noun: str) -> str:
    """Return a count with its noun, such as `1 step` or `3 steps`."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}{'es' if noun.endswith(('s', 'ch')) else 's'}"


def format_step_time(seconds: float) -> str:
    """Return a step time as text, such as `25 ms`."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")
