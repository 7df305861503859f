"""The FLOP/s of a run, and the MFU, which is their fraction of the peak FLOP/s of the devices."""

from dataclasses import replace

from lockstep.training.events import Started, Stepped


def with_flops(event: Stepped, run: Started) -> Stepped:
    """Return a copy of a step report with the model's FLOP/s, and with the MFU if the peak FLOP/s are known.

    Only the operations that the recipe requires are counted. Therefore, activation recomputation lowers both values.
    """
    if run.flops_per_sample is None:
        return event
    flops_per_s = event.samples_per_s * run.flops_per_sample
    mfu = flops_per_s / run.peak_flops_per_s if run.peak_flops_per_s else None
    return replace(event, flops_per_s=flops_per_s, mfu=mfu)
