"""A strategy is a file: its name is the file's, its options are its fields, and it refuses what it cannot do."""

import re
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import get_type_hints

import pytest
from pydantic import TypeAdapter, ValidationError

from lockstep.errors import UsageError
from lockstep.strategies import ddp, names, single


def test_every_file_is_a_strategy() -> None:
    assert names() == ["ddp", "single"]
    for name in names():
        strategy = import_module(f"lockstep.strategies.{name}").Strategy
        assert is_dataclass(strategy)
        assert strategy.exactness in ("bits", "close")
        assert get_type_hints(strategy.check) == {"processes": int, "microbatches": int, "return": type(None)}
        made = strategy()
        with pytest.raises(AttributeError):
            made.exactness = "close"
        for option in fields(strategy):
            assert option.name in strategy.__doc__


@pytest.mark.parametrize(("processes", "microbatches"), [(1, 1), (1, 8), (4, 4), (3, 8)])
def test_ddp_takes_as_many_processes_as_micro_batches(processes: int, microbatches: int) -> None:
    ddp.Strategy().check(processes, microbatches)


def test_ddp_refuses_processes_without_work() -> None:
    problem = "placement.processes: 5 processes but only 4 micro-batches; use at most 4"
    with pytest.raises(UsageError, match=re.escape(problem)):
        ddp.Strategy().check(5, 4)


def test_single_is_one_process() -> None:
    single.Strategy().check(1, 8)
    with pytest.raises(UsageError, match="strategy single: 2 processes; use 1, or strategy ddp"):
        single.Strategy().check(2, 8)


@pytest.mark.parametrize("value", [0, -1.0, "many"])
def test_buckets_have_a_size(value: object) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(ddp.Strategy).validate_python({"bucket_mib": value})
    assert TypeAdapter(ddp.Strategy).validate_python({"bucket_mib": 0.5}).bucket_mib == 0.5
