"""Converts the observations of a probe into findings about the user's code. This module doesn't run user code."""

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

# Causes of a forward pass that differs between processes, with the most certain cause first.
FORWARD_CULPRITS: Final = (
    *(RANKED, GLOBALS, UNREPEATABLE, FOREIGN_RANDOMNESS),
    *(ATTRIBUTES, SPECTRAL_NORM, BUFFERS, CUSTOM_BATCHNORM, WEIGHTS, HIDDEN_STATE),
)
_CLOCKS: Final = (CLOCK, SYSTEM, PROCESS, HOST)
# Much larger than the rounding error of a sum of losses, and much smaller than the difference between sum and mean.
_RELATIVE_TOLERANCE: Final = 1e-3


class RandomSample(NamedTuple):
    """A sample that changes when it is fetched again or, with `differs_by_rank`, when another rank fetches it.

    `split_name` is training or validation, and `sample_index` is the index in this split. `difference` names the
    values that change, such as the inputs.
    """

    split_name: str
    sample_index: int
    difference: str
    differs_by_rank: bool = False


class LossComparison(NamedTuple):
    """The loss of several samples computed together, and the sum of their losses computed one by one."""

    num_samples: int
    joint_loss: float
    summed_loss: float


@dataclass(frozen=True)
class ProbeResult:
    """The observations of a probe about the data, the model and the loss, made in a single process.

    A `differs_...` field names the result that differs, such as the loss, and is empty if no result differs.
    """

    buffers: Sequence[str] = ()
    # Buffers outside torch's BatchNorm that forward() modifies, mapped to the class names of their modules.
    # `accumulating_buffers` lists the buffers whose final value depends on the first micro-batch.
    changed_buffers: Mapping[str, str] = field(default_factory=dict)
    accumulating_buffers: Sequence[str] = ()
    changed_weights: Sequence[str] = ()  # parameters modified by forward(), only checked as a last resort
    attributes: Mapping[str, str] = field(default_factory=dict)  # attributes modified by forward(), with descriptions
    variables: Mapping[str, str] = field(default_factory=dict)  # globals modified by forward(), with descriptions
    generators: Sequence[str] = ()  # random number generators used by forward(): Python's or NumPy's
    unused_parameters: Sequence[str] = ()  # trainable parameters without a gradient
    random_samples: Sequence[RandomSample] = ()
    loss: LossComparison | None = None
    differs_on_repeat: str = ""  # when the same micro-batch is repeated from the same state
    differs_without_previous: str = ""  # when a micro-batch runs without the previous micro-batch
    differs_by_rank: str = ""  # when this process poses as a different rank
    # Nondeterministic values that forward() reads, such as CLOCK in witness.py, mapped to source lines.
    reads: Mapping[str, str] = field(default_factory=dict)
    differs_in_evaluation: str = ""  # when a batch is evaluated without the previous batch
    evaluation_reads: Mapping[str, str] = field(default_factory=dict)  # like `reads`, for evaluation
    traits: Sequence[str] = ()  # properties that may give different results under some strategies (see ModelTraits)
    missing_kernel: str = ""  # torch's error about an operation without a deterministic kernel
    # Source lines of user code by key. The keys are model, loss, data, training and validation (the code that fetches
    # samples), kernel (the operation without a deterministic kernel), and the names of buffers, attributes and globals.
    source_lines: Mapping[str, str] = field(default_factory=dict)

    def location_of(self, *names: str) -> str:
        """Return the first known source line of these names as text, such as ` (net.py:12)`, or an empty string."""
        locations = [self.source_lines[name] for name in names if self.source_lines.get(name)]
        return f" ({locations[0]})" if locations else ""


def make_findings(result: ProbeResult, placement_differs: bool = False) -> list[CodeFinding]:
    """Return the faults and notes about the user's code.

    Set `placement_differs` if training on a placement gave different results than the reference. If no fault explains
    this, draws from a random number generator that Lockstep doesn't seed are reported as a fault instead of a note.
    """
    code_findings = _make_all_findings(result)
    unexplained = placement_differs and not any(finding.fault for finding in code_findings)
    return [
        replace(finding, fault=finding.fault or (unexplained and finding.culprit == FOREIGN_RANDOMNESS))
        for finding in code_findings
    ]


