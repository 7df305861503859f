"""Sizes are given in the largest unit of which there is one."""

import pytest

from lockstep.common.sizes import size_in_words


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 KiB"),
        (600_000, "586 KiB"),
        (1 << 20, "1 MiB"),
        ((1 << 30) - (1 << 20), "1,023 MiB"),
        (3 << 29, "1.5 GiB"),
    ],
)
def test_size(count: int, words: str) -> None:
    assert size_in_words(count) == words
