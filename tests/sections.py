"""Parts of the pages of the documentation, for the tests of what stands there."""

import re
from pathlib import Path
from typing import Final

DOCS: Final = Path(__file__).parent.parent / "docs"
_FENCE: Final = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def section(page: str, heading: str) -> str:
    """Return what stands below a heading of a page, with the sections within it; KeyError where there is none."""
    text = (DOCS / page).read_text(encoding="utf-8")
    # A comment in a block of code looks like a heading.
    plain = _FENCE.sub(lambda block: re.sub(r"[^\n]", " ", block[0]), text)
    found = re.search(rf"^(#+) {re.escape(heading)}$", plain, re.MULTILINE)
    if found is None:
        raise KeyError(f"{page} has no section {heading!r}")
    end = re.search(rf"^#{{1,{len(found[1])}}} ", plain[found.end() :], re.MULTILINE)
    return text[found.end() :][: end.start() if end else None]
