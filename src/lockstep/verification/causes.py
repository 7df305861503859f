"""Describes the most likely cause of the first difference, based on results that are already known."""

from dataclasses import dataclass
from typing import Final

from lockstep.common.hashing import SEED_VARIABLE
from lockstep.probe.findings import (
    FOREIGN_RANDOMNESS,
    FORWARD_CULPRITS,
    RANDOM_DATA,
    RANKED_DATA,
    UNREPEATABLE_EVALUATION,
    ProbeResult,
    is_norm_buffer,
    make_findings,
)
from lockstep.probe.state import SPECTRAL_NORM as SPECTRAL_KIND
from lockstep.verification.compare import EVALUATION, Difference
from lockstep.verification.trace import AVERAGE, DATA, GRADIENT, LOSS, MICROBATCH_LOSS, MODEL, OPTIMIZER, SCALARS

EVALUATED: Final = "evaluated sum"  # the kind of a difference that only appears in the evaluation
_DATA_CAUSE: Final = (
    "the dataset returns different samples in this process than in the reference: each sample depends on the process, "
    "the time or earlier fetches; make it a function of the index and of the random generators, which are seeded "
    "for each sample"
)
# The cause of each kind of difference, if user code doesn't explain it.
_CAUSES_BY_KIND: Final = {
    MICROBATCH_LOSS: "the forward pass of this micro-batch has a different result in this process",
    LOSS: "the losses of the micro-batches agree, but their sum differs: they were added in a different order",
    GRADIENT: "the losses agree, but the gradients differ: they were added in a different order, or one is missing",
    MODEL: "the gradients agree, but the weights differ: the optimizer's step has a different result on shards",
    OPTIMIZER: "the weights agree, but the optimizer state differs",
    AVERAGE: "the weights agree, but their average differs",
    SCALARS: "all tensors agree, but the scalars of the engine differ",
    EVALUATION: "training agrees, but the evaluation differs: samples were skipped, counted twice or computed again",
}


@dataclass(frozen=True)
class Diagnosis:
    """The first difference between a case and the reference, with the information that may explain it.

    - `label`: The strategy and the number of processes of the case.
    - `resumed`: Whether the difference occurred after a checkpoint was loaded.
    - `reproduced`: Whether a second run showed the same difference.
    - `other_hash_seed`: Whether the case ran with a different hash seed than the reference.
    - `distance`: The largest difference in the tensor, if known.
    - `command`: The command that verifies only this placement.
    """

    difference: Difference
    probe_result: ProbeResult
    label: str
    resumed: bool = False
    reproduced: bool = True
    other_hash_seed: bool = False
    distance: float | None = None
    command: str = ""

    @property
    def kind(self) -> str:
        """The kind of the first difference, as shown to the user."""
        if self.difference.kind == MODEL:
            return "buffer" if self.difference.name in self.probe_result.buffers else "weight"
        return {EVALUATION: EVALUATED, GRADIENT: "gradient of"}.get(self.difference.kind, self.difference.kind)

    @property
    def name(self) -> str:
        """The name of the tensor or metric, or an empty string if the data or the loss of a micro-batch differs."""
        return "" if self.microbatch is not None else self.difference.name

    @property
    def microbatch(self) -> int | None:
        """The index of the micro-batch, counted from 0, or None for other kinds of differences."""
        return int(self.difference.name) if self.difference.kind in (DATA, MICROBATCH_LOSS) else None


def find_cause(diagnosis: Diagnosis) -> str:
    """Describe the most likely cause of the first difference."""
    if diagnosis.kind == "buffer" and diagnosis.difference.name in diagnosis.probe_result.changed_buffers:
        return _describe_buffer_cause(diagnosis)
    suspects = {finding.culprit: finding.text for finding in make_findings(diagnosis.probe_result) if finding.fault}
    if diagnosis.difference.kind == DATA:
        data_cause = suspects.get(RANDOM_DATA) or suspects.get(RANKED_DATA)
        return data_cause or (
            describe_hash_seed_cause(diagnosis.probe_result.location_of("training", "data"))
            if _differs_by_hash_seed(diagnosis)
            else _DATA_CAUSE
        )
    if diagnosis.difference.kind == EVALUATION and UNREPEATABLE_EVALUATION in suspects:
        return suspects[UNREPEATABLE_EVALUATION]
    for culprit in FORWARD_CULPRITS:
        if culprit in suspects:
            return suspects[culprit]
    if _differs_by_hash_seed(diagnosis):
        return describe_hash_seed_cause(diagnosis.probe_result.location_of("model", "loss"))
    notes = {
        finding.culprit: finding.text
        for finding in make_findings(diagnosis.probe_result)
        if finding.culprit in FORWARD_CULPRITS
    }
    if notes and diagnosis.difference.kind != EVALUATION:
        if FOREIGN_RANDOMNESS in notes:
            return notes[FOREIGN_RANDOMNESS]
        return f"possibly code whose effect only shows after more micro-batches: {next(iter(notes.values()))}"
    return _describe_unexplained_cause(diagnosis)


