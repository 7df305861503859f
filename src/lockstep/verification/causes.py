"""Derives the most likely cause of the first difference, as text. This doesn't run user code."""

from dataclasses import dataclass
from typing import Final

from lockstep.common.hashing import SEED_VARIABLE
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

EVALUATED: Final = "evaluated sum"  # the kind of a difference that only appears in the evaluation
_DATA_CAUSE: Final = (
    "the dataset returns different samples in this process than in the reference: each sample depends on the process, "
    "the time or earlier fetches; make it a function of the index and of the generators that are seeded for each sample"
)
# Explains each kind of difference if there is no other explanation.
_BY_KIND: Final = {
    OWN_LOSS: "the forward pass of this micro-batch has a different result in this process",
    LOSS: "the losses of the micro-batches agree, but their sum differs: they were added in a different order",
    GRADIENT: "the losses agree, but the gradients differ: they were added in a different order, or one is missing",
    MODEL: "the gradients agree, but the weights differ: the optimizer's step has a different result on shards",
    OPTIMIZER: "the weights agree, but the optimizer state differs",
    AVERAGE: "the weights agree, but their average differs",
    SCALARS: "all tensors agree, but the figures of the engine differ",
    EVALUATION: "training agrees, but the evaluation differs: samples were skipped, counted twice or computed again",
}


@dataclass(frozen=True)
class Diagnosis:
    """The first difference, and everything known about it.

    - `resumed`: Whether the difference occurred after a checkpoint was loaded.
    - `again`: Whether a second run showed the same difference.
    - `hashes`: Whether the difference occurred in a process with a different hash seed.
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
        """The kind of the first difference, in terms that users know."""
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
    """Return the most likely cause as text."""
    if diagnosis.what == "buffer" and diagnosis.first.name in diagnosis.probed.changed_buffers:
        return _buffer_cause(diagnosis)
    suspects = {finding.culprit: finding.text for finding in findings(diagnosis.probed) if finding.fault}
    if diagnosis.first.what == DATA:
        data_cause = suspects.get(RANDOM_DATA) or suspects.get(RANKED_DATA)
        return data_cause or (
            hash_seed_cause(diagnosis.probed.location_of("training", "data"))
            if _differs_by_hash_seed(diagnosis)
            else _DATA_CAUSE
        )
    if diagnosis.first.what == EVALUATION and UNREPEATABLE_EVALUATION in suspects:
        return suspects[UNREPEATABLE_EVALUATION]
    for culprit in OF_FORWARD:
        if culprit in suspects:
            return suspects[culprit]
    if _differs_by_hash_seed(diagnosis):
        return hash_seed_cause(diagnosis.probed.location_of("model", "loss"))
    notes = {finding.culprit: finding.text for finding in findings(diagnosis.probed) if finding.culprit in OF_FORWARD}
    if notes and diagnosis.first.what != EVALUATION:
        if FOREIGN_RANDOMNESS in notes:
            return notes[FOREIGN_RANDOMNESS]
        return f"possibly a note, which may only matter after more micro-batches: {next(iter(notes.values()))}"
    return _unexplained_cause(diagnosis)


def hash_seed_cause(location: str = "") -> str:
    """Return the cause if a different hash seed changes the results. `location` is a text such as ` (net.py:12)`."""
    return (
        f"the order of a set of strings, or hash(), in code{location}: it changes with each start of Python, unless "
        f"{SEED_VARIABLE} is set; iterate over sorted(...) instead"
    )


def _differs_by_hash_seed(diagnosis: Diagnosis) -> bool:
    return diagnosis.hashes and diagnosis.again


def _unexplained_cause(diagnosis: Diagnosis) -> str:
    first = diagnosis.first
    if not diagnosis.again:
        return (
            "a second run of the same placement had a different result again: a kernel is not deterministic, processes "
            "do not wait for each other, or something depends on the clock, the system's randomness or the process"
        )
    if diagnosis.place == "single on 1" and not diagnosis.resumed:
        return (
            "the reference does not agree with a second run of itself: a kernel is not deterministic, or the forward "
            "pass or the data depend on the clock, the system's randomness or the process"
        )
    if diagnosis.resumed:
        return (
            "the checkpoint does not contain all state that the rest of the run depends on, such as plain attributes, "
            "buffers with persistent=False or globals, or the strategy saves or loads it incorrectly; the run itself "
            "agreed"
        )
    meaning = _BY_KIND.get(first.what, "the strategy has a different result")
    if diagnosis.probed.traits:
        return f"{meaning}; possibly because {diagnosis.probed.traits[0]}"
    return f"{meaning}; {_advice(diagnosis)}"


def _advice(diagnosis: Diagnosis) -> str:
    """Return advice for a difference that user code doesn't explain."""
    tensor = f"micro-batch {diagnosis.microbatch}" if diagnosis.microbatch is not None else diagnosis.name
    subject = " of ".join(part for part in (diagnosis.what.removesuffix(" of"), tensor) if part)
    step = "" if diagnosis.first.step is None else f" in step {diagnosis.first.step}"
    amount = "" if diagnosis.distance is None else f", by {diagnosis.distance:.3g}"
    command = diagnosis.command or "lockstep verify with --json FILE"
    advice = "use strategy single" if diagnosis.place.startswith("ddp ") else "use strategy ddp"
    return (
        f"the first difference is in the {subject}{step}{amount}, and nothing in the code of the model explains it; "
        f"{advice} until this is fixed, and send the output of `{command}`"
    )


def _buffer_cause(diagnosis: Diagnosis) -> str:
    first, probed = diagnosis.first, diagnosis.probed
    module, _, name = first.name.rpartition(".")
    kind = probed.changed_buffers[first.name]
    subject = f"{name} of {module or 'the model'}{probed.location_of(first.name)} differs from step {first.step} on"
    if kind == SPECTRAL_KIND:
        return f"{subject}: torch's spectral_norm updates it in each forward pass, and each process only runs its own"
    if is_norm(first.name, kind):
        return (
            f"{subject}: {kind} is a custom BatchNorm, and each process keeps the statistics of its own micro-batches; "
            f"derive it from torch's BatchNorm, whose running statistics Lockstep updates once per step"
        )
    return f"{subject}: this model updates buffers outside BatchNorm, and each process only sees its own micro-batches"
