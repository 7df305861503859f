"""Traces of training steps: digests of all tensors, in order of computation, to compare two machines.

`lockstep replay RUN --step N --trace FILE` writes a trace. `lockstep bisect` finds the first tensor that differs
between two traces.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from torch import Tensor

from lockstep.common import plainfile
from lockstep.core.digest import Digests
from lockstep.device.machine import describe_fingerprint_differences
from lockstep.errors import UsageError

_MAX_TRACE_BYTES: Final = 1 << 30  # maximum size of a trace file to read
_ShortText = Annotated[str, Field(max_length=1000)]


class TracedTensor(NamedTuple):
    """A traced tensor: the phase of the step, module, name, dtype and shape (in `kind`), digest and L2 norm.

    The norm is stored as text, because it may be infinite or NaN.
    """

    phase: _ShortText
    module: _ShortText
    name: _ShortText
    kind: _ShortText
    digest: _ShortText
    norm: _ShortText

    def __str__(self) -> str:
        within = f" in {self.module}" if self.module else ""
        return f"{self.phase}: {self.name}{within}, {self.kind}"


class TraceHeader(BaseModel):
    """The first line of a trace file: the step, the settings that affect its results, and the earlier replayed steps.

    `sources` maps the names of the user's source files to their hashes. `steps` maps the number of each replayed step
    to its gradient digest.
    """

    model_config = ConfigDict(extra="forbid")

    step: int
    numerics: Mapping[str, str | int | None]
    sources: Mapping[str, str]
    steps: dict[int, str] = {}


@dataclass
class Trace:
    """The tensors of a step, in the order in which they were computed."""

    header: TraceHeader
    tensors: list[TracedTensor] = field(default_factory=list)
    _digests: Digests = field(default_factory=Digests)

    def add(self, phase: str, module: str, name: str, tensor: Tensor) -> None:
        """Add a tensor with its current value."""
        tensor = tensor.detach()
        norm = float(torch.linalg.vector_norm(tensor.double()))
        kind = f"{tensor.dtype} {[*tensor.shape]}".removeprefix("torch.")
        self.tensors.append(
            TracedTensor(phase, module, name, kind, f"{int(self._digests.compute_digest(tensor)):x}", f"{norm:.9g}")
        )

    def to_text(self) -> str:
        """Return the content of the trace file in JSON Lines format."""
        return "".join(f"{line}\n" for line in (self.header.model_dump_json(), *map(json.dumps, self.tensors)))


def read_trace(path: Path) -> tuple[TraceHeader, list[TracedTensor]]:
    """Read a trace file. Raises UsageError if it can't be read or isn't a trace."""
    try:
        first, *lines = plainfile.read_bytes(path, _MAX_TRACE_BYTES).decode().splitlines()
        tensors = f"[{','.join(lines)}]"
        return TraceHeader.model_validate_json(first), TypeAdapter(list[TracedTensor]).validate_json(tensors)
    except OSError as error:
        raise UsageError(f"{path}: cannot read: {error.strerror}") from error
    except (ValidationError, UnicodeError, ValueError) as error:
        raise UsageError(f"{path}: not a trace; write one with `lockstep replay RUN --step N --trace FILE`") from error


def compare_traces(left: Path, right: Path) -> tuple[bool, list[str]]:
    """Return whether two traces are equal, and report lines. Raises UsageError if they are of different steps."""
    (head, tensors), (right_head, right_tensors) = read_trace(left), read_trace(right)
    if head.step != right_head.step:
        raise UsageError(
            f"{left} traces step {head.step}, but {right} traces step {right_head.step}; trace the same step"
        )
    differences = [*_compare_earlier_steps(head, right_head), *_compare_tensors(tensors, right_tensors)]
    report = differences or [f"all {len(tensors):,} tensors have the same bits"]
    return not differences, [
        f"step {head.step}  {left} before, {right} now",
        *_compare_machines(head, right_head),
        *report,
    ]


def _compare_machines(header: TraceHeader, other_header: TraceHeader) -> Iterator[str]:
    yield from describe_fingerprint_differences(header.numerics, other_header.numerics)
    names = sorted({*header.sources, *other_header.sources})
    yield from (
        f"{name}: different file" for name in names if header.sources.get(name) != other_header.sources.get(name)
    )


def _compare_earlier_steps(header: TraceHeader, other_header: TraceHeader) -> Iterator[str]:
    steps = (step for step in sorted({*header.steps} & {*other_header.steps}) if step < header.step)
    first_step = next((step for step in steps if header.steps[step] != other_header.steps[step]), None)
    if first_step is not None:
        yield f"step {first_step} already differs; trace step {first_step}"


def _compare_tensors(before: Sequence[TracedTensor], after: Sequence[TracedTensor]) -> Iterator[str]:
    """Yield lines about the first tensor that is missing from either trace, and the first tensor that differs."""
    after_tensors = dict(_iterate_with_keys(after))
    before_tensors = dict(_iterate_with_keys(before))
    for side, tensors, opposite in (("before", before_tensors, after_tensors), ("now", after_tensors, before_tensors)):
        if unmatched := next((tensor for key, tensor in tensors.items() if key not in opposite), None):
            yield f"only {side}: {unmatched}, and {len(tensors.keys() - opposite.keys()) - 1:,} more"
    pairs = [(tensor, after_tensors[key]) for key, tensor in before_tensors.items() if key in after_tensors]
    is_equal = [before_tensor.digest == after_tensor.digest for before_tensor, after_tensor in pairs]
    if not all(is_equal):
        first = is_equal.index(False)
        yield f"first difference, after {first:,} tensors that agree: {pairs[first][0]}"
        yield f"  norm {pairs[first][0].norm} before, {pairs[first][1].norm} now"
        yield f"{is_equal.count(False):,} of {len(pairs):,} tensors differ"


def _iterate_with_keys(tensors: Sequence[TracedTensor]) -> Iterator[tuple[tuple[str, int], TracedTensor]]:
    """Yield (key, tensor) pairs. A key is the tensor's description and the number of earlier tensors that share it."""
    count: Counter[str] = Counter()
    for tensor in tensors:
        yield (str(tensor), count[str(tensor)]), tensor
        count[str(tensor)] += 1
