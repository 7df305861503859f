"""Keys are set in a YAML text, and all else of it stays as it is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config.document import parse
from lockstep.config.edit import set_values
from lockstep.config.write import format_flow
from lockstep.errors import UsageError

STRATEGY = ("placement", "strategy")
ZERO3 = {STRATEGY: "zero3", ("placement", "processes"): 4}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "# mine\nplacement:  # where\n  strategy: ddp  # so far\n  processes: 2\n\n# kept\nrun: {keep: 1}\n",
            "# mine\nplacement:  # where\n  strategy: zero3  # so far\n  processes: 4\n\n# kept\nrun: {keep: 1}\n",
        ),
        (
            "placement:\n  strategy:\n    name: hsdp\n    replicate: 2  # two\n\n  # few\n  workers: 1\n",
            "placement:\n  strategy: zero3  # two\n\n  # few\n  workers: 1\n  processes: 4\n",
        ),
        ("placement: {workers: 1}\nrun: {}", "placement: {processes: 4, strategy: zero3, workers: 1}\nrun: {}"),
        ("placement: {}\n", "placement: {processes: 4, strategy: zero3}\n"),
        ("placement:  # none yet\nrun:\n", "placement: {processes: 4, strategy: zero3}  # none yet\nrun:\n"),
        ("run:\n  keep: 1  # one", "run:\n  keep: 1  # one\nplacement: {processes: 4, strategy: zero3}"),
        ("run: {\n  keep: 1,\n}\r\n", "run: {\n  keep: 1,\n}\r\nplacement: {processes: 4, strategy: zero3}\r\n"),
        ('{"run": {"keep": 1}}', '{placement: {processes: 4, strategy: zero3}, "run": {"keep": 1}}'),
    ],
)
def test_all_else_stays(before: str, after: str) -> None:
    assert set_values(before, "mine.yaml", ZERO3).replace("\r", "") == after.replace("\r", "")


@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.text("ab #:'\"\n", max_size=5)),
        lambda inner: st.dictionaries(st.sampled_from(["placement", "strategy", "run", "x y"]), inner, max_size=3),
        max_leaves=8,
    ),
    st.booleans(),
)
def test_what_is_read_back_has_the_values_alone_changed(inner: object, block: bool) -> None:
    text = f"run: {format_flow(inner)}  # one\n" + ("placement:\n  workers: 1 # two\n  # three\n" if block else "")
    found = set_values(text, "mine.yaml", {STRATEGY: {"name": "hsdp", "replicate": 2}})
    values = parse(found, "").values
    assert values["placement"].pop("strategy") == {"name": "hsdp", "replicate": 2}
    assert values["run"] == inner
    assert values["placement"] == ({"workers": 1} if block else {})
    assert all(comment in found for comment in ("# one", *(["# two", "# three"] if block else [])))


def test_what_is_written_in_another_way_is_left_alone() -> None:
    with pytest.raises(UsageError, match=r"mine\.yaml: cannot set placement\.strategy in a file"):
        set_values("placement:\n  ? strategy\n  : ddp\n", "mine.yaml", {STRATEGY: "ddp"})
