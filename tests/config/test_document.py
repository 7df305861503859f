"""YAML as plain values with places."""

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config.document import KeyProblem, SourcePosition, find_position, parse, parse_scalar

FURTHER = "not valid YAML: indented further than the line above"
NO_SPACE = "not valid YAML: a space is missing after the colon"


def problems(text):
    return [str(each) for each in parse(text, "r.yaml").problems]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1e-3", 0.001),
        ("1.", 1.0),
        (".5", 0.5),
        ("-2.5E+3", -2500.0),
        ("010", 10),
        ("0x1F", 31),
        ("0o17", 15),
        ("-7", -7),
        ("true", True),
        ("FALSE", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("on", "on"),
        ("No", "No"),
        ("yes", "yes"),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("2026-01-01", "2026-01-01"),
        ("=", "="),
        ("tRue", "tRue"),
        (".", "."),
        ("e3", "e3"),
        ("9" * 5000, "9" * 5000),
        ("0x" + "f" * 5000, "0x" + "f" * 5000),
        (".inf", math.inf),
        ("-.INF", -math.inf),
    ],
)
def test_plain_scalars_follow_yaml_1_2(text, expected):
    assert parse_scalar(text) == expected
    assert type(parse_scalar(text)) is type(expected)


def test_not_a_number():
    assert math.isnan(parse_scalar(".nan"))


@pytest.mark.parametrize("text", ["'1e-3'", '"true"', "'null'", "'7'"])
def test_quoted_scalars_are_text(text):
    assert parse(text, "r.yaml").values == text[1:-1]


def test_every_key_and_item_has_its_place():
    document = parse("a:\n  b: [1, {c: 2}]\n", "r.yaml")
    assert document.values == {"a": {"b": [1, {"c": 2}]}}
    assert {path: str(place) for path, place in document.positions.items()} == {
        (): "r.yaml:1:1",
        ("a",): "r.yaml:1:1",
        ("a", "b"): "r.yaml:2:3",
        ("a", "b", 0): "r.yaml:2:7",
        ("a", "b", 1): "r.yaml:2:10",
        ("a", "b", 1, "c"): "r.yaml:2:11",
    }


def test_a_key_without_a_place_has_that_of_the_mapping_around_it():
    places = {(): SourcePosition("r.yaml", 1, 1), ("a",): SourcePosition("r.yaml", 2, 3)}
    assert find_position(places, ("a", "b", "c")) == SourcePosition("r.yaml", 2, 3)
    assert find_position(places, ("x", "y")) == SourcePosition("r.yaml", 1, 1)


def test_a_key_is_text_as_it_stands():
    assert parse("on: 1\n2: 3\nnull: 4", "r.yaml").values == {"on": 1, "2": 3, "null": 4}


def test_a_key_given_twice_names_both_places():
    text = "a:\n  b: 1\n  c: 2\n  b: {d: [3]}\nz: 5\n"
    assert problems(text) == ["r.yaml:4:3  a.b: set twice, first at 2:3; keep one of the two"]
    assert parse(text, "r.yaml").values == {"a": {"b": 1, "c": 2}, "z": 5}


def test_an_alias_bomb_is_refused_without_being_followed():
    rows = ["l0: &l0 [x, x]"] + [f"l{n}: &l{n} [" + ", ".join([f"*l{n - 1}"] * 9) + "]" for n in range(1, 40)]
    found = problems("\n".join(rows))
    assert len(found) == 39 * 9
    assert found[0] == "r.yaml:2:10  l1.0: aliases such as *l0 are not allowed; write the value out"


def test_tags_are_refused():
    assert problems("a: !!python/name:os.system x") == [
        "r.yaml:1:4  a: the tag tag:yaml.org,2002:python/name:os.system is not allowed; remove it"
    ]
    assert len(problems("a: !!str 1")) == 1


@pytest.mark.parametrize("text", ["a: " + "[" * 100_000, "{a: " * 100_000, "? " + "[" * 100_000])
def test_deep_nesting_is_refused_without_reading_to_its_end(text):
    assert problems(text)[-1].endswith("not valid YAML: nested more than 32 levels deep")


def test_a_key_that_is_no_word_is_refused_and_the_rest_still_read():
    document = parse("? [1, [2]]\n: {x: 3}\nb: 4\n", "r.yaml")
    assert [str(each) for each in document.problems] == ["r.yaml:1:3  a key must be a word"]
    assert document.values == {"b": 4}


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("a: [1, 2\nb: 3", "r.yaml:2:"),
        ("a: 1\n\tb: 2", "r.yaml:2:1"),
        ("a: 'x", "r.yaml:1:"),
        (" a: b: c", "r.yaml:1:6"),
        ("a:\n  b: 1\n# d\n\n   c: 2", f"r.yaml:5:4  {FURTHER}"),
        ("a:\n  b: {c: 2}\n   c: 2", f"r.yaml:3:4  {FURTHER}"),
        ("a:\n  b:1\n  c: 2", f"r.yaml:2:4  {NO_SPACE}"),
        ("a:\n  x: 1\n  b:1\nc: 2", f"r.yaml:3:4  {NO_SPACE}"),
        ("a:\n  x: 1\n  b:1\n", f"r.yaml:3:4  {NO_SPACE}"),
    ],
)
def test_broken_syntax_has_its_place(text, place):
    (found,) = problems(text)
    assert found.startswith(place)
    assert "not valid YAML" in found


def test_a_character_that_yaml_forbids_has_its_place():
    assert problems("a: 1\nb: x\x00y") == [
        "r.yaml:2:5  character 0x00 is not allowed in YAML; save the file as plain text in UTF-8"
    ]
    assert problems("a:\n\tb: 1") == ["r.yaml:2:1  not valid YAML: a tab; use spaces"]


def test_a_second_document_is_refused():
    assert problems("a: 1\n---\nb: 2\n") == ["r.yaml:2:1  a second document begins here; keep one"]


def test_a_problem_of_an_override_has_no_line():
    problem = KeyProblem(SourcePosition("override"), ("recipe", "topk", 0), "wrong")
    assert str(problem) == "override recipe.topk.0: wrong"


@given(st.text(max_size=40))
def test_any_text_is_read_or_told(text):
    document = parse(text, "r.yaml")
    assert all(str(each).startswith("r.yaml:") for each in document.problems)


@pytest.mark.parametrize(
    "text",
    ["topk: [" + "*a, " * 60_000 + "]", "topk: [" + "x, " * 80_000 + "]", "".join(f"k{i}: 1\n" for i in range(20_000))],
    ids=["aliases", "items", "keys"],
)
def test_what_is_far_too_much_is_not_read_to_its_end(text):
    began = time.process_time()
    document = parse(text, "x.yaml")
    assert time.process_time() - began < 5
    assert document.problems[-1].text == "not valid YAML: more than 10,000 keys and values"
