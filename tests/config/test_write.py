"""Configuration as YAML text."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config.document import parse
from lockstep.config.write import format_block, format_flow, format_value, iterate_leaves

texts = st.text(st.characters(codec="utf-8"), max_size=20) | st.sampled_from(
    [
        "null",
        "1e-3",
        "on",
        "env://",
        "a: b",
        "a #b",
        "---",
        "[",
        "\u2028",
        "\ufeff",
        "😀",
        "a:",
        "- x",
        "\x85",
    ]
)
scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | texts
nested = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@given(nested)
def test_flow_reads_back(value):
    document = parse(format_flow(value), "r.yaml")
    assert document.problems == []
    assert document.values == value
    assert format_flow(document.values) == format_flow(value)  # 1 == 1.0 == True, but they are not written alike


@given(st.dictionaries(texts, nested, max_size=4), texts)
def test_block_reads_back_whatever_the_origins_say(tree, origin):
    origins = {".".join(path): origin for path, _ in iterate_leaves(tree)}
    document = parse("\n".join(format_block(tree, origins)), "r.yaml")
    assert document.problems == []
    assert (document.values or {}) == tree


def test_not_a_number_reads_back():
    assert math.isnan(parse(format_flow(math.nan), "r.yaml").values)


def test_leaves_are_values_without_keys():
    tree = {"a": {"b": 1, "c": {}}, "d": [2]}
    assert dict(iterate_leaves(tree)) == {("a", "b"): 1, ("a", "c"): {}, ("d",): [2]}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("two", "'two'"),
        (2.0, "2.0"),
        (None, "null"),
        (True, "true"),
        ({"a": 1}, "a mapping"),
        ("x" * 99, "'" + "x" * 56 + "..."),
    ],
)
def test_values_in_messages(value, text):
    assert format_value(value) == text