def _make_all_findings(result: ProbeResult) -> list[CodeFinding]:
    code_findings = [
        *_make_data_findings(result),
        *_make_kernel_findings(result),
        *_make_state_findings(result),
        *_make_buffer_findings(result),
        *_make_loss_findings(result),
    ]
    code_findings += _make_evaluation_findings(result)
    if result.unused_parameters:
        text = (
            f"the loss of the tested micro-batches does not depend on these parameters: "
            f"{list_some(result.unused_parameters)}; "
            f"they get a gradient of zeros, so weight decay and momentum still change them; remove or freeze them "
            f"(requires_grad=False)"
        )
        code_findings.append(CodeFinding(UNUSED, False, text, tuple(result.unused_parameters)))
    return code_findings


def _make_data_findings(result: ProbeResult) -> Iterator[CodeFinding]:
    random_by_call = [sample for sample in result.random_samples if not sample.differs_by_rank]
    random_by_rank = [sample for sample in result.random_samples if sample.differs_by_rank]
    if random_by_call:
        part, index, difference, _ = random_by_call[0]
        text = (
            f"item {index} of the {part} dataset{result.location_of(part, 'data')} changes when it is fetched again: "
            f"it has different {difference} ({len(random_by_call)} of the tested items do); do not change items in "
            f"place, keep random draws or read the clock; in __getitem__, draw only from the default generators of "
            f"Python, NumPy or torch, which are seeded for each item"
        )
        yield CodeFinding(RANDOM_DATA, True, text, _format_sample_names(random_by_call))
    if random_by_rank:
        part, index, difference, _ = random_by_rank[0]
        text = (
            f"the {part} dataset{result.location_of(part, 'data')} depends on the rank: sample {index} has different "
            f"{difference} on rank 1 of 2 ({len(random_by_rank)} of the tested samples do); return the whole dataset "
            f"on every rank, because Lockstep distributes its samples"
        )
        yield CodeFinding(RANKED_DATA, True, text, _format_sample_names(random_by_rank))


def _format_sample_names(samples: Sequence[RandomSample]) -> tuple[str, ...]:
    return tuple(f"{sample.split_name} {sample.sample_index}" for sample in samples)


def _make_kernel_findings(result: ProbeResult) -> Iterator[CodeFinding]:
    if result.missing_kernel:
        text = (
            f"an operation of the model or the loss{result.location_of('kernel')} has no deterministic kernel: "
            f"{result.missing_kernel}; use a different operation"
        )
        yield CodeFinding(NOT_DETERMINISTIC, True, text)
    # If a global variable changes, it explains the difference, unless the code also reads a clock.
    elif result.differs_on_repeat and not (result.variables and not _find_clock_reads(result)):
        text = (
            f"the same micro-batch, computed again by a fresh copy of the model{result.location_of('model')} with "
            f"every "
            f"generator in the same state, has a different {result.differs_on_repeat}: "
        )
        if _find_clock_reads(result):
            text += (
                f"the code reads {_format_reads(result, _find_clock_reads(result))}; make it a function of the inputs"
            )
        else:
            text += (
                "a kernel is not deterministic, or the forward pass uses the clock, the system's randomness or state "
                "of an earlier forward pass; make it a function of the inputs"
            )
        yield CodeFinding(UNREPEATABLE, True, text)
    if result.differs_by_rank:
        reads = _format_reads(result, [name for name in result.reads if name in (RANK, PROCESS, HOST)])
        depends = (
            f"the code reads {reads}"
            if reads
            else f"the model{result.location_of('model')} or the loss depends on the rank"
        )
        text = (
            f"on rank 1 of 2, the same micro-batch has a different {result.differs_by_rank} than on one process: "
            f"{depends}; "
            f"make it a function of the inputs"
        )
        yield CodeFinding(RANKED, True, text)


def _find_clock_reads(result: ProbeResult) -> list[str]:
    return [name for name in result.reads if name in _CLOCKS]


