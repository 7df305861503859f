"""The FLOP/s of a run, and their share of the devices' peak."""

from dataclasses import replace

from lockstep.training.events import Started, Stepped


def with_flops(event: Stepped, run: Started) -> Stepped:
    """Return a report with the model's FLOP/s since the last report, and with the MFU if the peak is known.

    Only the operations that the recipe requires are counted. Therefore, recomputation to save memory lowers both
    figures.
    """
    if run.flops_per_sample is None:
        return event
    flops_per_s = event.samples_per_s * run.flops_per_sample
    mfu = flops_per_s / run.peak_flops_per_s if run.peak_flops_per_s else None
    return replace(event, flops_per_s=flops_per_s, mfu=mfu)
