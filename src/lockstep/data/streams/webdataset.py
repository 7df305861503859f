"""The shards of a WebDataset pipeline. Samples are read by position, without scanning the archive."""

import hashlib
import os
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, final
from urllib.parse import urlparse

from lockstep.common import plainfile
from lockstep.common.user_code import UserCode
from lockstep.data.streams.index import FileState, ShardIndex, check_unchanged, get_file_state, load_or_scan
from lockstep.data.streams.pipeline import Stage, is_local, parse_pipeline
from lockstep.data.streams.sharded import get_only_sample
from lockstep.data.streams.tar_members import LOCAL_PATH, iterate_spans, scan_members, select_samples
from lockstep.errors import DataError, UsageError, convert_error, convert_os_error

_MAX_OPEN: Final = 128  # maximum number of open archives


def open_webdataset_shards(dataset: Any) -> "WebDatasetShards | None":
    """Return the shards of a WebDataset pipeline, or None if `dataset` is any other object.

    Raises UsageError if the pipeline has a stage that Lockstep can't apply to one sample at a time.
    """
    module = sys.modules.get("webdataset.pipeline")
    return WebDatasetShards(dataset) if module is not None and isinstance(dataset, module.DataPipeline) else None


@final
class WebDatasetShards:
    """The archives of a pipeline. See Shards.

    An archive is a local file, or a file that the pipeline downloads to its `cache_dir`.
    """

    ignored_positions: Sequence[str] = ("offsets",)

    def __init__(self, dataset: Any) -> None:
        self.label = f"dataset {type(dataset).__name__}"
        self._pipeline = pipeline = parse_pipeline(self.label, dataset)
        self.names: Sequence[str] = pipeline.urls
        ends = [number for number, stage in enumerate(pipeline.stages, 1) if stage.name == "select"]
        self._filters = pipeline.stages[: max(ends, default=0)]  # the stages up to and including the last select
        # The descriptors of open archives. Forked processes can share them, because pread ignores the file position.
        self._descriptors: OrderedDict[str, int] = OrderedDict()

    def select_window(self, num_samples: int) -> range:
        """See Shards."""
        return range(num_samples)

    def index_shard(self, shard: int) -> ShardIndex:
        """See Shards. The index of all samples is cached next to the archive. `select` stages are applied each time."""
        path = self._get_local_path(shard)
        with convert_os_error(UsageError, f"{self.label}: cannot read {path}", "; pass the paths of existing archives"):
            file = get_file_state(path)
        index = load_or_scan(self._get_cache_path(path), [file], lambda: scan_members(self.label, path, self._pipeline))
        if not self._filters:
            return index
        return select_samples(
            index, [sample for sample in range(index.num_samples) if self._passes_filters(shard, index, sample)]
        )

    def read_sample(self, shard: int, index: ShardIndex, offset: int) -> Any:
        """See Shards."""
        samples = self._apply_stages(self._pipeline.stages, shard, index, offset)
        return get_only_sample(samples, self.get_sample_name(shard, index, offset), "sample", ".select")

    def get_sample_name(self, shard: int, index: ShardIndex, offset: int) -> str:
        """See Shards."""
        return f"{self.names[shard]}: {index.names['keys'][offset]}"

    def _passes_filters(self, shard: int, shard_index: ShardIndex, sample_index: int) -> bool:
        with convert_error(UsageError, DataError, self.label):
            return bool(self._apply_stages(self._filters, shard, shard_index, sample_index))

    def _apply_stages(self, stages: Sequence[Stage], shard: int, index: ShardIndex, offset: int) -> list[Any]:
        """Apply stages to a sample of a shard, and return the results."""
        name, [file] = self.get_sample_name(shard, index, offset), index.files
        sample: dict[str, Any] = {"__key__": index.names["keys"][offset], "__url__": self.names[shard]}
        sample |= {suffix: self._read_content(name, file, *span) for suffix, *span in iterate_spans(index, offset)}
        if LOCAL_PATH in index.names["extras"]:
            sample[LOCAL_PATH] = file.path
        with UserCode(name):
            samples: Iterator[Any] = iter([sample])
            for stage in stages:
                samples = stage(samples)
            return [*samples]

    def _read_content(self, name: str, file_state: FileState, offset: int, size: int) -> bytes:
        with convert_os_error(DataError, f"{file_state.path}: cannot be read", "; check the disk it is on"):
            descriptor = self._open_archive(file_state.path)
            status = os.fstat(descriptor)
            check_unchanged(file_state, FileState(file_state.path, status.st_size, str(status.st_mtime_ns)))
            content = os.pread(descriptor, size, offset)
        if len(content) != size:
            raise DataError(f"{name}: the archive was truncated while in use; copy it again")
        return content

    def _open_archive(self, path: str) -> int:
        if path not in self._descriptors:
            self._descriptors[path] = plainfile.open_descriptor(Path(path), links=True)
        self._descriptors.move_to_end(path)
        if len(self._descriptors) > _MAX_OPEN:
            os.close(self._descriptors.popitem(last=False)[1])
        return self._descriptors[path]

    def _get_local_path(self, shard: int) -> str:
        """Return the path of an archive, after downloading it if it is remote."""
        url = self.names[shard]
        if is_local(url) or self._pipeline.download is None:
            return urlparse(url).path
        with convert_error(UsageError, Exception, f"{self.label}: cannot download {url}", "; check the address"):
            return self._pipeline.download(url)

    def _get_cache_path(self, path: str) -> Path | None:
        """Return the path of the cached index, or None if the index depends on user functions or on chosen keys."""
        pipeline = self._pipeline
        options = {name: value for name, value in pipeline.group_options.items() if name in ("lcase", "suffixes")}
        if pipeline.select is not None or pipeline.rename is not None or "keys" in pipeline.group_options:
            return None
        text = repr(sorted((name, str(value)) for name, value in options.items())) + str(pipeline.has_local_path)
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        return Path(path).with_name(f".{Path(path).name}.samples-{digest}.npz")
