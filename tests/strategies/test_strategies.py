"""A strategy is a file: its name is the file's, its options are its fields, and it refuses what it cannot do."""

import re
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any, get_type_hints

import pytest
from pydantic import TypeAdapter, ValidationError

from lockstep.core.mesh import Mesh
from lockstep.errors import UsageError
from lockstep.strategies import context, ddp, hsdp, list_strategy_names, parameter_server, single, zero1, zero2, zero3


def test_every_file_is_a_strategy() -> None:
    assert {"single", "ddp", "zero1", "zero2", "zero3", "hsdp"} <= set(list_strategy_names())
    for name in list_strategy_names():
        strategy = import_module(f"lockstep.strategies.{name}").Strategy
        assert is_dataclass(strategy)
        assert get_type_hints(strategy.check) == {"processes": int, "microbatches": int, "return": type(None)}
        traits = strategy().traits
        assert traits.exactness in ("bits", "close")
        assert all(isinstance(text, str) and text for text in (traits.cuts, traits.needs, traits.communication))
        for option in fields(strategy):
            assert option.name in strategy.__doc__


def test_bits_are_promised_unless_gradients_are_compressed() -> None:
    plain, narrow = ddp.Strategy().traits, ddp.Strategy(compress="bf16").traits
    assert (plain.exactness, plain.sent) == ("bits", None)
    assert (narrow.exactness, narrow.sent) == ("close", "bf16")
    assert narrow.communication == f"{plain.communication}, in bf16"
    with pytest.raises(ValidationError, match="Input should be 'none', 'fp16', 'bf16' or 'powersgd'"):
        TypeAdapter(ddp.Strategy).validate_python({"compress": "int8"})


def test_powersgd_promises_nothing_and_its_rank_goes_with_it() -> None:
    traits = ddp.Strategy(compress="powersgd", powersgd_rank=4).traits
    assert (traits.exactness, traits.sent, traits.audits) == ("none", None, True)
    assert "neither exact nor close" in traits.communication


SHARING = [
    *(ddp.Strategy(), zero1.Strategy(), zero2.Strategy(), zero3.Strategy(), hsdp.Strategy(replicate=1)),
    *(parameter_server.Strategy(), parameter_server.Strategy(asynchronous=True)),
]


NOBODY = "requires at least 2 processes, got 1; use 2 or more, or strategy single"


@pytest.mark.parametrize("strategy", SHARING)
@pytest.mark.parametrize(("processes", "microbatches"), [(2, 2), (2, 8), (4, 4), (3, 8)])
def test_there_may_be_as_many_processes_as_micro_batches(strategy: Any, processes: int, microbatches: int) -> None:
    strategy.check(processes, microbatches)


@pytest.mark.parametrize("strategy", SHARING)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("leaves", [1, 3, 4, 7, 8])
def test_places_share_all_micro_batches(strategy: Any, size: int, leaves: int) -> None:
    dealt = [strategy.mesh(size).get_data_rank(rank).get_microbatches(leaves) for rank in range(size)]
    assert sorted(index for own in dealt for index, dummy in own if not dummy) == list(range(leaves))


@pytest.mark.parametrize(
    ("strategy", "processes", "microbatches", "problem"),
    [
        *((each, 5, 4, "placement.processes: 5 processes but only 4 micro-batches; use at most 4") for each in SHARING),
        *((each, 1, 8, NOBODY) for each in (zero2.Strategy(), zero3.Strategy())),
        (single.Strategy(), 2, 8, "requires 1 process, got 2; use placement.processes=1 or strategy ddp"),
        (ddp.Strategy(compress="bf16", powersgd_rank=4), 2, 2, "compress=powersgd, got compress=bf16"),
        (hsdp.Strategy(3), 8, 8, "strategy hsdp: replicate=3 does not divide 8 processes; use 1, 2, 4, 8"),
        (hsdp.Strategy(4), 4, 8, "4 processes with replicate=4 leave one process per replica, so nothing is sharded"),
        (context.Strategy(3), 4, 2, "strategy context: replicate=3 does not divide 4 processes; use 1, 2, 4"),
        (context.Strategy(4), 4, 2, "4 processes but only 2 micro-batches; use at most 2"),
    ],
)
def test_what_does_not_fit_is_refused(strategy: Any, processes: int, microbatches: int, problem: str) -> None:
    with pytest.raises(UsageError, match=re.escape(problem)):
        strategy.check(processes, microbatches)


def test_single_is_one_process() -> None:
    single.Strategy().check(1, 8)


def test_neighbors_share_sequences() -> None:
    context.Strategy().check(4, 1)  # however few micro-batches: all have work in each
    mesh = context.Strategy(replicate=2).mesh(6)
    assert mesh == Mesh(replicate=2, context=3)
    assert mesh.get_groups("context") == [[0, 1, 2], [3, 4, 5]]


def test_replicas_are_ranks_that_follow_each_other() -> None:
    ranks = [hsdp.Strategy(replicate=2).mesh(6).get_data_rank(rank) for rank in range(6)]
    assert [(rank.replica, rank.member) for rank in ranks] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


@pytest.mark.parametrize("value", [0, -1.0, "many"])
@pytest.mark.parametrize("kind", [ddp, parameter_server])
def test_buckets_have_a_size(kind: Any, value: object) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(kind.Strategy).validate_python({"bucket_mib": value})
    assert TypeAdapter(ddp.Strategy).validate_python({"bucket_mib": 0.5}).bucket_mib == 0.5
