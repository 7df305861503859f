"""Splits a Hugging Face IterableDataset into its shards, and the stages that are applied to one row at a time."""

import copy
import inspect
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from lockstep.errors import UsageError

TABLES: Final = "ArrowExamplesIterable"
_SOURCES: Final = frozenset({TABLES, "ExamplesIterable"})
_CONCATENATION: Final = "VerticallyConcatenatedMultiSourcesExamplesIterable"
_FILTER: Final = "FilteredExamplesIterable"
_FUNCTIONS: Final = frozenset({"MappedExamplesIterable", _FILTER})
_WINDOWS: Final = frozenset({"SkipExamplesIterable", "TakeExamplesIterable"})
_PER_ROW: Final = _FUNCTIONS | {
    *("RebatchedArrowExamplesIterable", "SelectColumnsIterable", "FormattedExamplesIterable"),
    "TypedExamplesIterable",  # in earlier versions of datasets
}
_SHUFFLE: Final = ("shuffle", "remove it: the order= of the run shuffles all samples by default")
_INTERLEAVE: Final = (
    "interleave_datasets",
    "use concatenate_datasets, and draw samples with order=lockstep.orders.Weighted(...), or use a recipe with "
    "recipe.data.name=mixture",
)
_REFUSED: Final[Mapping[str, tuple[str, str]]] = {
    "BufferShuffledExamplesIterable": _SHUFFLE,
    "InterleavedShardsExamplesIterable": _SHUFFLE,
    "ShuffledDataSourcesExamplesIterable": _SHUFFLE,
    "ShuffledDataSourcesArrowExamplesIterable": _SHUFFLE,
    "CyclingMultiSourcesExamplesIterable": _INTERLEAVE,
    "RandomlyCyclingMultiSourcesExamplesIterable": _INTERLEAVE,
    "HorizontallyConcatenatedMultiSourcesExamplesIterable": (
        "concatenate_datasets(axis=1)",
        "join the columns beforehand, or in map",
    ),
    "RepeatExamplesIterable": ("repeat", "remove it, and set epochs= or steps="),
    "StepExamplesIterable": ("a step over samples", "pass the whole dataset: Lockstep distributes the samples"),
}
_BATCH_FUNCTIONS: Final = frozenset({"batch_fn", "batch_arrow_table", "batch_accumulate_arrow_table_by_columns"})


@dataclass(frozen=True)
class SourceShard:
    """A shard: its source, the arguments with which the source generates its rows, and the stages to apply to a row."""

    source: Any
    arguments: Mapping[str, Any]
    stages: Sequence[Any]

    @property
    def has_tables(self) -> bool:
        """Whether the source returns tables. Otherwise, it returns a dict for each row."""
        return type(self.source).__name__ == TABLES

    @property
    def generate(self) -> Any:
        """The function that returns an iterator over the tables or rows of a shard."""
        return self.source.generate_tables_fn if self.has_tables else self.source.generate_examples_fn

    @property
    def table(self) -> Any:
        """The `datasets.Dataset` in memory or on disk that the shard consists of, or None."""
        match self.arguments.get("shards"):
            case [dataset] if type(dataset).__name__ == "Dataset":
                return dataset
        return None

    @property
    def files(self) -> list[str]:
        """The files of the shard, or an empty list for a shard that a user function generates."""
        if self.table is not None:
            return [entry["filename"] for entry in self.table.cache_files]
        return [*dict.fromkeys(path for value in self.arguments.values() for path in _iterate_paths(value))]

    @property
    def filters(self) -> Sequence[Any]:
        """The stages up to and including the last filter."""
        ends = [number for number, stage in enumerate(self.stages, 1) if type(stage).__name__ == _FILTER]
        return self.stages[: max(ends, default=0)]


def split_windows(label: str, node: Any) -> tuple[list[Any], Any]:
    """Remove the `skip` and `take` stages from a dataset. Return them, the innermost first, and the new outermost node.

    A `skip` or `take` stage counts the rows that the stages before it return. Raises UsageError if a later stage is a
    filter, which would change the number of rows.
    """
    windows: list[Any] = []
    stages: list[Any] = []
    while (kind := type(node).__name__) in _PER_ROW | _WINDOWS:
        if kind in _WINDOWS:
            if any(type(stage).__name__ == _FILTER for stage in stages):
                method = kind[:4].lower()
                raise UsageError(f"{label}: filter after {method} isn't supported; call filter before {method}")
            windows.append(node)
        else:
            stages.append(node)
        node = node.ex_iterable
    for stage in reversed(stages):
        node = replace_input(stage, node)
    return windows[::-1], node


def split_shards(label: str, node: Any) -> list[SourceShard]:
    """Return the shards of a node in order. Raises UsageError if a stage can't be applied to one row at a time."""
    kind = type(node).__name__
    if kind in _SOURCES:
        sharding = sys.modules["datasets.utils.sharding"]
        count = sharding._number_of_shards_in_gen_kwargs(node.kwargs)
        return [SourceShard(node, arguments, ()) for arguments in sharding._split_gen_kwargs(node.kwargs, count)]
    if kind == _CONCATENATION:
        return [shard for inner in node.ex_iterables for shard in split_shards(label, inner)]
    if kind in _PER_ROW:
        _check_stage_function(label, node)
        shards = split_shards(label, node.ex_iterable)
        return [SourceShard(shard.source, shard.arguments, (*shard.stages, node)) for shard in shards]
    if kind in _WINDOWS:
        raise UsageError(
            f"{label}: {kind[:4].lower()} before concatenate_datasets isn't supported; select rows with order=, or "
            f"write them to a file"
        )
    method, advice = _REFUSED.get(kind, (kind, "use map, filter, select_columns, skip and take only"))
    raise UsageError(f"{label}: {method} can't be applied to one row at a time; {advice}")


def replace_input(stage: Any, node: Any) -> Any:
    """Return a copy of a stage that reads from `node`."""
    result = copy.copy(stage)
    result.ex_iterable = node
    return result


def is_one_to_one(stages: Sequence[Any]) -> bool:
    """Return whether the stages return at most one sample per row."""
    return not any(type(stage).__name__ in _FUNCTIONS and stage.batched for stage in stages)


def _check_stage_function(label: str, stage: Any) -> None:
    if type(stage).__name__ not in _FUNCTIONS:
        return
    method = "filter" if type(stage).__name__ == _FILTER else "map"
    function = stage.function
    while isinstance(function, partial):
        function = function.func
    name = getattr(function, "__name__", "").strip("_")
    problem, advice = "", ""
    if name in _BATCH_FUNCTIONS:
        problem, advice = "batch", "remove it, and set the batch of the run"
    elif stage.batched and stage.batch_size != 1:
        problem = f"{method}(batched=True, batch_size={stage.batch_size})"
        advice = "set batch_size=1 if the function processes rows independently, or use collate="
    elif stage.with_indices:
        problem, advice = f"{method}(with_indices=True)", "store the index in a column"
    elif inspect.iscoroutinefunction(function) or name == "async_add_mask":
        problem, advice = f"{method} with an async function", "pass a function without async"
    if problem:
        raise UsageError(f"{label}: {problem} can't be applied to one row at a time; {advice}")


def _iterate_paths(value: Any) -> Iterator[str]:
    """Yield the files in the arguments of a shard."""
    if isinstance(value, str):
        if "://" in value or os.path.isfile(value):
            yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _iterate_paths(item)
