"""What a parameter server promises, by its options."""

import pytest
from pydantic import TypeAdapter, ValidationError

from lockstep.strategies.parameter_server import Strategy


def test_only_the_synchronous_one_promises_bits() -> None:
    assert Strategy().traits.exactness == "bits"
    assert Strategy(asynchronous=True).traits.exactness == "none"
    assert (Strategy().traits.audits, Strategy(asynchronous=True).traits.audits) == (True, False)
    assert "neither exact nor close, and no two runs are the same" in Strategy().traits.communication


def test_an_optimizer_may_look_at_whole_tensors_where_no_rank_has_rows() -> None:
    assert Strategy().traits.cuts_rows
    assert not Strategy(asynchronous=True).traits.cuts_rows


def test_it_is_asynchronous_or_not() -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Strategy).validate_python({"asynchronous": "soon"})
