"""Epochs in words."""

import pytest

from lockstep.core.epochs import format_epochs


@pytest.mark.parametrize(
    ("epochs", "words"),
    [
        (1, "1 epoch"),
        (25, "25 epochs"),
        (2500.0, "2,500 epochs"),
        (2.5, "2.5 epochs"),
        (0.21607, "22 % of an epoch"),
        (2.39094e-05, "0.0024 % of an epoch"),
    ],
)
def test_epochs_are_counted_as_a_person_does(epochs: float, words: str) -> None:
    assert format_epochs(epochs) == words
