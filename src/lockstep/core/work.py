"""Whether each process has a micro-batch of its own, and others to share with.

It imports nothing heavy: a recipe is checked before torch is imported.
"""

from lockstep.errors import UsageError


def check_work(processes: int, microbatches: int) -> None:
    """Raise UsageError where some process would never have a micro-batch of its own."""
    if processes > microbatches:
        raise UsageError(
            f"placement.processes: {too_few(processes, microbatches)}; where it has recipe.microbatch, a batch of "
            f"{processes} times that will do too"
        )


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
    """Say that there are fewer micro-batches than processes, and what more of them would change.

    Where the recipe says how many samples a micro-batch has, a larger batch has more of them.
    """
    if microbatch is not None:
        return (
            f"{processes} processes but only {microbatches} micro-batches; use at most {microbatches} processes, or "
            f"set recipe.batch={processes * microbatch}, which is another recipe: other bits"
        )
    return (
        f"{processes} processes but only {microbatches} micro-batches; use at most {microbatches} processes, or set "
        f"recipe.microbatches={processes}, which is another recipe: other bits, and BatchNorm over fewer samples"
    )
