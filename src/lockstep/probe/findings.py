"""Converts the observations of a probe to findings about the user's code. This module doesn't run user code."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from lockstep.common.patterns import list_some
from lockstep.probe.state import CACHE
from lockstep.probe.state import SPECTRAL_NORM as SPECTRAL_KIND
from lockstep.probe.witness import CLOCK, HOST, NUMPY, PROCESS, PYTHON, RANK, SYSTEM, TORCH
from lockstep.reporting.verification import CodeFinding

RANDOM_DATA: Final = "a dataset whose items change"
RANKED_DATA: Final = "a dataset that depends on the rank"
RANKED: Final = "a forward pass that depends on the rank"
GLOBALS: Final = "state in global variables"
SPECTRAL_NORM: Final = "torch's spectral_norm"
WEIGHTS: Final = "weights changed in the forward pass"
UNREPEATABLE_EVALUATION: Final = "an evaluation that depends on earlier batches"
NOT_DETERMINISTIC: Final = "a non-deterministic kernel"
UNREPEATABLE: Final = "a forward pass with a different result when repeated"
FOREIGN_RANDOMNESS: Final = "randomness outside torch's generators"
ATTRIBUTES: Final = "state in plain attributes"
HIDDEN_STATE: Final = "state outside the model's tensors"
CUSTOM_BATCHNORM: Final = "a custom BatchNorm"
BUFFERS: Final = "buffers updated outside BatchNorm"
MEAN_LOSS: Final = "a loss that is a mean"
NO_SUM: Final = "a loss that is not a sum over samples"
UNUSED: Final = "unused parameters"

# Reasons why a forward pass may differ between processes, with the most certain reason first.
OF_FORWARD: Final = (
    *(RANKED, GLOBALS, UNREPEATABLE, FOREIGN_RANDOMNESS),
    *(ATTRIBUTES, SPECTRAL_NORM, BUFFERS, CUSTOM_BATCHNORM, WEIGHTS, HIDDEN_STATE),
)
_CLOCKS: Final = (CLOCK, SYSTEM, PROCESS, HOST)
_RELATIVE_TOLERANCE: Final = (
    1e-3  # relative tolerance; two sums of the same losses are much closer, and a mean is much further away
)


class RandomSample(NamedTuple):
    """A sample that differs when it is fetched again or, with `by_rank`, when a different rank fetches it.

    `what` describes the part of the sample that differs, such as its inputs.
    """

    part: str
    number: int
    what: str
    by_rank: bool = False


class LossFact(NamedTuple):
    """The loss of several samples computed together, and the sum of their losses computed individually."""

    samples: int
    together: float
    one_by_one: float


@dataclass(frozen=True)
class ProbeResult:
    """The observations of a probe about the data, the model and the loss, made in a single process."""

    buffers: Sequence[str] = ()
    # Buffers outside torch's BatchNorm that forward() modifies, each with the class of its module. `counting_buffers`
    # lists the buffers whose final value depends on the first micro-batch.
    changed_buffers: Mapping[str, str] = field(default_factory=dict)
    counting_buffers: Sequence[str] = ()
    changed_weights: Sequence[str] = ()  # parameters modified by forward(), only checked as a last resort
    attributes: Mapping[str, str] = field(default_factory=dict)  # attributes modified by forward(), with descriptions
    variables: Mapping[str, str] = field(default_factory=dict)  # globals modified by forward(), with descriptions
    streams: Sequence[str] = ()  # random number generators used by forward(): Python's or NumPy's
    unused: Sequence[str] = ()  # parameters without a gradient
    random_samples: Sequence[RandomSample] = ()
    loss: LossFact | None = None
    repeated: str = ""  # the part that differs when the same micro-batch is repeated from the same state
    alone: str = ""  # the part that differs without the previous micro-batch
    by_rank: str = ""  # the part that differs when this process poses as a different rank
    reads: Mapping[str, str] = field(default_factory=dict)  # nondeterministic inputs (witness.py), with source lines
    evaluation: str = ""  # the part of an evaluation that depends on the previous batch
    evaluation_reads: Mapping[str, str] = field(default_factory=dict)  # like `reads`, for evaluation
    traits: Sequence[str] = ()  # properties that may depend on the strategy (traits.py), only checked by verify
    refused: str = ""  # torch's message about an operation without a deterministic kernel
    # Source lines of the user's code by key. The keys are model, loss, data, training and validation (the code that
    # fetches samples), kernel (the operation without a deterministic kernel), and the names of buffers, attributes and
    # variables.
    places: Mapping[str, str] = field(default_factory=dict)

    def at(self, *names: str) -> str:
        """Return the first known source line for any of these names, such as ` (net.py:12)`, or an empty string."""
        locations = [self.places[name] for name in names if self.places.get(name)]
        return f" ({locations[0]})" if locations else ""


def findings(probed: ProbeResult, departed: bool = False) -> list[CodeFinding]:
    """Return the faults and notes about the user's code.

    `departed` is whether training gave different results on a placement. If it did, and if no other fault explains the
    difference, the use of random number generators that Lockstep doesn't seed is also reported as a fault.
    """
    code_findings = _all_findings(probed)
    unexplained = departed and not any(finding.fault for finding in code_findings)
    return [
        replace(finding, fault=finding.fault or (unexplained and finding.culprit == FOREIGN_RANDOMNESS))
        for finding in code_findings
    ]


def _all_findings(probed: ProbeResult) -> list[CodeFinding]:
    code_findings = [
        *_data_findings(probed),
        *_kernel_findings(probed),
        *_state_findings(probed),
        *_buffer_findings(probed),
        *_loss_findings(probed),
    ]
    code_findings += _evaluation_findings(probed)
    if probed.unused:
        text = (
            f"the loss of the tested micro-batches does not depend on these parameters: {list_some(probed.unused)}; "
            f"they get a gradient of zeros, so weight decay and momentum still change them; remove or freeze them "
            f"(requires_grad=False)"
        )
        code_findings.append(CodeFinding(UNUSED, False, text, tuple(probed.unused)))
    return code_findings


def _data_findings(probed: ProbeResult) -> Iterator[CodeFinding]:
    random_by_call = [sample for sample in probed.random_samples if not sample.by_rank]
    random_by_rank = [sample for sample in probed.random_samples if sample.by_rank]
    if random_by_call:
        part, number, difference, _ = random_by_call[0]
        text = (
            f"item {number} of the {part} dataset{probed.at(part, 'data')} changes when it is fetched again: it has "
            f"different {difference} ({len(random_by_call)} of the tested items do); do not change items in place, do "
            f"not keep random draws, and draw from the default generators of Python, NumPy or torch in __getitem__, "
            f"which are seeded for each item, not from a separate generator, the clock or the system"
        )
        yield CodeFinding(RANDOM_DATA, True, text, _samples(random_by_call))
    if random_by_rank:
        part, number, difference, _ = random_by_rank[0]
        text = (
            f"the {part} dataset{probed.at(part, 'data')} depends on the rank: sample {number} has different "
            f"{difference} on rank 1 of 2 ({len(random_by_rank)} of the tested samples do); return the whole dataset "
            f"on every rank, because Lockstep distributes its samples"
        )
        yield CodeFinding(RANKED_DATA, True, text, _samples(random_by_rank))


def _samples(samples: Sequence[RandomSample]) -> tuple[str, ...]:
    return tuple(f"{sample.part} {sample.number}" for sample in samples)


def _kernel_findings(probed: ProbeResult) -> Iterator[CodeFinding]:
    if probed.refused:
        text = (
            f"an operation of the model or the loss{probed.at('kernel')} has no deterministic kernel: "
            f"{probed.refused}; use a different operation"
        )
        yield CodeFinding(NOT_DETERMINISTIC, True, text)
    # A counter in a global variable changes with each call. Unless the code also reads a clock, the counter explains
    # the difference.
    elif probed.repeated and not (probed.variables and not _clocks(probed)):
        text = (
            f"the same micro-batch, computed again by a fresh copy of the model{probed.at('model')} with every "
            f"generator in the same state, has a different {probed.repeated}: "
        )
        if _clocks(probed):
            text += f"the code reads {_list_reads(probed, _clocks(probed))}; make it a function of the inputs"
        else:
            text += (
                "a kernel is not deterministic, or the forward pass uses the clock, the system's randomness or state "
                "of an earlier forward pass; make it a function of the inputs"
            )
        yield CodeFinding(UNREPEATABLE, True, text)
    if probed.by_rank:
        reads = _list_reads(probed, [name for name in probed.reads if name in (RANK, PROCESS, HOST)])
        depends = (
            f"the code reads {reads}" if reads else f"the model{probed.at('model')} or the loss depends on the rank"
        )
        text = (
            f"on rank 1 of 2, the same micro-batch has a different {probed.by_rank} than on one process: {depends}; "
            f"make it a function of the inputs"
        )
        yield CodeFinding(RANKED, True, text)


def _clocks(probed: ProbeResult) -> list[str]:
    return [name for name in probed.reads if name in _CLOCKS]


def _list_reads(probed: ProbeResult, names: Sequence[str]) -> str:
    return " and ".join(f"{name} ({probed.reads[name]})" for name in names)


def _state_findings(probed: ProbeResult) -> Iterator[CodeFinding]:
    """Yield the findings about state that a forward pass changes.

    This state is a fault if it affects the result of the next forward pass.
    """
    depends = bool(probed.alone)
    if probed.streams:
        # A cached function only generates random numbers in its first call, which was not recorded.
        caches = [name for name, how in probed.variables.items() if how.startswith(CACHE)]
        places = [(name, probed.reads.get(name)) for name in probed.streams]
        generators = [
            f"{name} random generator{f' ({location})' if location else probed.at(*caches)}"
            for name, location in places
        ]
        text = (
            f"the forward pass draws from {' and '.join(generators)}, which is not seeded for each "
            f"micro-batch{_consequence(probed.alone)}; draw from torch's default generator"
        )
        yield CodeFinding(FOREIGN_RANDOMNESS, depends, text, tuple(probed.streams))
    if probed.changed_weights:
        located_names = [f"{name}{probed.at(name)}" for name in probed.changed_weights]
        text = (
            f"the forward pass changes weights: {list_some(located_names)}{_consequence(probed.alone)}; each process "
            f"would change its own copy, once for each of its micro-batches; leave weights to the optimizer"
        )
        yield CodeFinding(WEIGHTS, True, text, tuple(probed.changed_weights))
    if probed.attributes:
        text = (
            f"the model keeps state in plain attributes that the forward pass changes: "
            f"{_changes(probed, probed.attributes)}{_consequence(probed.alone)}; each process only sees its own "
            f"micro-batches, and checkpoints do not contain it; make it a function of the inputs, or a parameter"
        )
        yield CodeFinding(ATTRIBUTES, depends, text, tuple(probed.attributes))
    changes_globals = bool(probed.variables) and (depends or bool(probed.repeated))
    if probed.variables:
        text = (
            f"the forward pass or the loss changes global variables: {_changes(probed, probed.variables)}"
            f"{_consequence(probed.alone or probed.repeated)}; each process only sees its own micro-batches, and "
            f"checkpoints do not contain them; make the result a function of the inputs"
        )
        yield CodeFinding(GLOBALS, changes_globals, text, tuple(probed.variables))
    state = probed.attributes or probed.counting_buffers or probed.changed_weights or changes_globals
    explained = probed.repeated or probed.streams or state
    if depends and not explained:
        text = (
            f"the model{probed.at('model')} or the loss keeps state that is neither a tensor nor an attribute of the "
            f"model nor a global variable{_consequence(probed.alone)}; look for closures and caches"
        )
        yield CodeFinding(HIDDEN_STATE, True, text)


def _changes(probed: ProbeResult, changed: Mapping[str, str]) -> str:
    """Return a text with each change and its source line, such as `forwards (0 -> 2, net.py:12)`."""
    descriptions = []
    for name, change in changed.items():
        location = probed.places.get(name)
        descriptions.append(f"{name} ({change}{f', {location}' if location else ''})")
    return list_some(descriptions)


def _consequence(difference: str) -> str:
    if not difference:
        return " (the results of the tested micro-batches do not depend on it)"
    return f", and the {difference} of a micro-batch depends on whether another micro-batch was computed before it"


def _buffer_findings(probed: ProbeResult) -> Iterator[CodeFinding]:
    spectral = [name for name, kind in probed.changed_buffers.items() if kind == SPECTRAL_KIND]
    norms = [name for name, kind in probed.changed_buffers.items() if is_norm(name, kind) and name not in spectral]
    other_buffers = [name for name in probed.changed_buffers if name not in (*norms, *spectral)]
    if spectral:
        text = (
            f"torch's spectral_norm{probed.at('model')} updates its buffers in each forward pass in training: "
            f"{list_some(spectral)}; each process would update its own copy, once for each of its micro-batches; "
            f"compute the norm from the weight only (torch.linalg.matrix_norm(weight, 2)), or use torch's weight_norm"
        )
        yield CodeFinding(SPECTRAL_NORM, _accumulates(probed, spectral), text, tuple(spectral))
    if norms:
        kinds = ", ".join(sorted({probed.changed_buffers[name] for name in norms}))
        text = (
            f"{kinds}{probed.at(*norms, 'model')} updates running statistics itself, not with torch's BatchNorm: "
            f"{list_some(norms)}; each process would only keep statistics of its own micro-batches; derive it from "
            f"torch's BatchNorm and call its forward, whose statistics Lockstep updates once per step"
        )
        yield CodeFinding(CUSTOM_BATCHNORM, _accumulates(probed, norms), text, tuple(norms))
    if other_buffers:
        located_names = [f"{name}{probed.at(name)}" for name in other_buffers]
        text = (
            f"this model updates buffers outside BatchNorm: {list_some(located_names)}; each process would update them "
            f"with its own micro-batches only; update them outside the forward pass, or make them a function of the "
            f"inputs"
        )
        yield CodeFinding(BUFFERS, _accumulates(probed, other_buffers), text, tuple(other_buffers))


def _accumulates(probed: ProbeResult, names: Sequence[str]) -> bool:
    """Return whether a buffer depends on earlier micro-batches, unlike the buffer of a cache."""
    return any(name in probed.counting_buffers for name in names)


def is_norm(buffer: str, kind: str) -> bool:
    return "norm" in kind.lower() or buffer.rpartition(".")[2].startswith("running_")


def _evaluation_findings(probed: ProbeResult) -> Iterator[CodeFinding]:
    if not probed.evaluation:
        return
    generators = [name for name in probed.evaluation_reads if name in (PYTHON, NUMPY, TORCH)]
    clocks = [name for name in probed.evaluation_reads if name in _CLOCKS]
    why = [f"forward draws from {name} random generator ({probed.evaluation_reads[name]})" for name in generators]
    why += [f"forward reads {name} ({probed.evaluation_reads[name]})" for name in clocks]
    because = " and ".join(why) or "forward keeps state"
    text = (
        f"in evaluation, the {probed.evaluation} of the model{probed.at('model')} depend on earlier batches: "
        f"{because}; make them a function of the inputs: check self.training, and pass training=self.training to "
        f"F.dropout"
    )
    yield CodeFinding(UNREPEATABLE_EVALUATION, True, text)


def _loss_findings(probed: ProbeResult) -> Iterator[CodeFinding]:
    if probed.loss is None or probed.loss.samples < 2:
        return
    samples, joint_loss, one_by_one = probed.loss
    if _is_close(joint_loss, one_by_one):
        return
    sums = f"{samples} samples together give {joint_loss:.6g}, one by one they add up to {one_by_one:.6g}"
    figures = f"loss{probed.at('loss')}: {sums}"
    if _is_close(joint_loss * samples, one_by_one):
        text = (
            f"{figures}: this is already a mean, and is divided by the number of samples again; return the sum "
            f"(reduction='sum'), or one value for each sample (reduction='none')"
        )
        yield CodeFinding(MEAN_LOSS, True, text)
    elif not probed.repeated:  # a loss that differs in each call can't be checked
        text = (
            f"{figures}: this is not a sum over samples, so the result depends on which samples share a micro-batch; "
            f"the recipe sets this, so it is the same on every placement, but microbatches=1 has a different result"
        )
        yield CodeFinding(NO_SUM, False, text)


def _is_close(left: float, right: float) -> bool:
    return abs(left - right) <= _RELATIVE_TOLERANCE * max(abs(left), abs(right))