def _format_reads(result: ProbeResult, names: Sequence[str]) -> str:
    return " and ".join(f"{name} ({result.reads[name]})" for name in names)


def _make_state_findings(result: ProbeResult) -> Iterator[CodeFinding]:
    """Yield a finding for each kind of state that a forward pass changes.

    Changed weights are always a fault. Any other change is only a fault if it affects the result of a forward pass.
    """
    depends_on_previous = bool(result.differs_without_previous)
    if result.generators:
        # A cached function draws random numbers only in its first call, which wasn't recorded. Name the cache instead.
        caches = [name for name, change in result.variables.items() if change.startswith(CACHE)]
        generator_lines = [(name, result.reads.get(name)) for name in result.generators]
        generators = [
            f"{name} random generator{f' ({location})' if location else result.location_of(*caches)}"
            for name, location in generator_lines
        ]
        text = (
            f"the forward pass draws from {' and '.join(generators)}, which is not seeded for each "
            f"micro-batch{_describe_consequence(result.differs_without_previous)}; draw from torch's default generator"
        )
        yield CodeFinding(FOREIGN_RANDOMNESS, depends_on_previous, text, tuple(result.generators))
    if result.changed_weights:
        located_names = [f"{name}{result.location_of(name)}" for name in result.changed_weights]
        text = (
            f"the forward pass changes weights: "
            f"{list_some(located_names)}{_describe_consequence(result.differs_without_previous)}; each process "
            f"would change its own copy, once for each of its micro-batches; leave weights to the optimizer"
        )
        yield CodeFinding(WEIGHTS, True, text, tuple(result.changed_weights))
    if result.attributes:
        text = (
            f"the model keeps state in plain attributes that the forward pass changes: "
            f"{_format_changes(result, result.attributes)}{_describe_consequence(result.differs_without_previous)}; "
            f"each process only sees its own "
            f"micro-batches, and checkpoints do not contain it; make it a function of the inputs, or a parameter"
        )
        yield CodeFinding(ATTRIBUTES, depends_on_previous, text, tuple(result.attributes))
    changes_globals = bool(result.variables) and (depends_on_previous or bool(result.differs_on_repeat))
    if result.variables:
        text = (
            f"the forward pass or the loss changes global variables: {_format_changes(result, result.variables)}"
            f"{_describe_consequence(result.differs_without_previous or result.differs_on_repeat)}; each process only "
            f"sees its own micro-batches, and "
            f"checkpoints do not contain them; make the result a function of the inputs"
        )
        yield CodeFinding(GLOBALS, changes_globals, text, tuple(result.variables))
    changed_state = result.attributes or result.accumulating_buffers or result.changed_weights or changes_globals
    explained = result.differs_on_repeat or result.generators or changed_state
    if depends_on_previous and not explained:
        text = (
            f"the model{result.location_of('model')} or the loss keeps state that is neither a tensor nor an "
            f"attribute of the "
            f"model nor a global variable{_describe_consequence(result.differs_without_previous)}; look for closures "
            f"and caches"
        )
        yield CodeFinding(HIDDEN_STATE, True, text)


def _format_changes(result: ProbeResult, changed: Mapping[str, str]) -> str:
    """Format each change with its source line, such as `forwards (0 -> 2, net.py:12)`."""
    descriptions = []
    for name, change in changed.items():
        location = result.source_lines.get(name)
        descriptions.append(f"{name} ({change}{f', {location}' if location else ''})")
    return list_some(descriptions)


def _describe_consequence(difference: str) -> str:
    if not difference:
        return " (the results of the tested micro-batches do not depend on it)"
    return f", and the {difference} of a micro-batch depends on whether another micro-batch was computed before it"


