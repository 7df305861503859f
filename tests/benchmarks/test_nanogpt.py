"""The comparison with nanoGPT: ratios of the same rounds, the last estimate, and hashes by the number of processes."""

import pytest

from benchmarks.nanogpt import HIS, OURS, in_lines, losses, times
from benchmarks.programs import Ended, Trained

pytestmark = pytest.mark.slow("other programs, or minutes")

PRINTED = "step 0: train loss 4.1676, val loss 4.1649\niter 0: loss 4\nstep 2000: train loss 1.76, val loss 1.8857\n"


def _his(seconds: float) -> Ended:
    return Ended(PRINTED, seconds, 0.9 * seconds)


def _ours(seconds: float, sha256: str = "ab", loss: float = 1.89) -> Trained:
    return Trained({"loss": loss}, [{"loss": loss}], sha256, seconds, 0.9 * seconds)


def test_times_are_compared_within_rounds() -> None:
    his = {1: [_his(10), _his(20)], 2: [_his(8), _his(8)]}
    ours = {1: [_ours(10.4), _ours(20.8)], 2: [_ours(8), _ours(9)], 3: [_ours(7)]}
    one, two, processor = times(his, ours)
    assert [row.name for row in one.rows] == [HIS, OURS]
    assert one.verdicts[0].ratio == pytest.approx(1.04)
    assert one.verdicts[0].met
    assert not two.verdicts[0].met
    assert processor.rows[1].turns == pytest.approx([0.9 * 10.4, 0.9 * 20.8])


def test_losses_and_every_hash_are_said() -> None:
    ours = {1: [_ours(1), _ours(1)], 2: [_ours(1), _ours(1, "cd")], 3: [_ours(1)]}
    outcome = losses({1: [_his(1)], 2: [_his(1)]}, ours)
    assert outcome["authors_estimates"] == [1.8857]
    assert outcome["loss"] == 1.89
    assert outcome["sha256"] == {1: "ab", 2: "ab cd", 3: "ab"}
    lines = list(in_lines(outcome, 2000))
    assert lines[0] == "validation loss after 2,000 steps: published 1.88, author's script here 1.8857"
    assert lines[-2:] == ["weights on 2 processes: ab cd", "weights on 3 processes: ab"]
