"""Curves for TensorBoard: figures against the step, in <run>/tensorboard."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, final

from lockstep.training.events import Evaluated, Event, Started, Stepped

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FOLDER: Final = "tensorboard"


@final
class TensorBoard:
    """Writes the curves of one run into `folder`, from its `Started` event on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def write(self, event: Event, time: float) -> None:
        if isinstance(event, Started):
            self._open(event)
        if self._writer is None:
            return
        for name, value in _scalars(event).items():
            self._writer.add_scalar(name, value, event.step, walltime=time)
        if isinstance(event, Evaluated):
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self, event: Started) -> None:
        # Imported here: it takes time, and only one process of a run needs it.
        from torch.utils.tensorboard import SummaryWriter

        self.close()
        # A run that goes on repeats the steps since its checkpoint: the former curve ends where it is taken
        # up.
        purge = event.step + 1 if event.resumed_from is not None else None
        self._writer = SummaryWriter(str(self._folder), purge_step=purge)


def _scalars(event: Event) -> dict[str, float]:
    if isinstance(event, Stepped):
        return _training(event)
    if isinstance(event, Evaluated):
        return _validation(event)
    return {}


def _training(event: Stepped) -> dict[str, float]:
    scalars = {"loss/train": event.loss, "lr": event.lr, "images_per_s": event.images_per_s}
    if event.norm is not None:
        scalars["norm"] = event.norm
    if event.loss_scale is not None:
        scalars["loss_scale"] = event.loss_scale
    return scalars


def _validation(event: Evaluated) -> dict[str, float]:
    suffix = "" if event.weights == "model" else f"/{event.weights}"
    scalars = {"loss/validation" + suffix: event.loss}
    return scalars | {name + suffix: fraction for name, fraction in event.top.items()}
