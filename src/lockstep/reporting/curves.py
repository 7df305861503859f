"""Which figures of an event are plotted against the step, under one name in every sink."""

from __future__ import annotations

from lockstep.training.events import Evaluated, Event, Logged, Stepped


def curves(event: Event) -> dict[str, float]:
    """Return the figures of a report or an evaluation by their names, nothing for other events."""
    if isinstance(event, Stepped):
        return _training(event)
    if isinstance(event, Evaluated):
        return _validation(event)
    if isinstance(event, Logged):
        return dict(event.figures)
    return {}


def _training(event: Stepped) -> dict[str, float]:
    scalars = {"loss/train": event.loss, "lr": event.lr, "samples_per_s": event.samples_per_s}
    scalars |= {f"{name}/train": value for name, value in event.figures.items()}
    if event.norm is not None:
        scalars["norm"] = event.norm
    if event.loss_scale is not None:
        scalars["loss_scale"] = event.loss_scale
    if event.flops_per_s is not None:
        scalars["flops_per_s"] = event.flops_per_s
    if event.mfu is not None:
        scalars["mfu"] = event.mfu
    return scalars


def _validation(event: Evaluated) -> dict[str, float]:
    suffix = "" if event.weights == "model" else f"/{event.weights}"
    scalars = {"loss/validation" + suffix: event.loss}
    return scalars | {name + suffix: value for name, value in event.figures.items()}
