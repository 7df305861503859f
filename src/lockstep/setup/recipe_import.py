"""Imports a recipe from a configuration file of another framework, for a given number of GPUs."""

from collections.abc import Sequence
from typing import Final

from lockstep.config.elsewhere.find import ImportedConfig, import_file

_PROCESSES: Final = "placement.processes="


def import_recipe(
    config_path: str, overrides: Sequence[str], num_gpus: int | None = None, world_size: int | None = None
) -> ImportedConfig:
    """Convert a configuration file of another framework to a recipe. See `import_file`.

    `num_gpus` defaults to `world_size` if it is set, then to `placement.processes` in `overrides`, and then to the
    number of GPUs in this machine, or 1 if there are none.
    """
    counts = [word.removeprefix(_PROCESSES) for word in overrides if word.startswith(_PROCESSES)]
    processes = int(counts[-1]) if counts and counts[-1].isdecimal() else 0
    return import_file(config_path, overrides, num_gpus or world_size or processes or _count_gpus())


def _count_gpus() -> int:
    import torch  # imported lazily, because the import takes seconds

    return max(1, torch.cuda.device_count())
