"""Parses a WebDataset pipeline into the stages that read archives, and the stages that are applied to each sample."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, NamedTuple
from urllib.parse import urlparse

from lockstep.common.patterns import list_some
from lockstep.errors import UsageError

_PER_SAMPLE: Final = frozenset(
    {
        *("map", "map_dict", "map_tuple", "to_tuple", "decode", "xdecode", "rename", "rename_keys"),
        *("extract_keys", "associate", "info", "select"),
    }
)
_DROPPED: Final = frozenset({"single_node_only", "split_by_node", "split_by_worker", "check_empty"})
_OPENERS: Final = frozenset({"StreamingOpen", "FileCache", "url_opener"})
_SHARD_LIST: Final = "SimpleShardList"
_ARCHIVE_STAGES: Final = "tarfile_samples"  # opens and expands archives, and groups their members, in a single stage
_SHUFFLE_ADVICE: Final = "remove it: the order= of the run shuffles all samples by default"
_SELECT_ADVICE: Final = "remove it, and select samples with order="
_MIXTURE_ADVICE: Final = "use a recipe with recipe.data.name=mixture"
_REMEDIES: Final[Mapping[str, str]] = {
    "shuffle": _SHUFFLE_ADVICE,
    "detshuffle": _SHUFFLE_ADVICE,
    "resampled": "remove it, and draw samples with replacement with order=lockstep.orders.Weighted(...)",
    "ResampledShards": "remove resampled=True; order=lockstep.orders.Weighted(...) draws samples with replacement",
    "MultiShardSample": f"pass a list of shards, or {_MIXTURE_ADVICE}",
    "DirectoryShardList": "pass a list of shards",
    "rsample": _SELECT_ADVICE,
    "islice": _SELECT_ADVICE,
    "batched": "remove it, and set the batch of the run; collate= makes a batch from a list of samples",
    "unbatched": "store single samples in the shards",
    "unlisted": "store single samples in the shards",
    "DataLoader": "pass the dataset instead of the loader, and set placement.workers",
    "RandomMix": _MIXTURE_ADVICE,
    "RoundRobin": _MIXTURE_ADVICE,
}
_OTHER_STAGE_ADVICE: Final = "use .map, .select or .to_tuple, which process one sample at a time"
_SPLITTER_ADVICE: Final = "remove it, for example with nodesplitter=None: Lockstep distributes the samples over ranks"
_ON_ERROR: Final = "handler"
_RAISES: Final = "reraise_exception"
_SKIPPERS: Final = frozenset({"ignore_and_continue", "warn_and_continue", "ignore_and_stop", "warn_and_stop"})

Samples = Iterable[dict[str, Any]]


class Stage(NamedTuple):
    """A stage of a pipeline, with the name, module and arguments of its function or class.

    The name has no leading or trailing underscores.
    """

    run: Any
    name: str
    module: str
    args: Sequence[Any]
    options: Mapping[str, Any]

    def __call__(self, samples: Iterable[Any]) -> Iterator[Any]:
        """Return an iterator over the results of the stage for `samples`."""
        return iter(self.run(samples))


@dataclass(frozen=True)
class Pipeline:
    """A pipeline whose stages can be applied to one sample at a time.

    - `urls`: The shards, in order.
    - `select`, `rename`: User functions that select and rename members by name, if any.
    - `group`: Groups members into samples. `group_options` are its keyword arguments.
    - `download`: Downloads a remote shard to the cache folder of the pipeline, and returns its path.
    - `has_local_path`: Whether samples contain the local path of their shard.
    - `stages`: The remaining stages, which are applied to each sample.
    """

    urls: Sequence[str]
    select: Callable[[str], bool] | None
    rename: Callable[[str], str] | None
    group: Callable[[Samples], Samples]
    group_options: Mapping[str, Any]
    download: Callable[[str], str] | None
    has_local_path: bool
    stages: Sequence[Stage]


def parse_pipeline(label: str, dataset: Any) -> Pipeline:
    """Return the parsed pipeline. Raises UsageError if it has a stage that can't be applied to one sample at a time."""
    if dataset.repetitions != 1:
        raise UsageError(
            f"{label}: repeats its samples; remove with_epoch or repeat, and set epochs= or steps= of the run"
        )
    first, *stages = map(_parse_stage, dataset.pipeline)
    if first.name != _SHARD_LIST or first.run.seed is not None:
        raise _make_stage_error(
            label, first, _REMEDIES.get(first.name, "pass webdataset.WebDataset(urls, shardshuffle=False)")
        )
    for stage in stages:
        _check_errors_are_raised(label, stage)
    stages = [stage for stage in stages if not _can_be_dropped(stage)]
    opener = _pop_stage(stages, _OPENERS)
    expander = _pop_stage(stages, {"tar_file_expander", _ARCHIVE_STAGES})
    if expander is None:
        raise UsageError(_format_no_archives_error(label, stages))
    grouper = expander if expander.name == _ARCHIVE_STAGES else _pop_stage(stages, {"group_by_keys"})
    if grouper is None:
        raise UsageError(_format_no_archives_error(label, stages))
    for stage in stages:
        if stage.name not in _PER_SAMPLE or not _is_from_webdataset(stage):
            raise _make_stage_error(label, stage, _REMEDIES.get(stage.name, _OTHER_STAGE_ADVICE))
    group: Any = sys.modules["webdataset.tariterators"].group_by_keys if grouper is expander else grouper
    pipeline = Pipeline(
        [*first.run.urls],
        expander.options.get("select_files"),
        expander.options.get("rename_files"),
        group,
        {} if grouper is expander else grouper.options,
        opener.run.get_file if opener is not None and opener.name == "FileCache" else None,
        opener is not None and opener.name != "url_opener",
        stages,
    )
    _check_shards_are_local(label, pipeline)
    return pipeline


