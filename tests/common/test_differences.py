from lockstep.common.differences import describe_differences


def test_differences_name_ranks_hosts_and_values() -> None:
    facts = {
        0: {"recipe": {"a": 1, "b": {"c": 2, "d": 3}}, "torch": "2.15"},
        2: {"recipe": {"a": 1, "b": {"c": 5}}, "torch": "2.15"},
        3: {"recipe": {"a": 1, "b": {"c": 2, "d": 3}}, "torch": "2.14" + "x" * 100},
    }
    assert describe_differences(facts, ["a", "a", "b", "b"]) == [
        "recipe: rank 2 (b) differs from rank 0 (a): b.c: 5, not 2; b.d: null, not 3; start all ranks with the same "
        "value",
        f"torch: rank 3 (b) differs from rank 0 (a): 2.14{'x' * 53}..., not 2.15; start all ranks with the same value",
    ]


def test_hosts_that_do_not_matter_are_not_named() -> None:
    assert describe_differences({0: {"lr": 1}, 1: {"lr": 2}, 2: {}}, [], "sort them") == [
        "lr: rank 1, 2 differ from rank 0: 2, not 1; sort them"
    ]


def test_the_line_of_the_script_is_named_before_the_advice() -> None:
    assert describe_differences({0: {"lr": 1}, 1: {"lr": 2}}, [], "sort them", "loop.py:9") == [
        "lr: rank 1 differs from rank 0: 2, not 1 (loop.py:9); sort them"
    ]


def test_a_fact_that_rank_0_does_not_have_is_one_and_what_is_no_number_is_none() -> None:
    facts = {0: {"loss": float("nan")}, 1: {"loss": float("nan"), "of": "critic"}}
    assert describe_differences(facts, []) == [
        "of: rank 1 differs from rank 0: critic, not null; start all ranks with the same value"
    ]
