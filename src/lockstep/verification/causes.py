"""Derives the most likely cause from the first difference, in words. Nothing here runs user code."""

from dataclasses import dataclass
from typing import Final

from lockstep.common.hashing import VARIABLE
from lockstep.probe.findings import (
    FOREIGN_RANDOMNESS,
    OF_FORWARD,
    RANDOM_DATA,
    RANKED_DATA,
    UNREPEATABLE_EVALUATION,
    ProbeResult,
    findings,
    is_norm,
)
from lockstep.probe.state import SPECTRAL_NORM as SPECTRAL_KIND
from lockstep.verification.compare import EVALUATION, Difference
from lockstep.verification.trace import AVERAGE, DATA, GRADIENT, LOSS, MODEL, OPTIMIZER, OWN_LOSS, SCALARS

EVALUATED: Final = "evaluated sum"  # the kind of a difference in evaluation, if training agrees
_OTHER_DATA: Final = (
    "the data set gives this process other samples than the reference: what it gives depends on the process, the time "
    "or what was fetched before; make it a function of the index and of the generators that are seeded for each sample"
)
# The meaning of each kind of difference if nothing else explains it.
_BY_KIND: Final = {
    OWN_LOSS: "the forward pass of this micro-batch gives something else in this process",
    LOSS: "the losses of the micro-batches agree and their sum does not: they were added in another order",
    GRADIENT: "the losses agree and the gradients do not: they were added in another order, or one is missing",
    MODEL: "the gradients agree and the weights do not: the optimizer's step does something else when it is cut",
    OPTIMIZER: "the weights agree and the optimizer's state does not",
    AVERAGE: "the weights agree and their average does not",
    SCALARS: "all tensors agree, and the engine's own figures do not",
    EVALUATION: "training agrees and evaluation does not: samples were left out, counted twice or computed anew",
}


@dataclass(frozen=True)
class Diagnosis:
    """The first difference, and everything known about it.

    - `resumed`: It happened after a checkpoint was loaded.
    - `again`: A second run saw the same difference.
    - `hashes`: It happened in a process with a different hash seed.
    - `distance`: The largest difference in the tensor, if known.
    - `command`: The command that verifies only this placement.
    """

    first: Difference
    probed: ProbeResult
    place: str
    resumed: bool = False
    again: bool = True
    hashes: bool = False
    distance: float | None = None
    command: str = ""

    @property
    def what(self) -> str:
        """The kind of the first difference, in the user's words."""
        if self.first.what == MODEL:
            return "buffer" if self.first.name in self.probed.buffers else "weight"
        return {EVALUATION: EVALUATED, GRADIENT: "gradient of"}.get(self.first.what, self.first.what)

    @property
    def name(self) -> str:
        """The name of the tensor or metric, if it has one."""
        return "" if self.microbatch is not None else self.first.name

    @property
    def microbatch(self) -> int | None:
        """The index of the micro-batch, from 0, if known."""
        return int(self.first.name) if self.first.what in (DATA, OWN_LOSS) else None


def cause(diagnosis: Diagnosis) -> str:
    """Return the most likely cause, in words."""
    if diagnosis.what == "buffer" and diagnosis.first.name in diagnosis.probed.changed_buffers:
        return _of_buffer(diagnosis)
    suspects = {finding.culprit: finding.text for finding in findings(diagnosis.probed) if finding.fault}
    if diagnosis.first.what == DATA:
        known = suspects.get(RANDOM_DATA) or suspects.get(RANKED_DATA)
        return known or (of_hashes(diagnosis.probed.at("training", "data")) if _by_hashes(diagnosis) else _OTHER_DATA)
    if diagnosis.first.what == EVALUATION and UNREPEATABLE_EVALUATION in suspects:
        return suspects[UNREPEATABLE_EVALUATION]
    for culprit in OF_FORWARD:
        if culprit in suspects:
            return suspects[culprit]
    if _by_hashes(diagnosis):
        return of_hashes(diagnosis.probed.at("model", "loss"))
    notes = {finding.culprit: finding.text for finding in findings(diagnosis.probed) if finding.culprit in OF_FORWARD}
    if notes and diagnosis.first.what != EVALUATION:
        if FOREIGN_RANDOMNESS in notes:
            return notes[FOREIGN_RANDOMNESS]
        return f"perhaps what was noted, which may matter after more micro-batches: {next(iter(notes.values()))}"
    return _without_suspect(diagnosis)


def of_hashes(where: str = "") -> str:
    """Return the cause if a different hash seed changes the numbers. `where` is a location such as ` (net.py:12)`."""
    return (
        f"the order of a set of strings, or hash(), in code{where} that goes through one: Python draws it anew at each "
        f"start, unless {VARIABLE} is set; go through sorted(...) instead"
    )


def _by_hashes(diagnosis: Diagnosis) -> bool:
    return diagnosis.hashes and diagnosis.again


def _without_suspect(diagnosis: Diagnosis) -> str:
    first = diagnosis.first
    if not diagnosis.again:
        return (
            "a second run of the same saw something else again: a kernel is not deterministic, processes do not wait "
            "for each other, or something depends on the clock, the system's randomness or the process"
        )
    if diagnosis.place == "single on 1" and not diagnosis.resumed:
        return (
            "the reference does not agree with a second run of itself: a kernel is not deterministic, or the forward "
            "pass or the data depend on the clock, the system's randomness or the process"
        )
    if diagnosis.resumed:
        return (
            "the checkpoint does not hold all that the rest of the run depends on: state in plain attributes, in "
            "buffers with persistent=False or in globals, or the strategy saves or loads it wrongly; the run itself "
            "agreed"
        )
    found = _BY_KIND.get(first.what, "the strategy computes something else")
    if diagnosis.probed.traits:
        return f"{found}; perhaps since {diagnosis.probed.traits[0]}"
    return f"{found}; {_advice(diagnosis)}"


def _advice(diagnosis: Diagnosis) -> str:
    """Return what to do about a difference that user code doesn't explain."""
    place = f"micro-batch {diagnosis.microbatch}" if diagnosis.microbatch is not None else diagnosis.name
    subject = " of ".join(part for part in (diagnosis.what.removesuffix(" of"), place) if part)
    step = "" if diagnosis.first.step is None else f" in step {diagnosis.first.step}"
    amount = "" if diagnosis.distance is None else f", by {diagnosis.distance:.3g}"
    command = diagnosis.command or "lockstep verify with --json FILE"
    other = "use strategy single" if diagnosis.place.startswith("ddp ") else "use strategy ddp"
    return (
        f"the first to differ is the {subject}{step}{amount}, and nothing in the code of the model explains it: "
        f"{other} until this is mended, and send the output of `{command}`"
    )


def _of_buffer(diagnosis: Diagnosis) -> str:
    first, probed = diagnosis.first, diagnosis.probed
    module, _, name = first.name.rpartition(".")
    kind = probed.changed_buffers[first.name]
    subject = f"{name} of {module or 'the model'}{probed.at(first.name)} differs from step {first.step} on"
    if kind == SPECTRAL_KIND:
        return f"{subject}: torch's spectral_norm moves it at each forward pass, and each process by its own only"
    if is_norm(first.name, kind):
        return (
            f"{subject}: {kind} is a custom BatchNorm, and each process keeps the statistics of its own micro-batches; "
            f"derive it from torch's BatchNorm, whose running statistics Lockstep moves once a step"
        )
    return f"{subject}: this model updates buffers outside BatchNorm, and each process by its own micro-batches only"
