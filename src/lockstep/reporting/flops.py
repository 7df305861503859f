"""How much of what the devices could do a run does: its FLOP/s, worked out from what it reports anyway."""

from dataclasses import replace

from lockstep.training.events import Started, Stepped


def with_flops(event: Stepped, run: Started) -> Stepped:
    """Return a report with the model's FLOP/s since the last one and, where the peak is known, the part it is of that.

    Only what the recipe asks for counts, so what is computed again to save memory lowers it.
    """
    if run.flops_per_sample is None:
        return event
    flops_per_s = event.samples_per_s * run.flops_per_sample
    mfu = flops_per_s / run.peak_flops_per_s if run.peak_flops_per_s else None
    return replace(event, flops_per_s=flops_per_s, mfu=mfu)
