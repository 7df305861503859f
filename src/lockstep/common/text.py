"""Text fit to print: of what others wrote nothing moves the cursor, colours, hides or reorders words; quantities."""

import re
from typing import Final

# The controls C0 and C1 with DEL, what is invisible or reorders (bidi marks, embeddings, overrides and isolates, tags),
# Unicode's own line ends, and halves of surrogate pairs, which no stream can encode. Joiners stay: scripts need them.
_UNSAFE: Final = (
    r"\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    r"\ud800-\udfff\U000e0000-\U000e007f"
)
_UNITS: Final = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_IN_TEXT: Final = re.compile(f"[{_UNSAFE}]")
_IN_LINE: Final = re.compile(f"[{_UNSAFE}\t\n]")


def printable(text: str) -> str:
    r"""Return `text` with each control or invisible character as a visible escape, such as \x1b; \n and \t stay."""
    return _IN_TEXT.sub(_escape, text)


def printable_line(text: str) -> str:
    r"""Return `text` as `printable` does, with \n and \t escaped too: for a name, which is to stay in its line."""
    return _IN_LINE.sub(_escape, text)


def size(number: float) -> str:
    """Say a number of bytes."""
    for unit, name in _UNITS:
        if (count := number / unit) >= 1:
            return f"{count:.3g} {name}" if count < 1000 else f"{count:,.0f} {name}"
    return f"{number:.0f} B"


def step_time(seconds: float) -> str:
    """Say how long a step takes."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")
