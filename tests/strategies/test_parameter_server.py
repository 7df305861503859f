"""What a parameter server promises, by its options."""

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from lockstep.errors import UsageError
from lockstep.strategies.parameter_server import Strategy


def test_only_the_synchronous_one_promises_bits() -> None:
    assert Strategy().traits.exactness == "bits"
    assert Strategy(asynchronous=True).traits.exactness == "none"
    assert (Strategy().traits.audits, Strategy(asynchronous=True).traits.audits) == (True, False)
    assert "neither exact nor close, no two runs are alike" in Strategy().traits.communication


def test_an_optimizer_may_look_at_whole_tensors_where_no_rank_has_rows() -> None:
    assert Strategy().traits.cuts_rows
    assert not Strategy(asynchronous=True).traits.cuts_rows


@pytest.mark.parametrize("asynchronous", [False, True])
def test_each_process_needs_a_micro_batch(asynchronous: bool) -> None:
    Strategy(asynchronous).check(4, 4)
    with pytest.raises(UsageError, match="5 processes but only 4 micro-batches"):
        Strategy(asynchronous).check(5, 4)


@pytest.mark.parametrize("options", [{"asynchronous": "soon"}, {"bucket_mib": 0}])
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Strategy).validate_python(options)
