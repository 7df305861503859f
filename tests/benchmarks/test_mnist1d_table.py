"""The table of MNIST-1D names the published, the authors' and our accuracy, and the hash of each run."""

import pytest

from benchmarks.mnist1d import MODELS, Accuracy, Row, show
from lockstep.models.find import OURS

pytestmark = pytest.mark.slow("other programs, or minutes")


def test_the_models_are_shipped_ones() -> None:
    assert {model for model, _, _ in MODELS} <= OURS.keys()


def test_the_table_shows_last_and_best_and_the_hashes(capsys: pytest.CaptureFixture[str]) -> None:
    row = Row(
        "mnist1d_cnn", 94.0, Accuracy(93.1, 93.6, 1, 1), Accuracy(92.5, 94.04, 2, 2), {1: "ab" * 32, 3: "cd" * 32}
    )
    show([row])
    printed = capsys.readouterr().out
    for shown in ("mnist1d_cnn", "94", "93.1 (93.6)", "92.5 (94.0)", f"1: {'ab' * 8}", f"3: {'cd' * 8}"):
        assert shown in printed
