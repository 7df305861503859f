"""Mixes several datasets, which are called sources. Each source contributes a fixed share of every epoch.

The source and the sample at an index only depend on (seed, epoch, index). Therefore, sources have no state to save, and
a run can resume in the middle of an epoch with any number of processes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from lockstep.common.type_name import describe_type
from lockstep.core import random
from lockstep.core.batch import Batch, leaves_with_paths, map_with_paths
from lockstep.core.shuffle import make_shuffled_order
from lockstep.data.base import DataSet, Split
from lockstep.data.options import Count, Text, build_options, find_option_errors
from lockstep.data.request import DataRequest
from lockstep.data.sources import open_data as open_source
from lockstep.errors import UsageError, convert_error


@dataclass(frozen=True)
class _Source:
    name: Text
    root: Text | None = None
    options: dict[str, Any] | None = None
    weight: Annotated[float, Field(gt=0, le=1e12, description="a number greater than 0 and at most 1e12")] = 1.0


@dataclass(frozen=True)
class Options:
    """The sources of a mixture and their weights.

    - `of`: A mapping from a name of your choice to each source. A source has `name`, `root` and `options` as in
      recipe.data, and a `weight`, which defaults to 1. A source provides the fraction weight / (sum of all weights) of
      the samples in an epoch.
    - `samples`: The number of samples in an epoch. Defaults to the total number of samples in all sources.
    """

    of: Annotated[dict[str, dict[str, Any]], Field(min_length=1, description="a mapping of names to datasets")]
    samples: Count | None = None


def open_data(request: DataRequest, options: Options) -> DataSet:
    """Open the sources and mix them. Raises UsageError if the sources differ in their properties or sample dtypes."""
    errors = [
        f"recipe.data.options.of.{label}{error.removeprefix('options')}"
        for label, settings in options.of.items()
        for error in find_option_errors(_Source, settings)
    ]
    if errors:
        raise UsageError("\n".join(f"dataset mixture: {error}" for error in errors))
    sources = {label: build_options(_Source, settings) for label, settings in options.of.items()}
    datasets = {label: _open_source(request, label, source) for label, source in sources.items()}
    _check_sources_match(
        {label: (dataset.facts, _get_leaf_dtypes(dataset.train)) for label, dataset in datasets.items()}
    )
    train_splits = [dataset.train for dataset in datasets.values()]
    weights = [source.weight for source in sources.values()]
    counts = split_by_weight(options.samples or sum(map(len, train_splits)), weights)
    if 0 in counts:
        label = [*datasets][counts.index(0)]
        raise UsageError(
            f"dataset mixture: {label} has no samples in an epoch of {sum(counts):,} samples; increase "
            f"recipe.data.options.of.{label}.weight or recipe.data.options.samples"
        )
    train = Mixture(train_splits, counts)
    validation_splits = [dataset.validation for dataset in datasets.values() if dataset.validation is not None]

    def describe_sample(number: int) -> str:
        return f"of {[*datasets][train.get_source_index(number)]}"

    return DataSet(
        train=train,
        validation=Mixture(validation_splits, [len(split) for split in validation_splits])
        if validation_splits
        else None,
        facts=next(iter(datasets.values())).facts,
        skipped=next((dataset.skipped for dataset in datasets.values() if dataset.skipped is not None), None),
        name=describe_sample,
        warnings=tuple(warning for dataset in datasets.values() for warning in dataset.warnings),
        question=next((dataset.question for dataset in datasets.values() if dataset.question), ""),
    )


def split_by_weight(num_samples: int, weights: Sequence[float]) -> list[int]:
    """Divide a number of samples in proportion to positive weights. Return integers, which sum to `num_samples`."""
    sums = [*accumulate(weights)]  # not sum(), which adds floats differently from Python 3.12 on
    ends = [round(num_samples * end / sums[-1]) for end in sums]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


@final
class Mixture:
    """A split that concatenates sources, with a fixed number of samples from each. The loader shuffles the samples.

    `sample_counts` contains the number of samples per epoch for each source. If a source has more samples, each
    training epoch selects random samples without replacement. If a source has fewer samples, each epoch repeats the
    full source as often as it fits, and selects the remaining samples at random. The selection depends only on
    `random_key`.
    """

    def __init__(self, sources: Sequence[Split], sample_counts: Sequence[int]) -> None:
        self.in_memory = all(source.in_memory for source in sources)
        self.sources = sources
        self._ends = np.cumsum(sample_counts)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def get_source_index(self, index: int) -> int:
        """Return the index of the source of a sample."""
        return int(np.searchsorted(self._ends, index, side="right"))

    def fetch(self, indices: NDArray[np.int64], random_key: int | None) -> Batch:
        """See Split."""
        batches, positions = zip(*self._fetch_sources(indices, random_key), strict=True)
        order = torch.from_numpy(np.argsort(np.concatenate(positions)))
        columns = [dict(leaves_with_paths(batch)) for batch in batches]
        problem = "dataset mixture: cannot combine samples of its sources in one batch"
        advice = "; use sources whose samples have the same structure and shapes"
        with convert_error(UsageError, (RuntimeError, KeyError, TypeError), problem, advice):
            return map_with_paths(lambda path, _: torch.cat([column[path] for column in columns])[order], batches[0])

    def _fetch_sources(
        self, indices: NDArray[np.int64], random_key: int | None
    ) -> Iterator[tuple[Batch, NDArray[np.int64]]]:
        """Yield the samples from each repetition of a source, with their positions in the batch."""
        numbers = np.searchsorted(self._ends, indices, side="right")
        offsets = indices - np.concatenate([[0], self._ends])[numbers]
        rounds = offsets // np.array([*map(len, self.sources)])[numbers]
        for number, round_number in sorted({*zip(numbers.tolist(), rounds.tolist(), strict=True)}):
            [positions] = np.nonzero((numbers == number) & (rounds == round_number))
            source = self.sources[number]
            rows = offsets[positions] - round_number * len(source)
            if random_key is None:
                yield source.fetch(rows, None), positions
                continue
            key = random.extend_key(random_key, number)
            yield (
                source.fetch(
                    make_shuffled_order(key, round_number, len(source))(rows), random.extend_key(key, round_number)
                ),
                positions,
            )


def iterate_sources(split: Split) -> Iterator[Split]:
    """Yield the sources of a mixture, including those of nested mixtures. Any other split is yielded as is."""
    if isinstance(split, Mixture):
        for source in split.sources:
            yield from iterate_sources(source)
    else:
        yield split


def _get_leaf_dtypes(split: Split) -> dict[str, str]:
    """Return the dtype of each tensor in a sample, or the type of any other value, by path."""
    leaves = leaves_with_paths(split.fetch(np.array([0]), None))
    return {path: str(leaf.dtype) if isinstance(leaf, torch.Tensor) else describe_type(leaf) for path, leaf in leaves}


def _check_sources_match(info_and_dtypes: Mapping[str, tuple[Mapping[str, Any], Mapping[str, str]]]) -> None:
    (first_label, (facts, dtypes)), *rest = info_and_dtypes.items()
    for label, (other_facts, other_dtypes) in rest:
        differences = sorted(key for key in {**facts, **other_facts} if facts.get(key) != other_facts.get(key))
        if not differences and dtypes != other_dtypes:
            differences = [f"the dtypes of a sample, {other_dtypes} and {dtypes}"]
        if differences:
            raise UsageError(
                f"dataset mixture: {label} and {first_label} differ in {', '.join(differences)}; convert one of them, "
                f"or remove it"
            )


def _open_source(request: DataRequest, label: str, source: _Source) -> DataSet:
    # Your own function doesn't inherit the location, because it may not have a parameter for it.
    inherited = DataRequest(source.name) if ":" in source.name else request
    root = inherited.root if source.root is None else source.root
    source_request = DataRequest(source.name, root, inherited.download, options=source.options or {})
    if source_request.changes_size:
        raise UsageError(
            f"dataset mixture: recipe.data.options.of.{label}: {source.name} is not supported, since a mixture does "
            f"not change the size of samples; combine the files in a single {source.name} dataset"
        )
    label_prefix = f"dataset mixture: recipe.data.options.of.{label}"
    with convert_error(UsageError, UsageError, label_prefix):
        dataset = open_source(source_request)
    if not len(dataset.train):
        raise UsageError(f"{label_prefix}: has no training samples; remove it")
    return dataset
