"""Implements `step.sum`, which adds up numbers over the micro-batches of a step and over all ranks.

The numbers are sent in the same float64 vector as the loss of the step, so integers are exact up to 2**53. The vector
always has MAX_SUMS entries for them, so that it has the same length on all ranks. The names are compared across ranks
together with the update settings, one step later and without extra communication.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, final

import torch
from torch import Tensor

from lockstep.comm.world import World
from lockstep.common.user_code import make_refusal

MAX_SUMS: Final = 16  # the maximum number of names per step
_NO_TOTALS: Final[Mapping[str, Tensor]] = MappingProxyType({})

__tracebackhide__ = True  # let pytest hide these frames, so that it shows the line of user code


@final
class StepSums:
    """The numbers of the current step, their names, and their totals over all ranks."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.names: tuple[str, ...] = ()
        self.totals: Mapping[str, Tensor] = _NO_TOTALS
        self._first_names: tuple[str, ...] | None = None  # the names in the first micro-batch of this iteration
        self._values: dict[str, Tensor | float] = {}

    def begin(self) -> None:
        """Reset the numbers. Call this method before each iteration over the micro-batches of a step."""
        self._first_names = None
        self._values = {}

    def add(self, step: int, values: Mapping[str, Tensor | float]) -> None:
        """Add numbers of the current micro-batch. Raises UsageError if a value isn't a number or a 0-dim tensor."""
        for name, value in values.items():
            if name in self._values:
                raise make_refusal(
                    f"step {step}: step.sum received {name} twice in one micro-batch",
                    "add the values and pass their sum once",
                )
            is_number = isinstance(value, int | float) or (isinstance(value, Tensor) and not value.is_complex())
            if not is_number or (isinstance(value, Tensor) and value.ndim):
                shape = f" of shape {list(value.shape)}" if isinstance(value, Tensor) else ""
                raise make_refusal(
                    f"step {step}: step.sum received {name} as a {type(value).__name__}{shape}",
                    "pass numbers or 0-dim tensors, such as correct=(outputs.argmax(1) == y).sum()",
                )
            self._values[name] = value.detach() if isinstance(value, Tensor) else value
        if len(self._values) > MAX_SUMS:
            raise make_refusal(
                f"step {step}: step.sum received {len(self._values)} names, but at most {MAX_SUMS} are supported",
                "pass fewer names",
            )

    def end_microbatch(self, step: int) -> Tensor | None:
        """Return the numbers of the micro-batch as a vector for the engine to reduce, or None if there are none."""
        values, self._values = self._values, {}
        names = tuple(sorted(values))
        first_names = self._first_names = names if self._first_names is None else self._first_names
        if names != first_names:
            raise make_refusal(
                f"step {step}: step.sum received {_format_names(names)} in a micro-batch, but "
                f"{_format_names(first_names)} in the first one",
                "pass the same names in each micro-batch of a step, with 0 if there is nothing to add",
            )
        if not names:
            return None
        vector = torch.zeros(MAX_SUMS, dtype=torch.float64, device=self._world.device)
        for index, name in enumerate(names):
            vector[index] = values[name]
        return vector

    def end(self, *, has_idle_ranks: bool) -> None:
        """Set `names` to the names that were passed in this iteration. All ranks must call this after the iteration.

        Set `has_idle_ranks` if some ranks have no micro-batch. These ranks receive the names from the other ranks.
        """
        self.names = self._first_names or ()
        if has_idle_ranks:
            self.names = next((tuple(names) for names in self._world.all_gather_json(self.names) if names), ())

    def store_totals(self, reduced_vector: Tensor | None) -> None:
        """Store the totals of the iteration over all ranks. `reduced_vector` is the sum of the vectors of all ranks."""
        if reduced_vector is None:
            self.totals = _NO_TOTALS
        else:
            self.totals = MappingProxyType({name: reduced_vector[index] for index, name in enumerate(self.names)})


def _format_names(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "nothing"
