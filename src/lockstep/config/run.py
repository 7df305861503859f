"""The run: what is kept of it, and where."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from lockstep.config.base import Location, NaturalInt, PositiveInt, Section


class Every(Section):
    """A rhythm: every so many steps or every so many epochs."""

    steps: PositiveInt | None = None
    epochs: PositiveInt | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give either steps or epochs, one of the two")
        return self


class Run(Section):
    """What is kept. `dir` left out: runs/<recipe>-<model>-<time>."""

    dir: Location | None = None
    resume: Location = "auto"  # auto, never, or the path of a checkpoint or a run
    save_every: Every = Every(epochs=1)
    evaluate_every: Every = Every(epochs=1)
    key_file: str | None = None  # signs checkpoints, and refuses those that it has not signed
    keep: NaturalInt = 3  # newest checkpoints; latest and best always stay
    save_async: bool = False  # write checkpoints while the next steps compute; takes memory for a copy of the state
    log_every: PositiveInt = 10  # steps between two `step` events
    tensorboard: bool = True
    probe: Literal["auto", "off"] = "auto"  # auto: look at code that is not known to be clean, and warn
