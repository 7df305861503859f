"""One event of each kind, for the tests of the sinks, and what is read back of their tables."""

import csv
from pathlib import Path
from typing import Any

from lockstep.training.events import Done, Evaluated, Event, Saved, Started, Stepped, Stopped

SHA = "0123456789abcdef" * 4
RESUMED_FROM = "runs/x/checkpoints/step-00000046"


def started(step: int = 0, resumed_from: str | None = None) -> Started:
    return Started(
        step=step,
        epoch=0,
        samples=64 * step,
        steps=690,
        epochs=30,
        steps_per_epoch=23,
        train_samples=1437,
        validation_samples=360,
        batch=64,
        microbatches=4,
        processes=1,
        strategy="single",
        device="cpu",
        parameters=77_706,
        base_lr=0.1,
        monitor="top1",
        higher=True,
        fractions=["top1", "top5"],
        resumed_from=resumed_from,
        flops_per_sample=3_250_000,
    )


def stepped(step: int = 69, loss: float = 0.43214) -> Stepped:
    return Stepped(
        step=step,
        epoch=2,
        samples=64 * step,
        loss=loss,
        lr=0.09511,
        norm=1.5,
        samples_per_s=1234.4,
        peak_bytes=1000,
    )


def evaluated() -> Evaluated:
    return Evaluated(
        step=69,
        epoch=2,
        samples=4311,
        loss=0.1023,
        figures={"top1": 355 / 360, "top5": 1.0},
        fractions=["top1", "top5"],
        evaluated=360,
        of=360,
        seconds=0.5,
    )


def saved() -> Saved:
    path = "runs/x/checkpoints/step-00000690"
    return Saved(step=690, epoch=29, samples=43110, path=path, weights_sha256=SHA, best=True, seconds=0.1)


def stopped() -> Stopped:
    return Stopped(step=690, epoch=29, samples=43110, reason="SIGTERM")


def done() -> Done:
    return Done(
        step=690,
        epoch=29,
        samples=43110,
        weights_sha256=SHA,
        figures={"top1": 0.98333, "top5": 1.0},
        best={"top1": 355 / 360},
        skipped_samples=2,
        seconds=43.11,
    )


def write(sink: Any, *events: Event, first: float = 1000.0) -> None:
    """Write events a second apart, and close the sink, which may be done twice."""
    for number, event in enumerate(events):
        sink.write(event, first + number)
    sink.close()
    sink.close()


def rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table by the names of its columns."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def every() -> list[Event]:
    return [started(), stepped(), evaluated(), saved(), stopped(), done()]
