"""The number of micro-batches in a step, and checks of the number of processes.

This module has no heavy imports, because recipes are checked before torch is imported.
"""

from typing import Final

from lockstep.common.text import format_count
from lockstep.errors import UsageError

# The default micro-batch size. A batch of 32 is a single micro-batch, and trains as in a plain PyTorch loop. A batch of
# 256 has eight micro-batches, for up to eight processes. The default is the same on all machines, so that the results
# don't depend on the machine.
MICROBATCH: Final = 32
_LEGACY_MICROBATCHES: Final = 8  # the default number of micro-batches before MICROBATCH existed


def check_microbatches(num_processes: int, num_microbatches: int) -> None:
    """Raise UsageError if there are fewer micro-batches than processes."""
    if num_processes > num_microbatches:
        raise UsageError(f"placement.processes: {describe_too_few(num_processes, num_microbatches)}")


def check_divides(key: str, divisor: int, num_processes: int) -> None:
    """Raise UsageError if `divisor` doesn't divide the number of processes. The message begins with `key`."""
    if num_processes % divisor:
        valid_counts = ", ".join(map(str, find_divisors(num_processes)))
        raise UsageError(f"{key} does not divide {num_processes} processes; use {valid_counts}")


def find_divisors(number: int) -> list[int]:
    """Return the divisors of a number in ascending order."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def check_multiple_processes(num_processes: int, strategy: str) -> None:
    """Raise UsageError if a strategy that shards the model would run in a single process."""
    if num_processes == 1:
        raise UsageError(
            f"strategy {strategy}: requires at least 2 processes, got 1; use 2 or more, or strategy single"
        )


def describe_too_few(num_processes: int, num_microbatches: int, microbatch: int | None = None) -> str:
    """Return the message for a step with fewer micro-batches than processes. It suggests a key to change.

    If the recipe sets `microbatch`, the message suggests a larger batch instead of more micro-batches.
    """
    count, limit = format_count(num_microbatches, "micro-batch"), format_count(num_microbatches, "process")
    text = f"{num_processes} processes but only {count}; use at most {limit}, or set"
    if microbatch is not None:
        return f"{text} recipe.batch={num_processes * microbatch}, which changes the results: it is a different recipe"
    return (
        f"{text} recipe.microbatches={num_processes}, which changes the bits: sums are added in a different order, and "
        f"BatchNorm layers normalize over fewer samples"
    )


def compute_default_microbatches(batch: int, microbatch: int | None = None) -> int:
    """Return the smallest number of micro-batches that each have at most `microbatch` samples, by default 32."""
    return -(-batch // (microbatch or MICROBATCH))


def compute_legacy_microbatches(batch: int) -> int:
    """Return the default number of micro-batches of earlier versions, to resume the runs that used it."""
    return min(_LEGACY_MICROBATCHES, batch)
