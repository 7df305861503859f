"""From facts about the user's own code to what is wrong with it, in words: nothing here runs anything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from lockstep.commands._verify_compare import DATA, EVALUATION, LOSS, OWN_LOSS, SCALARS, Difference
from lockstep.commands._verify_trace import AVERAGE, GRADIENT, MODEL, OPTIMIZER
from lockstep.reporting.verification import Finding

RANDOM_DATA: Final = "a data set that is random for each call"
NOT_DETERMINISTIC: Final = "a non-deterministic kernel"
UNREPEATABLE: Final = "a forward pass that gives something else when repeated"
FOREIGN_RANDOMNESS: Final = "randomness outside torch's generators"
ATTRIBUTES: Final = "state in plain attributes"
HIDDEN_STATE: Final = "state outside the model's tensors"
CUSTOM_BATCHNORM: Final = "a custom BatchNorm"
BUFFERS: Final = "buffers updated outside BatchNorm"
MEAN_LOSS: Final = "a loss that is a mean"
NO_SUM: Final = "a loss that is no sum over samples"
UNUSED: Final = "unused parameters"

# What makes a forward pass differ from one process to another, the most certain first.
_OF_FORWARD: Final = (UNREPEATABLE, FOREIGN_RANDOMNESS, ATTRIBUTES, BUFFERS, CUSTOM_BATCHNORM, HIDDEN_STATE)
_CLOSE: Final = 1e-3  # sums of a loss over a micro-batch agree much better, and a mean is off by its whole size
_NAMED: Final = 8  # names that a sentence lists


class RandomSample(NamedTuple):
    """A sample that was not the same when fetched again; `what` is inputs or targets."""

    part: str
    number: int
    what: str


class LossFact(NamedTuple):
    """The loss of so many samples together, and the sum of the losses of each alone."""

    samples: int
    together: float
    one_by_one: float


@dataclass(frozen=True)
class Facts:
    """What probes on one process saw of data, model and loss. Names are those of a single process."""

    buffers: Sequence[str] = ()
    # Buffers that forward changes though they are no torch BatchNorm's, with the class of their module; and those of
    # them that end as something else if fewer micro-batches have gone by.
    changed_buffers: Mapping[str, str] = field(default_factory=dict)
    counting_buffers: Sequence[str] = ()
    attributes: Mapping[str, str] = field(default_factory=dict)  # those that forward changes, and how
    streams: Sequence[str] = ()  # generators that forward draws from: Python's, NumPy's
    unused: Sequence[str] = ()  # parameters that got no gradient
    random_samples: Sequence[RandomSample] = ()
    loss: LossFact | None = None
    repeated: str = ""  # what is another when the same is computed again from the same beginning
    alone: str = ""  # what is another when a micro-batch is computed without the one before it
    refused: str = ""  # what torch said of an operation without a deterministic kernel


def findings(facts: Facts) -> list[Finding]:
    """Return what is wrong, or worth knowing, with the user's own code."""
    found = [*_of_data(facts), *_of_kernels(facts), *_of_state(facts), *_of_buffers(facts), *_of_loss(facts)]
    if facts.unused:
        text = (
            f"the loss of the micro-batches tried depends on none of these parameters: {_listed(facts.unused)}; they "
            f"get a gradient of zeros, so weight decay and momentum still act on them; remove or freeze them "
            f"(requires_grad=False)"
        )
        found.append(Finding(UNUSED, False, text, tuple(facts.unused)))
    return found


@dataclass(frozen=True)
class Suspicion:
    """What departed first, and all that is known around it.

    `resumed` says that it happened after a checkpoint was loaded, `again` that a second run saw the same.
    """

    first: Difference
    facts: Facts
    place: str
    processes: int
    resumed: bool = False
    again: bool = True

    @property
    def what(self) -> str:
        """The kind of the first departure, in the user's words."""
        if self.first.what == MODEL:
            return "buffer" if self.first.name in self.facts.buffers else "weight"
        return {EVALUATION: "evaluated sum", GRADIENT: "gradient of"}.get(self.first.what, self.first.what)

    @property
    def name(self) -> str:
        """The name of the tensor or figure, if it has one."""
        return "" if self.microbatch is not None else self.first.name

    @property
    def microbatch(self) -> int | None:
        """The number of the micro-batch, from 0, if it is known."""
        return int(self.first.name) if self.first.what in (DATA, OWN_LOSS) else None


