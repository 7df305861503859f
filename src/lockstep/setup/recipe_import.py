"""Imports a recipe from a configuration file of another framework, for a given number of GPUs."""

from collections.abc import Sequence
from typing import Final

from lockstep.config.elsewhere.find import ImportedConfig, import_file

_PROCESSES: Final = "placement.processes="


def import_recipe(
    file: str, words: Sequence[str], gpus: int | None = None, world_size: int | None = None
) -> ImportedConfig:
    """Convert a configuration file of another framework to a recipe. See `import_file`.

    `gpus` defaults to `world_size` if it is set, then to `placement.processes` in `words`, and then to the number of
    GPUs in this machine, or 1 if there are none.
    """
    counts = [word.removeprefix(_PROCESSES) for word in words if word.startswith(_PROCESSES)]
    processes = int(counts[-1]) if counts and counts[-1].isdecimal() else 0
    return import_file(file, words, gpus or world_size or processes or _gpu_count())


def _gpu_count() -> int:
    import torch  # imported lazily, because the import takes seconds

    return max(1, torch.cuda.device_count())
