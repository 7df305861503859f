"""Several datasets as one, each with a share of every epoch.

As everything else in a step, the source and the sample of an index are a function of (seed, epoch, index) only.
Therefore no source keeps a position, and a run can resume in the middle of an epoch with any number of processes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from lockstep.common.type_name import type_name
from lockstep.core import random
from lockstep.core.batch import Batch, map_with_paths, with_paths
from lockstep.core.shuffle import shuffle
from lockstep.data.base import DataSet, Split
from lockstep.data.options import Count, Text, build_options, option_errors
from lockstep.data.request import DataRequest
from lockstep.data.sources import open_data as open_source
from lockstep.errors import UsageError, error_as


@dataclass(frozen=True)
class _Source:
    name: Text
    root: Text | None = None
    options: dict[str, Any] | None = None
    weight: Annotated[float, Field(gt=0, le=1e12, description="a number greater than 0 and at most 1e12")] = 1.0


@dataclass(frozen=True)
class Options:
    """The sources of a mixture and their weights.

    - `of`: The sources under names of your choice, each with `name`, `root` and `options` as in recipe.data, and a
      `weight`, which defaults to 1. The share of a source in an epoch is its weight divided by the sum of all weights.
    - `samples`: The number of samples in an epoch. Defaults to the number of samples of all sources together.
    """

    of: Annotated[dict[str, dict[str, Any]], Field(min_length=1, description="a mapping of names to datasets")]
    samples: Count | None = None


def open_data(request: DataRequest, options: Options) -> DataSet:
    """Return the mixture. Raises UsageError if the sources differ in their facts or in the dtypes of a sample."""
    wrong = [
        f"recipe.data.options.of.{label}{each.removeprefix('options')}"
        for label, given in options.of.items()
        for each in option_errors(_Source, given)
    ]
    if wrong:
        raise UsageError("\n".join(f"dataset mixture: {each}" for each in wrong))
    sources = {label: build_options(_Source, given) for label, given in options.of.items()}
    opened = {label: _open(request, label, each) for label, each in sources.items()}
    _check_alike({label: (each.facts, _kind(each.train)) for label, each in opened.items()})
    trained = [each.train for each in opened.values()]
    weights = [each.weight for each in sources.values()]
    counts = shares(options.samples or sum(map(len, trained)), weights)
    if 0 in counts:
        label = [*opened][counts.index(0)]
        raise UsageError(
            f"dataset mixture: {label} has no samples in an epoch of {sum(counts):,} samples; increase "
            f"recipe.data.options.of.{label}.weight or recipe.data.options.samples"
        )
    train = Mixture(trained, counts)
    validated = [each.validation for each in opened.values() if each.validation is not None]

    def name(number: int) -> str:
        return f"of {[*opened][train.source(number)]}"

    return DataSet(
        train=train,
        validation=Mixture(validated, [len(each) for each in validated]) if validated else None,
        facts=next(iter(opened.values())).facts,
        skipped=next((each.skipped for each in opened.values() if each.skipped is not None), None),
        name=name,
        warnings=tuple(line for each in opened.values() for line in each.warnings),
        question=next((each.question for each in opened.values() if each.question), ""),
    )


def shares(samples: int, weights: Sequence[float]) -> list[int]:
    """Split `samples` samples by positive weights. Each share is off by at most one."""
    sums = [*accumulate(weights)]  # the last is the sum, added in the same order in each version of Python
    ends = [round(samples * end / sums[-1]) for end in sums]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


@final
class Mixture:
    """`counts` samples of each source, source after source. The order of the epoch mixes them.

    If a source has more samples than its count, each training epoch uses a random part of it, without repetition. If a
    source has fewer samples, each epoch repeats all of them as often as they fit, and fills up with a random part. The
    selection is a function of the draw only.
    """

    def __init__(self, sources: Sequence[Split], counts: Sequence[int]) -> None:
        self.in_memory = all(each.in_memory for each in sources)
        self.sources = sources
        self._ends = np.cumsum(counts)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def source(self, number: int) -> int:
        """Return the index of the source that a sample is from."""
        return int(np.searchsorted(self._ends, number, side="right"))

    def fetch(self, indices: NDArray[np.int64], draw: int | None) -> Batch:
        """See Split."""
        fetched, places = zip(*self._fetched(indices, draw), strict=True)
        order = torch.from_numpy(np.argsort(np.concatenate(places)))
        columns = [dict(with_paths(each)) for each in fetched]
        unfit = "dataset mixture: cannot combine samples of its sources in one batch"
        advice = "; use sources whose samples have the same structure and shapes"
        with error_as(UsageError, (RuntimeError, KeyError, TypeError), unfit, advice):
            return map_with_paths(lambda path, _: torch.cat([each[path] for each in columns])[order], fetched[0])

    def _fetched(self, indices: NDArray[np.int64], draw: int | None) -> Iterator[tuple[Batch, NDArray[np.int64]]]:
        """Yield the samples of each source, and of each pass over the source, with their positions in the batch."""
        which = np.searchsorted(self._ends, indices, side="right")
        within = indices - np.concatenate([[0], self._ends])[which]
        turns = within // np.array([*map(len, self.sources)])[which]
        for number, turn in sorted({*zip(which.tolist(), turns.tolist(), strict=True)}):
            [places] = np.nonzero((which == number) & (turns == turn))
            source = self.sources[number]
            rows = within[places] - turn * len(source)
            if draw is None:
                yield source.fetch(rows, None), places
                continue
            key = random.extend_key(draw, number)
            yield source.fetch(shuffle(key, turn, len(source))(rows), random.extend_key(key, turn)), places


def parts(split: Split) -> Iterator[Split]:
    """Yield the sources of a mixture, including those of nested mixtures. Yields any other split itself."""
    if isinstance(split, Mixture):
        for each in split.sources:
            yield from parts(each)
    else:
        yield split


def _kind(split: Split) -> dict[str, str]:
    """Return the dtype of each tensor of a sample by its path. For other leaves, the type."""
    leaves = with_paths(split.fetch(np.array([0]), None))
    return {path: str(leaf.dtype) if isinstance(leaf, torch.Tensor) else type_name(leaf) for path, leaf in leaves}


def _check_alike(found: Mapping[str, tuple[Mapping[str, Any], Mapping[str, str]]]) -> None:
    (first, (facts, kind)), *others = found.items()
    for label, (own_facts, own_kind) in others:
        differing = sorted(key for key in {**facts, **own_facts} if facts.get(key) != own_facts.get(key))
        if not differing and kind != own_kind:
            differing = [f"the dtypes of a sample, {own_kind} and {kind}"]
        if differing:
            raise UsageError(
                f"dataset mixture: {label} and {first} differ in {', '.join(differing)}; convert one of them, or use "
                f"only sources that agree in this"
            )


def _open(request: DataRequest, label: str, source: _Source) -> DataSet:
    root = request.root if source.root is None else source.root
    asked = DataRequest(source.name, root, request.download, options=source.options or {})
    if asked.cuts:
        raise UsageError(
            f"dataset mixture: recipe.data.options.of.{label}: {source.name} is not supported, since a mixture does "
            f"not crop or resize images; combine the images in one dataset {source.name}"
        )
    where = f"dataset mixture: recipe.data.options.of.{label}"
    with error_as(UsageError, UsageError, where):
        opened = open_source(asked)
    if not len(opened.train):
        raise UsageError(f"{where}: has no training samples; remove it")
    return opened