def is_local(url: str) -> bool:
    """Return whether a URL is a path on this host."""
    return urlparse(url).scheme in ("", "file")


def _parse_stage(stage: Any) -> Stage:
    if type(stage).__name__ == "FilterFunction":  # a function of webdataset with its options
        return Stage(stage, stage.f.__name__.strip("_"), stage.f.__module__, stage.args, stage.kw)
    if isinstance(stage, list):
        return Stage(stage, "list", "builtins", (), {})
    name = getattr(stage, "__name__", None)
    if name is None:
        return Stage(stage, type(stage).__name__, type(stage).__module__, (), {})
    return Stage(stage, name, stage.__module__, (), {})


def _pop_stage(stages: list[Stage], names: Iterable[str]) -> Stage | None:
    """Remove and return the first stage if it is a webdataset stage in `names`. Otherwise, return None."""
    if stages and stages[0].name in names and _is_from_webdataset(stages[0]):
        return stages.pop(0)
    return None


def _is_from_webdataset(stage: Stage) -> bool:
    return stage.module.partition(".")[0] == "webdataset"


def _can_be_dropped(stage: Stage) -> bool:
    """Return whether a stage can be dropped: it only distributes or checks shards, or its shuffle buffer is too small.

    A shuffle with a buffer of at most one sample has no effect.
    """
    if not _is_from_webdataset(stage):
        return False
    if stage.name in ("shuffle", "detshuffle"):
        size = stage.args[0] if stage.args else stage.options.get("bufsize", getattr(stage.run, "bufsize", 2))
        return int(size) <= 1
    return stage.name in _DROPPED


def _check_errors_are_raised(label: str, stage: Stage) -> None:
    """Raise UsageError if a stage skips samples on errors, because the number of samples must be known in advance."""
    values = chain(stage.args, [stage.options.get(_ON_ERROR), getattr(stage.run, _ON_ERROR, None)])
    names = [getattr(value, "__name__", "") for value in values if callable(value)]
    option = stage.options.get(_ON_ERROR)
    if _SKIPPERS.isdisjoint(names) and (option is None or getattr(option, "__name__", "") == _RAISES):
        return
    raise UsageError(
        f"{label}: the stage {stage.name} skips samples that fail; remove its option {_ON_ERROR}=, and drop such "
        f"samples with .select"
    )


def _check_shards_are_local(label: str, pipeline: Pipeline) -> None:
    remote = [url for url in pipeline.urls if not is_local(url)]
    if remote and pipeline.download is None:
        raise UsageError(
            f"{label}: {list_some(remote, 1)}: not a local file, so samples can't be read by position; pass cache_dir= "
            f"to webdataset.WebDataset, or copy the shards to a local or shared disk"
        )


def _format_no_archives_error(label: str, stages: Sequence[Stage]) -> str:
    """Return the error message for a pipeline that doesn't begin with the stages that read archives."""
    if not stages:
        return f"{label}: the pipeline doesn't read archives; use webdataset.WebDataset(urls, shardshuffle=False)"
    advice = _REMEDIES.get(stages[0].name, _SPLITTER_ADVICE)
    return str(_make_stage_error(label, stages[0], advice))


def _make_stage_error(label: str, stage: Stage, advice: str) -> UsageError:
    return UsageError(
        f"{label}: the stage {stage.name} of the pipeline can't be applied to one sample at a time; {advice}"
    )
