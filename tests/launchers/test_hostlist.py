"""Lists of hosts and of counts, as Slurm shortens them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.launchers.hostlist import expand_counts, expand_hosts


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("login", ["login"]),
        ("a,b", ["a", "b"]),
        ("n[1-2,5],gpu[001-004]x", ["n1", "n2", "n5", "gpu001x", "gpu002x", "gpu003x", "gpu004x"]),
        ("a[1-2]b[3-4]", ["a1b3", "a1b4", "a2b3", "a2b4"]),
        ("n[2,1]", ["n2", "n1"]),
        ("n[099-101]", ["n099", "n100", "n101"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("rack-1.node[3],x", ["rack-1.node3", "x"]),
        ("[1-3]", ["1", "2", "3"]),
    ],
)
def test_lists_of_hosts(text: str, names: list[str]) -> None:
    assert list(expand_hosts(text)) == names


@pytest.mark.parametrize(
    "text",
    [
        "",
        "n[1 2]",
        *["a,", ",a", "n[", "n]", "n[]", "n[1-]", "n[a]", "n[2-1]", "n[1-2", "n1-2]", "n[[1]]", "n[1,]", "n[²]"],
    ],
)
def test_what_is_no_list_of_hosts(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        expand_hosts(text)


@pytest.mark.parametrize("text", ["n[0-99999999999]", "n[1-999]a[1-999]b[1-999]", ",".join(["n[1-9999]"] * 9)])
def test_a_list_that_no_cluster_has_ends_before_it_is_made(text: str) -> None:
    with pytest.raises(ValueError, match="more than 65536 entries"):
        expand_hosts(text)


@pytest.mark.parametrize(
    ("text", "numbers"), [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("1,2(x2),1(x1)", [1, 2, 2, 1]), ("16(x2)", [16, 16])]
)
def test_counts(text: str, numbers: list[int]) -> None:
    assert list(expand_counts(text)) == numbers


@pytest.mark.parametrize("text", ["", "a", "2(x)", "2x3", "2(x3", "1,,2", "-1", "2(x3)4"])
def test_what_are_no_counts(text: str) -> None:
    with pytest.raises(ValueError, match="expected task counts"):
        expand_counts(text)


def test_counts_without_end_are_refused() -> None:
    with pytest.raises(ValueError, match="more than 65536 entries"):
        expand_counts("1(x999999999)")


# As `scontrol show hostlist` writes them: a prefix, ranges of a fixed width, a suffix.
WORDS = st.text(st.sampled_from("abxyz-."), min_size=1, max_size=5)
RANGES = st.lists(st.tuples(st.integers(0, 1200), st.integers(0, 30)), min_size=1, max_size=4)


@given(st.lists(st.tuples(WORDS, RANGES, st.integers(1, 4), st.sampled_from(["", "x", "-ib"])), min_size=1, max_size=4))
def test_what_was_shortened_is_found_again(parts: list[tuple[str, list[tuple[int, int]], int, str]]) -> None:
    texts, names = [], []
    for prefix, ranges, width, suffix in parts:
        inside = []
        for first, more in ranges:
            numbers = [f"{number:0{width}}" for number in range(first, first + more + 1)]
            inside.append(f"{numbers[0]}-{numbers[-1]}" if more else numbers[0])
            names += [f"{prefix}{number}{suffix}" for number in numbers]
        texts.append(f"{prefix}[{','.join(inside)}]{suffix}")
    assert list(expand_hosts(",".join(texts))) == names


@given(st.lists(st.integers(1, 64), min_size=1, max_size=200))
def test_counts_that_were_shortened_are_found_again(numbers: list[int]) -> None:
    parts: list[tuple[int, int]] = []
    for number in numbers:
        if parts and parts[-1][0] == number:
            parts[-1] = (number, parts[-1][1] + 1)
        else:
            parts.append((number, 1))
    text = ",".join(f"{number}(x{times})" if times > 1 else str(number) for number, times in parts)
    assert list(expand_counts(text)) == numbers


@given(st.text(st.sampled_from("n12[]-,(x)"), max_size=30))
def test_any_text_is_a_list_or_refused(text: str) -> None:
    for parse in (expand_hosts, expand_counts):
        try:
            found = parse(text)
        except ValueError:
            continue
        assert found
