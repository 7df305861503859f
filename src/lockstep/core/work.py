"""How many micro-batches a step has, and whether each process has one of its own, and others to share with.

It imports nothing heavy: a recipe is checked before torch is imported.
"""

from typing import Final

from lockstep.errors import UsageError

# The default size of a micro-batch. With it, a batch of 32 is one micro-batch and trains like a plain loop, and a batch
# of 256 has eight that as many processes can share. It is the same on every machine, so no machine decides the numbers.
MICROBATCH: Final = 32
_EARLIER: Final = 8  # micro-batches of a recipe that gave neither their number nor their size, before that default


def check_work(processes: int, microbatches: int) -> None:
    """Raise UsageError where some process would never have a micro-batch of its own."""
    if processes > microbatches:
        raise UsageError(f"placement.processes: {too_few(processes, microbatches)}")


def check_divides(key: str, number: int, processes: int) -> None:
    """Raise UsageError, which begins with `key`, where such a number does not divide the processes."""
    if processes % number:
        fitting = ", ".join(map(str, divisors(processes)))
        raise UsageError(f"{key} does not divide {processes} processes; use {fitting}")


def divisors(number: int) -> list[int]:
    """Return what divides a number, from 1 on."""
    return [each for each in range(1, number + 1) if number % each == 0]


def check_several(processes: int, strategy: str) -> None:
    """Raise UsageError for one process under a strategy that shares the model out."""
    if processes == 1:
        raise UsageError(
            f"strategy {strategy}: one process has nobody to share with; use 2 or more, or strategy single"
        )


def too_few(processes: int, microbatches: int, microbatch: int | None = None) -> str:
    """Describe a step with fewer micro-batches than processes, and the key to set.

    If the recipe gives the size of a micro-batch, a larger batch has more of them.
    """
    parts, most = ("micro-batch", "process") if microbatches == 1 else ("micro-batches", "processes")
    found = f"{processes} processes but only {microbatches} {parts}; use at most {microbatches} {most}, or set"
    if microbatch is not None:
        return f"{found} recipe.batch={processes * microbatch}, which changes the numbers: it is another recipe"
    return (
        f"{found} recipe.microbatches={processes}, which changes the numbers: BatchNorm normalises over fewer samples, "
        f"and sums are added in another order"
    )


def default_microbatches(batch: int, microbatch: int | None = None) -> int:
    """Return the number of micro-batches of a batch if none has more than `microbatch` samples, by default 32."""
    return -(-batch // (microbatch or MICROBATCH))


def earlier_microbatches(batch: int) -> int:
    """Return the number of micro-batches that was the default of earlier versions, for runs that began with it."""
    return min(_EARLIER, batch)
