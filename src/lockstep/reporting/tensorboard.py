"""The TensorBoard sink, which writes curves over steps to <run>/tensorboard."""

import os
import socket
from pathlib import Path
from time import time_ns
from typing import Any, BinaryIO, final

from lockstep.reporting.curves import select_metrics
from lockstep.training.events import Event, Started


@final
class TensorBoard:
    """An event sink that writes the curves of a run into `folder`.

    When `write` returns, the operating system has the points. torch.utils.tensorboard.SummaryWriter isn't used, because
    it writes from a thread: if the folder is removed, the thread fails with a traceback, and closing the writer hangs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: BinaryIO | None = None

    def write(self, event: Event, time: float) -> None:
        if isinstance(event, Started):
            self._open_file(event, time)
        if self._file is None:
            return
        # Imported lazily, because the import is slow and only rank 0 needs it.
        from tensorboard.compat.proto.event_pb2 import Event as Record
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in select_metrics(event).items()]
        if values:
            _append_record(self._file, Record(wall_time=time, step=event.step, summary=Summary(value=values)))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open_file(self, event: Started, time: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as Record
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        # time_ns() makes the names unique and sorts them by creation time, even if the run starts twice in a second.
        name = f"events.out.tfevents.{int(time):010d}.{time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._file = (self._folder / name).open("xb")
        _append_record(self._file, Record(wall_time=time, file_version="brain.Event:2"))
        if event.resumed_from is not None:
            # A resumed run repeats the steps after its checkpoint. This record drops their earlier points.
            start = SessionLog(status=SessionLog.START)
            _append_record(self._file, Record(wall_time=time, step=event.step + 1, session_log=start))


def _append_record(file: BinaryIO, record: Any) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    RecordWriter(file).write(record.SerializeToString())
    file.flush()