def cause(suspicion: Suspicion) -> str:
    """Say in words what most likely made it depart."""
    if suspicion.what == "buffer" and suspicion.first.name in suspicion.facts.changed_buffers:
        return _of_buffer(suspicion)
    suspects = {finding.culprit: finding.text for finding in findings(suspicion.facts) if finding.fault}
    if suspicion.first.what == DATA:
        return suspects.get(RANDOM_DATA) or (
            "the data set gives this process other samples than the reference: what it gives depends on the process, "
            "the time or what was fetched before; make it a function of the index and of the generators that are "
            "seeded for each sample"
        )
    for culprit in _OF_FORWARD:
        if culprit in suspects:
            return suspects[culprit]
    return _without_suspect(suspicion)


def _without_suspect(suspicion: Suspicion) -> str:
    first = suspicion.first
    if not suspicion.again:
        return (
            "a second run of the same saw something else again: a kernel is not deterministic, processes do not wait "
            "for each other, or something depends on the clock, the system's randomness or the process"
        )
    if suspicion.place == "single on 1" and not suspicion.resumed:
        return (
            "the reference does not agree with a second run of itself: a kernel is not deterministic, or the forward "
            "pass or the data depend on the clock, the system's randomness or the process"
        )
    if suspicion.resumed:
        return (
            "the checkpoint does not hold all that the rest of the run depends on: state in plain attributes, in "
            "buffers with persistent=False or in globals, or the strategy saves or loads it wrongly; the run itself "
            "agreed"
        )
    return f"{_by_kind(first)}; nothing in the recipe's own code was found that explains it: please report it"


def _by_kind(first: Difference) -> str:
    by_kind = {
        OWN_LOSS: "the forward pass of this micro-batch gives something else in this process",
        LOSS: "the losses of the micro-batches agree and their sum does not: they were added in another order",
        GRADIENT: "the losses agree and the gradients do not: they were added in another order, or one is missing",
        MODEL: "the gradients agree and the weights do not: the optimizer's step does something else when it is cut",
        OPTIMIZER: "the weights agree and the optimizer's state does not",
        AVERAGE: "the weights agree and their average does not",
        SCALARS: "all tensors agree, and the engine's own figures do not",
        EVALUATION: "training agrees and evaluation does not: samples were left out, counted twice or computed anew",
    }
    return by_kind.get(first.what, "the strategy computes something else")


def _of_buffer(suspicion: Suspicion) -> str:
    first, facts = suspicion.first, suspicion.facts
    module, _, name = first.name.rpartition(".")
    kind = facts.changed_buffers[first.name]
    subject = f"{name} of {module or 'the model'} differs from step {first.step} on"
    if _is_norm(first.name, kind):
        return (
            f"{subject}: {kind} is a custom BatchNorm, and each process keeps the statistics of its own micro-batches; "
            f"derive it from torch's BatchNorm, whose running statistics Lockstep moves once a step"
        )
    return f"{subject}: this model updates buffers outside BatchNorm, and each process by its own micro-batches only"


def _of_data(facts: Facts) -> Iterator[Finding]:
    if not facts.random_samples:
        return
    part, number, what = facts.random_samples[0]
    text = (
        f"the {part} data set is random for each call: sample {number}, fetched twice, has other {what} "
        f"({len(facts.random_samples)} of the samples tried do); draw from Python's, NumPy's or torch's default "
        f"generators in __getitem__, which are seeded for each sample, not from a generator of its own, the clock or "
        f"the system"
    )
    yield Finding(RANDOM_DATA, True, text, tuple(f"{each.part} {each.number}" for each in facts.random_samples))


