"""What others wrote is printed without its control characters."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.common.text import format_bytes, format_step_time, printable, printable_line


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("\x9b31m red", r"\x9b31m red"),  # the same as ESC [, in one character
        ("done\rfailed", r"done\rfailed"),
        ("a\x7fb\x00c", r"a\x7fb\x00c"),
        ("file\u202egpj.exe", r"file\u202egpj.exe"),
        ("ok\u2028error: forged", r"ok\u2028error: forged"),
        ("\u2066a\u2069 \u200f \ufeff", r"\u2066a\u2069 \u200f \ufeff"),
        ("byte \udcff", r"byte \udcff"),  # as os.fsdecode makes of a name that is no UTF-8
        ("\U000e0041", r"\U000e0041"),
    ],
)
def test_controls_are_shown_and_not_obeyed(text, expected):
    assert printable(text) == printable_line(text) == expected


def test_text_of_all_scripts_stays_as_it_is():
    text = "a\tb\nGrüße, 日本語, عربى, नमस्ते, \u0645\u06cc\u200c\u062e, \U0001f468\u200d\U0001f469, C:\\x1b"
    assert printable(text) == text


def test_a_name_stays_in_its_line():
    assert printable_line("a\nerror: forged\tb") == r"a\nerror: forged\tb"


@given(st.text(st.characters()))
def test_nothing_that_controls_is_left(text):
    shown = printable(text)
    assert not [each for each in shown if unicodedata.category(each) in ("Cc", "Cs", "Zl", "Zp") and each not in "\n\t"]
    assert not [each for each in shown if unicodedata.bidirectional(each) in ("LRO", "RLO", "LRE", "RLE", "LRI", "RLI")]
    assert printable(shown) == shown
    assert len(printable_line(text).splitlines()) <= 1
    shown.encode()


def test_quantities_are_said_in_their_unit():
    assert [format_bytes(number) for number in (0, 1023, 1024, 1.5 * 2**20, 80 << 30, 1023 << 20)] == [
        *("0 B", "1023 B", "1 KiB", "1.5 MiB", "80 GiB", "1,023 MiB")
    ]
    assert [format_step_time(seconds) for seconds in (0.0121, 0.5, 1.0, 83.2)] == ["12.1 ms", "500 ms", "1 s", "83.2 s"]
