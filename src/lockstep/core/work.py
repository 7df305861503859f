"""The number of micro-batches in a step, and checks of the number of processes.

This module has no heavy imports, because recipes are checked before torch is imported.
"""

from typing import Final

from lockstep.errors import UsageError

# The default micro-batch size. A batch of 32 is a single micro-batch, and trains as in a plain PyTorch loop. A batch of
# 256 has eight micro-batches, for up to eight processes. The default is the same on all machines, so that the results
# don't depend on the machine.
MICROBATCH: Final = 32
_LEGACY_MICROBATCHES: Final = 8  # the default number of micro-batches before MICROBATCH existed


def check_microbatches(processes: int, microbatches: int) -> None:
    """Raise UsageError if there are fewer micro-batches than processes."""
    if processes > microbatches:
        raise UsageError(f"placement.processes: {describe_too_few(processes, microbatches)}")


def check_divides(key: str, number: int, processes: int) -> None:
    """Raise UsageError if `number` doesn't divide the number of processes. The message begins with `key`."""
    if processes % number:
        valid_counts = ", ".join(map(str, divisors(processes)))
        raise UsageError(f"{key} does not divide {processes} processes; use {valid_counts}")


def divisors(number: int) -> list[int]:
    """Return the divisors of a number in ascending order."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def check_multiple_processes(processes: int, strategy: str) -> None:
    """Raise UsageError if a strategy that shards the model would run in a single process."""
    if processes == 1:
        raise UsageError(
            f"strategy {strategy}: requires at least 2 processes, got 1; use 2 or more, or strategy single"
        )


def describe_too_few(processes: int, microbatches: int, microbatch: int | None = None) -> str:
    """Return the message for a step with fewer micro-batches than processes. It suggests a key to change.

    If the recipe sets `microbatch`, the message suggests a larger batch instead of more micro-batches.
    """
    noun, limit_noun = ("micro-batch", "process") if microbatches == 1 else ("micro-batches", "processes")
    text = f"{processes} processes but only {microbatches} {noun}; use at most {microbatches} {limit_noun}, or set"
    if microbatch is not None:
        return f"{text} recipe.batch={processes * microbatch}, which changes the results: it is a different recipe"
    return (
        f"{text} recipe.microbatches={processes}, which changes the bits: sums are added in a different order, and "
        f"BatchNorm layers normalize over fewer samples"
    )


def default_microbatches(batch: int, microbatch: int | None = None) -> int:
    """Return the smallest number of micro-batches with at most `microbatch` samples, which defaults to 32."""
    return -(-batch // (microbatch or MICROBATCH))


def legacy_default_microbatches(batch: int) -> int:
    """Return the default number of micro-batches of earlier versions, to resume the runs that used it."""
    return min(_LEGACY_MICROBATCHES, batch)
