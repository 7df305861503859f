"""Computes the FLOP/s of a run and the model FLOPs utilization (MFU), the fraction of the devices' peak FLOP/s."""

from dataclasses import replace

from lockstep.training.events import Started, Stepped


def add_flops(event: Stepped, run: Started) -> Stepped:
    """Return a copy of a step report that includes the model's FLOP/s and, if the peak FLOP/s are known, the MFU.

    Recomputed activations aren't counted. Therefore, activation checkpointing lowers both values.
    """
    if run.flops_per_sample is None:
        return event
    flops_per_s = event.samples_per_s * run.flops_per_sample
    mfu = flops_per_s / run.peak_flops_per_s if run.peak_flops_per_s else None
    return replace(event, flops_per_s=flops_per_s, mfu=mfu)