def _of_kernels(facts: Facts) -> Iterator[Finding]:
    if facts.refused:
        text = f"an operation of the model or the loss has no deterministic kernel: {facts.refused}; use another one"
        yield Finding(NOT_DETERMINISTIC, True, text)
    elif facts.repeated:
        text = (
            f"the same micro-batch, computed again by a fresh copy of the model with every generator in the same "
            f"state, has another {facts.repeated}: a kernel is not deterministic, or the forward pass uses the clock, "
            f"the system's randomness or a global variable"
        )
        yield Finding(UNREPEATABLE, True, text)


def _of_state(facts: Facts) -> Iterator[Finding]:
    """Whatever a forward pass leaves behind is a fault once the next one depends on it."""
    depends = bool(facts.alone)
    if facts.streams:
        text = (
            f"the forward pass draws from {' and '.join(facts.streams)} random generator, which is not seeded for each "
            f"micro-batch{_consequence(facts.alone)}; draw from torch's default generator"
        )
        yield Finding(FOREIGN_RANDOMNESS, depends, text, tuple(facts.streams))
    if facts.attributes:
        changes = [f"{name} ({change})" for name, change in facts.attributes.items()]
        text = (
            f"the model keeps state in plain attributes that the forward pass changes: {_listed(changes)}"
            f"{_consequence(facts.alone)}; processes see only their own micro-batches, and checkpoints do not hold it; "
            f"make it a function of the inputs, or a parameter"
        )
        yield Finding(ATTRIBUTES, depends, text, tuple(facts.attributes))
    if depends and not (facts.repeated or facts.streams or facts.attributes or facts.counting_buffers):
        text = (
            f"the model or the loss keeps state that is neither a tensor nor an attribute of the model"
            f"{_consequence(facts.alone)}; look for global variables, closures and caches"
        )
        yield Finding(HIDDEN_STATE, True, text)


def _consequence(alone: str) -> str:
    if not alone:
        return " (the results of the micro-batches tried do not depend on it)"
    return f", and the {alone} of a micro-batch depends on whether another one was computed before it"


def _of_buffers(facts: Facts) -> Iterator[Finding]:
    norms = [name for name, kind in facts.changed_buffers.items() if _is_norm(name, kind)]
    others = [name for name in facts.changed_buffers if name not in norms]
    if norms:
        kinds = ", ".join(sorted({facts.changed_buffers[name] for name in norms}))
        text = (
            f"{kinds} keeps running statistics and is not derived from torch's BatchNorm: {_listed(norms)}; each "
            f"process would keep those of its own micro-batches; derive it from torch's BatchNorm, whose statistics "
            f"Lockstep moves once a step"
        )
        yield Finding(CUSTOM_BATCHNORM, _counts(facts, norms), text, tuple(norms))
    if others:
        text = (
            f"this model updates buffers outside BatchNorm: {_listed(others)}; each process would update them by its "
            f"own micro-batches only; update them outside the forward pass, or make them a function of the inputs"
        )
        yield Finding(BUFFERS, _counts(facts, others), text, tuple(others))


def _counts(facts: Facts, names: Sequence[str]) -> bool:
    """Whether one of the buffers depends on how many micro-batches, or which, have gone by: caches do not."""
    return any(name in facts.counting_buffers for name in names)


def _is_norm(buffer: str, kind: str) -> bool:
    return "norm" in kind.lower() or buffer.rpartition(".")[2].startswith("running_")


def _of_loss(facts: Facts) -> Iterator[Finding]:
    if facts.loss is None or facts.loss.samples < 2:
        return
    samples, together, one_by_one = facts.loss
    if _alike(together, one_by_one):
        return
    figures = f"loss: {samples} samples together give {together:.6g}, one by one they add up to {one_by_one:.6g}"
    if _alike(together * samples, one_by_one):
        text = (
            f"{figures}: that is already a mean, and is divided by the number of samples again; return the sum, as "
            f"with reduction='sum', or one value for each sample, as with reduction='none'"
        )
        yield Finding(MEAN_LOSS, True, text)
    else:
        text = (
            f"{figures}: it is no sum over samples, so which samples share a micro-batch decides the result; that is "
            f"the recipe's, and so the same on every placement, but microbatches=1 computes something else"
        )
        yield Finding(NO_SUM, False, text)


def _alike(one: float, other: float) -> bool:
    return abs(one - other) <= _CLOSE * max(abs(one), abs(other))


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