def describe_hash_seed_cause(location: str = "") -> str:
    """Describe the cause of results that depend on Python's hash seed. `location` is text such as ` (net.py:12)`."""
    return (
        f"the order of a set of strings, or hash(), in code{location}: both change with each start of Python, unless "
        f"{SEED_VARIABLE} is set; iterate over sorted(...) instead"
    )


def _differs_by_hash_seed(diagnosis: Diagnosis) -> bool:
    return diagnosis.other_hash_seed and diagnosis.reproduced


def _describe_unexplained_cause(diagnosis: Diagnosis) -> str:
    difference = diagnosis.difference
    if not diagnosis.reproduced:
        return (
            "a second run of the same placement gave yet another result: a kernel is not deterministic, processes do "
            "not wait for each other, or something depends on the clock, the system's randomness or the process"
        )
    if diagnosis.label == "single on 1" and not diagnosis.resumed:
        return (
            "a second run of the reference gave different results: a kernel is not deterministic, or the forward pass "
            "or the data depend on the clock, the system's randomness or the process"
        )
    if diagnosis.resumed:
        return (
            "the uninterrupted run agreed, so the checkpoint lacks state that later steps depend on, such as plain "
            "attributes, buffers with persistent=False or globals, or the strategy saves or loads it incorrectly; keep "
            "such state in parameters or persistent buffers"
        )
    cause = _CAUSES_BY_KIND.get(difference.kind, "the strategy has a different result")
    if diagnosis.probe_result.traits:
        return f"{cause}; possibly because {diagnosis.probe_result.traits[0]}"
    return f"{cause}; {_make_advice(diagnosis)}"


def _make_advice(diagnosis: Diagnosis) -> str:
    """Return advice for a difference that user code doesn't explain: use another strategy, and report the issue."""
    item_name = f"micro-batch {diagnosis.microbatch}" if diagnosis.microbatch is not None else diagnosis.name
    subject = " of ".join(part for part in (diagnosis.kind.removesuffix(" of"), item_name) if part)
    step = "" if diagnosis.difference.step is None else f" in step {diagnosis.difference.step}"
    amount = "" if diagnosis.distance is None else f", by {diagnosis.distance:.3g}"
    command = diagnosis.command or "lockstep verify with --json FILE"
    advice = "use strategy single" if diagnosis.label.startswith("ddp ") else "use strategy ddp"
    return (
        f"the first difference is in the {subject}{step}{amount}, and nothing in the code of the model explains it; "
        f"{advice} until this is fixed, and send the output of `{command}`"
    )


def _describe_buffer_cause(diagnosis: Diagnosis) -> str:
    difference, probe_result = diagnosis.difference, diagnosis.probe_result
    module, _, name = difference.name.rpartition(".")
    kind = probe_result.changed_buffers[difference.name]
    location = probe_result.location_of(difference.name)
    subject = f"{name} of {module or 'the model'}{location} differs from step {difference.step} on"
    if kind == SPECTRAL_KIND:
        return (
            f"{subject}: torch's spectral_norm updates it in each forward pass, and each process only runs the forward "
            f"passes of its own micro-batches"
        )
    if is_norm_buffer(difference.name, kind):
        return (
            f"{subject}: {kind} is a custom BatchNorm, and each process keeps the statistics of its own micro-batches; "
            f"derive it from torch's BatchNorm, whose running statistics Lockstep updates once per step"
        )
    return f"{subject}: this model updates buffers outside BatchNorm, and each process only sees its own micro-batches"
