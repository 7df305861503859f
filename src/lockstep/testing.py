"""Tests whether the results of training code depend on the number of ranks. The code doesn't need to use Lockstep.

The code runs in separate processes, once for each number of ranks, and reports its values to a trace. The first run is
the reference for the other runs. Within a step, values are compared in the order in which they are computed.
"""

import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Final, final

import torch
from torch import Tensor, nn

from lockstep.comm.fsdp import to_full_tensor
from lockstep.comm.world import choose_device, open_single_rank_group, open_world
from lockstep.common.patterns import list_some
from lockstep.config.placement import Placement
from lockstep.errors import EXIT_DONE, UsageError, VerificationError
from lockstep.ranks.rendezvous import Rendezvous
from lockstep.run.start import preload_modules, run_in_workers
from lockstep.verification.compare import ValuePair, find_largest_difference

ORDER: Final = "order"
RANDOM: Final = "random numbers"
SCALE: Final = "loss scale"
GRADIENT: Final = "gradient sum"
NORM: Final = "gradient norm"
WEIGHTS: Final = "weights"
EVALUATION: Final = "evaluation"

# Smaller relative differences may be rounding errors caused by a different order of additions.
_ROUNDING: Final = 1e-4
_LIMIT: Final = 6  # maximum number of names to list in a message


@final
@dataclass
class Trace:
    """The values that a rank reports. `assert_placement_invariant` passes a trace to your function on each rank.

    A step ends when you call `weights`, which every rank must call once per step.
    """

    _steps: list[dict[str, dict[str, Tensor]]] = field(default_factory=lambda: [{}], init=False)

    def samples(self, indices: Sequence[int] | Tensor, outputs: Tensor | None = None) -> None:
        """Report the indices of the samples that this rank trains on.

        `outputs` are the outputs of the model for these samples, along dim 0.
        """
        for index, sample in enumerate(torch.as_tensor(indices).tolist()):
            row, name = torch.zeros(()) if outputs is None else outputs[index], f"sample {sample}"
            while name in self._steps[-1].get(ORDER, {}):
                name += " again"
            self._add(ORDER, name, row)

    def gradients(self, model: nn.Module, norm: float | Tensor | None = None) -> None:
        """Report the gradients that the optimizer receives. All ranks must call this method.

        `norm` is the gradient norm that your code uses for clipping.
        """
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                self._add(GRADIENT, name, parameter.grad)
        if norm is not None:
            self._add(NORM, "norm", _to_tensor(norm))

    def weights(self, model: nn.Module) -> None:
        """Report the weights after an update, and end the step. All ranks must call this method."""
        for name, parameter in model.named_parameters():
            self._add(WEIGHTS, name, parameter)
        self._steps.append({})

    def metric(self, name: str, value: float | Tensor) -> None:
        """Report a metric as your code would log it, such as a mean loss.

        If you call this method after `weights`, the metric belongs to the step that has just ended.
        """
        step_has_ended = len(self._steps) > 1 and not self._steps[-1]
        self._add(EVALUATION, name, _to_tensor(value), step=-2 if step_has_ended else -1)

    def _add(self, kind: str, name: str, value: Tensor, step: int = -1) -> None:
        self._steps[step].setdefault(kind, {})[name] = to_full_tensor(value.detach()).cpu().clone()


def _to_tensor(value: float | Tensor) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


Function = Callable[[Trace], object]
Ranks = list[list[dict[str, dict[str, Tensor]]]]  # reported values, indexed by rank, step, kind (e.g. WEIGHTS) and name


def assert_placement_invariant(function: Function, worlds: Sequence[int] = (1, 2, 3), tolerance: float = 0.0) -> None:
    """Assert that training code has the same results for each world size in `worlds`.

    `function` must train a few steps and report values to the Trace that it receives. It is called on each rank, after
    the process group is initialized (gloo on the CPU). The run with the first world size is the reference.

    For each step, the values are compared in this order. Unreported values are skipped:

    - "order": The samples of a step, over all ranks.
    - "random numbers": The outputs for each sample. They can also differ because BatchNorm gets different batches.
    - "loss scale": A gradient that is a multiple of the expected gradient.
    - "gradient sum": The gradient of each parameter.
    - "gradient norm": The reported norm.
    - "weights": The weights after the update.
    - "evaluation": The reported metrics.

    By default, values must be equal. If you set `tolerance`, they may differ by `tolerance` times the largest magnitude
    in their tensor.

    Raises AssertionError if a run differs from the reference. For each world size, the message gives the first
    difference, with its step and both values. Raises UsageError if nothing is reported, and VerificationError
    if `function` fails.
    """
    if len(worlds) < 2 or min(worlds) < 1:
        raise UsageError(f"worlds: got {tuple(worlds)}; pass two or more numbers of ranks, each at least 1")
    preload_modules()
    with tempfile.TemporaryDirectory(prefix="lockstep-testing-") as folder:
        reference, *others = (
            _run_ranks(function, size, Path(folder) / str(index)) for index, size in enumerate(worlds)
        )
    differences = [
        f"{size} rank{'s' * (size > 1)} against {worlds[0]}: {difference}"
        for size, ranks in zip(worlds[1:], others, strict=True)
        if (difference := next(_find_differences(reference, ranks, tolerance), ""))
    ]
    if differences:
        raise AssertionError("\n".join(differences))