def _make_buffer_findings(result: ProbeResult) -> Iterator[CodeFinding]:
    spectral = [name for name, kind in result.changed_buffers.items() if kind == SPECTRAL_KIND]
    norms = [
        name for name, kind in result.changed_buffers.items() if is_norm_buffer(name, kind) and name not in spectral
    ]
    other_buffers = [name for name in result.changed_buffers if name not in (*norms, *spectral)]
    if spectral:
        text = (
            f"torch's spectral_norm{result.location_of('model')} updates its buffers in each forward pass in training: "
            f"{list_some(spectral)}; each process would update its own copy, once for each of its micro-batches; "
            f"compute the norm from the weight only (torch.linalg.matrix_norm(weight, 2)), or use torch's weight_norm"
        )
        yield CodeFinding(SPECTRAL_NORM, _is_accumulating(result, spectral), text, tuple(spectral))
    if norms:
        kinds = ", ".join(sorted({result.changed_buffers[name] for name in norms}))
        text = (
            f"{kinds}{result.location_of(*norms, 'model')} updates running statistics itself, not with torch's "
            f"BatchNorm: "
            f"{list_some(norms)}; each process would only keep statistics of its own micro-batches; derive it from "
            f"torch's BatchNorm and call its forward, whose statistics Lockstep updates once per step"
        )
        yield CodeFinding(CUSTOM_BATCHNORM, _is_accumulating(result, norms), text, tuple(norms))
    if other_buffers:
        located_names = [f"{name}{result.location_of(name)}" for name in other_buffers]
        text = (
            f"this model updates buffers outside BatchNorm: {list_some(located_names)}; each process would update them "
            f"with its own micro-batches only; update them outside the forward pass, or make them a function of the "
            f"inputs"
        )
        yield CodeFinding(BUFFERS, _is_accumulating(result, other_buffers), text, tuple(other_buffers))


def _is_accumulating(result: ProbeResult, names: Sequence[str]) -> bool:
    """Return whether any of these buffers depends on earlier micro-batches. For example, a cached table doesn't."""
    return any(name in result.accumulating_buffers for name in names)


def is_norm_buffer(buffer: str, kind: str) -> bool:
    """Return whether a buffer seems to belong to a normalization layer. `kind` is the class name of its module."""
    return "norm" in kind.lower() or buffer.rpartition(".")[2].startswith("running_")


def _make_evaluation_findings(result: ProbeResult) -> Iterator[CodeFinding]:
    if not result.differs_in_evaluation:
        return
    generators = [name for name in result.evaluation_reads if name in (PYTHON, NUMPY, TORCH)]
    clocks = [name for name in result.evaluation_reads if name in _CLOCKS]
    reasons = [f"forward draws from {name} random generator ({result.evaluation_reads[name]})" for name in generators]
    reasons += [f"forward reads {name} ({result.evaluation_reads[name]})" for name in clocks]
    because = " and ".join(reasons) or "forward keeps state"
    text = (
        f"in evaluation, the {result.differs_in_evaluation} of the model{result.location_of('model')} depend on "
        f"earlier batches: "
        f"{because}; make them a function of the inputs: check self.training, and pass training=self.training to "
        f"F.dropout"
    )
    yield CodeFinding(UNREPEATABLE_EVALUATION, True, text)


def _make_loss_findings(result: ProbeResult) -> Iterator[CodeFinding]:
    if result.loss is None or result.loss.num_samples < 2:
        return
    samples, joint_loss, summed_loss = result.loss
    if _is_close(joint_loss, summed_loss):
        return
    comparison = f"{samples} samples together give {joint_loss:.6g}, one by one they add up to {summed_loss:.6g}"
    measured = f"loss{result.location_of('loss')}: {comparison}"
    if _is_close(joint_loss * samples, summed_loss):
        text = (
            f"{measured}: this is already a mean, and is divided by the number of samples again; return the sum "
            f"(reduction='sum'), or one value for each sample (reduction='none')"
        )
        yield CodeFinding(MEAN_LOSS, True, text)
    elif not result.differs_on_repeat:  # otherwise, the loss differs in each call and can't be checked
        text = (
            f"{measured}: this is not a sum over samples, so the result depends on which samples share a micro-batch; "
            f"the recipe sets this, so it is the same on every placement, but microbatches=1 gives a different result"
        )
        yield CodeFinding(NO_SUM, False, text)


def _is_close(left: float, right: float) -> bool:
    return abs(left - right) <= _RELATIVE_TOLERANCE * max(abs(left), abs(right))
