"""Applies the stages of a Hugging Face IterableDataset to single rows."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

from torch.utils.data._utils import worker

from lockstep.data.streams.stages import SourceShard, is_one_to_one, replace_input


@final
class RowStages:
    """Applies the stages of a dataset to rows from one type of source.

    Setting up the stages takes about a millisecond, which is longer than most rows take. Therefore, the stages are set
    up once, and read rows from a queue, without reading ahead. If a stage drops a row, or may return several samples
    for it, the stages are set up again for the next row.
    """

    def __init__(self, dataset: Any, shard: SourceShard, stages: Sequence[Any]) -> None:
        self._dataset = dataset
        self._source = type(shard.source)
        self._stages = stages
        self._is_one_to_one = is_one_to_one(stages)
        self._queue: deque[Any] = deque()
        self._samples: Iterator[dict[str, Any]] | None = None
        self.current_row = -1  # the index of the row that `iterate_kept_rows` has read most recently

    def run(self, row: Any) -> list[dict[str, Any]]:
        """Return the samples for a row, which is a table with a single row, or a dict."""
        self._queue.clear()  # a stage that failed may have left a row in the queue
        self._queue.append(row)
        samples, self._samples = self._samples or self._apply_stages(self._iterate_queue()), None
        results = []
        for sample in samples:
            results.append(sample)
            if self._is_one_to_one:
                self._samples = samples
                break
        return results

    def iterate_kept_rows(self, rows: Iterable[Any]) -> Iterator[int]:
        """Apply the stages to all rows of a shard, and yield the row index of each sample."""
        for _ in self._apply_stages(self._enumerate_rows(rows)):
            yield self.current_row

    def _enumerate_rows(self, rows: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        for self.current_row, row in enumerate(rows):
            yield self.current_row, row

    def _iterate_queue(self) -> Iterator[tuple[int, Any]]:
        while self._queue:
            yield 0, self._queue.popleft()

    def _apply_stages(self, rows: Iterator[tuple[int, Any]]) -> Iterator[dict[str, Any]]:
        node = self._source(lambda: rows, {})
        for stage in self._stages:
            node = replace_input(stage, node)
        dataset = copy_dataset(self._dataset)
        dataset._ex_iterable = node
        samples = iter(dataset)
        with _outside_loader_process():
            first = next(samples, None)
        if first is not None:
            yield first
            yield from samples


@contextmanager
def _outside_loader_process() -> Iterator[None]:
    """Hide from `datasets` that this is a loader process, in which it would read only some of the shards.

    This is only necessary for the first sample, because `datasets` doesn't check it again.
    """
    info, worker._worker_info = worker._worker_info, None
    try:
        yield
    finally:
        worker._worker_info = info


def copy_dataset(dataset: Any) -> Any:
    """Return a shallow copy of a dataset. copy.copy would share the attribute dict with the original."""
    result = object.__new__(type(dataset))
    vars(result).update(vars(dataset))
    return result