def _run_ranks(function: Function, size: int, folder: Path) -> Ranks:
    """Run the function on `size` ranks, and return the values that each rank reported to its trace."""
    folder.mkdir()
    code, text = run_in_workers(partial(_run_worker, function, folder), None, Placement(), size)
    if code != EXIT_DONE:
        raise VerificationError(f"on {size} rank{'s' * (size > 1)}: {text.partition('error: ')[2] or text}")
    # torch.load is safe here: the files come from the processes above, in a folder that only this user can access.
    ranks: Ranks = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(size)]  # noqa: TID251
    if not any(ranks[0]):
        raise UsageError("the function reported no values; call methods of its trace, such as trace.weights(model)")
    return ranks


def _run_worker(function: Function, folder: Path, _ready: None, rendezvous: Rendezvous) -> int:
    """Run the function on this rank, and save the values that it reported."""
    world = open_world(rendezvous, choose_device("auto", rendezvous.info))
    if world.size == 1:
        open_single_rank_group(world)
    trace = Trace()
    function(trace)
    torch.save([step for step in trace._steps if step], folder / f"{world.rank}.pt")
    return EXIT_DONE


def _find_differences(reference: Ranks, ranks: Ranks, tolerance: float) -> Iterator[str]:
    """Yield a description of each difference, in the order in which the values are computed."""
    for step, steps in enumerate(zip_longest(*reference, *ranks, fillvalue={}), 1):
        expected, actual = steps[: len(reference)], steps[len(reference) :]
        expected_samples, actual_samples = (
            sorted(name for rank_values in side for name in rank_values.get(ORDER, {})) for side in (expected, actual)
        )
        if expected_samples != actual_samples:
            missing, unexpected = (
                [*(Counter(left) - Counter(right))]
                for left, right in ((expected_samples, actual_samples), (actual_samples, expected_samples))
            )
            difference = f"{list_some(unexpected, _LIMIT) or 'none'} instead of {list_some(missing, _LIMIT) or 'none'}"
            yield f"step {step}, {ORDER}: {difference}"
        outputs: dict[str, Tensor] = {}
        for rank_values in expected:
            outputs |= rank_values.get(ORDER, {})
        for rank, rank_values in enumerate(actual):
            if difference := _find_first_difference(outputs, rank_values.get(ORDER, {}), tolerance, partial=True):
                yield f"step {step}, {RANDOM} (or BatchNorm): rank {rank}, {difference}"
        for kind in (GRADIENT, NORM, WEIGHTS, EVALUATION):
            for rank, rank_values in enumerate(actual):
                sides, norms = (
                    (expected[0].get(compared_kind, {}), rank_values.get(compared_kind, {}))
                    for compared_kind in (kind, NORM)
                )
                if difference := _find_first_difference(*sides, tolerance):
                    multiple = _make_multiple_note(*sides) if kind == GRADIENT else ""
                    # After clipping, gradients with a different loss scale are equal up to rounding. In this case, only
                    # their norm shows the loss scale.
                    if (
                        kind == GRADIENT
                        and not _find_first_difference(*sides, _ROUNDING)
                        and (norm_difference := _find_first_difference(*norms, _ROUNDING))
                    ):
                        difference, multiple = norm_difference, _make_multiple_note(*norms)
                    yield f"step {step}, {SCALE if multiple else kind}: rank {rank}, {difference}{multiple}"


def _find_first_difference(
    expected: Mapping[str, Tensor], actual: Mapping[str, Tensor], tolerance: float, partial: bool = False
) -> str:
    """Return a description of the first value that differs, or "" if all values are equal.

    With `partial`, missing values in `actual` are ignored, because other ranks may have reported them.
    """
    if not partial and expected.keys() != actual.keys():
        return f"{list_some([*actual], _LIMIT) or 'nothing'} instead of {list_some([*expected], _LIMIT) or 'nothing'}"
    for name in (name for name in actual if name in expected):
        values = find_largest_difference(expected[name], actual[name])
        if values is not None and (values.distance is None or values.distance > tolerance * values.scale):
            index = f" at {list(values.index)}" if values.index else ""
            return f"{name}{index} is {values.actual}, not {values.reference}{_make_rounding_note(values)}"
    return ""


def _make_rounding_note(values: ValuePair) -> str:
    """Return a note if the difference is small enough to be a rounding error, or else an empty string."""
    if values.distance is None or not 0 < values.distance < _ROUNDING * values.scale:
        return ""
    relative = values.distance / values.scale
    return f" ({relative:.1e} of the largest value, which may be rounding: pass tolerance= to allow it)"


def _make_multiple_note(expected: Mapping[str, Tensor], actual: Mapping[str, Tensor]) -> str:
    """Return a note if the whole gradient is a multiple of the expected gradient, or else an empty string.

    If the factor is 1 up to rounding, there is no note.
    """
    if [tensor.shape for tensor in expected.values()] != [tensor.shape for tensor in actual.values()]:
        return ""
    left, right = (torch.cat([tensor.double().flatten() for tensor in side.values()]) for side in (expected, actual))
    factor = float(left @ right / (left @ left)) if left.any() else math.nan
    is_multiple = float((right - factor * left).norm()) < _ROUNDING * float(right.norm())
    if not is_multiple or abs(factor - 1) <= _ROUNDING:
        return ""
    return f"; the whole gradient is {factor:.6g} times the expected gradient"
