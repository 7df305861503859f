"""What a rank takes is looked at in several steps, in which what others send comes later and later."""

from collections.abc import Callable

import torch

from lockstep.comm.simulated_peers import simulate_world
from lockstep.config.load import load
from lockstep.planning import measure as measuring
from lockstep.planning.measure import measure
from lockstep.planning.survey import open_for_survey
from lockstep.setup.prepare import PreparedRun
from lockstep.setup.resolved import resolve_config


def test_memory_is_the_most_of_steps_whose_exchanges_take_longer(monkeypatch) -> None:
    resolved = resolve_config(
        load("digits", ["placement.device=cpu", "placement.strategy=zero2", "placement.processes=2"])
    )
    peaks, late = iter([30, 50, 10, 20, 40, 5]), []

    def peak(self: object, do: Callable[[], None]) -> int:
        late.append(traffic.mean_delay_factor)
        return next(peaks)

    monkeypatch.setattr(measuring._MemoryMeter, "measure_peak", peak)
    with simulate_world(0, 2, torch.device("cpu"), 1e12) as (world, traffic):
        found = measure(PreparedRun(resolved, open_for_survey(resolved.loaded)), world, traffic)
    assert found.peak == 50
    step = found.seconds * traffic.link_bytes_per_s / found.sent
    assert late == [0, *4 * [0.5 * step], 2 * step]
