"""Sends shards of a checkpoint to rank 0 through object storage, from ranks on hosts with a separate local folder.

Without object storage, all ranks write their rows into the files of one folder (training/checkpoint/shards.py). A rank
that doesn't have this folder uploads its rows as one object, and rank 0 writes them into the files. The object consists
of the parts, a JSON list with the file, offset and length of each part, and 8 bytes with the length of the list.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from lockstep.common import plainfile
from lockstep.common.location import get_storage_folder
from lockstep.errors import HostError
from lockstep.runs.storage import Storage, as_host_errors, open_storage
from lockstep.training.checkpoint import durable, store

_LENGTH_BYTES: Final = 8
_MAX_LIST_BYTES: Final = 1 << 28


@final
@dataclass(frozen=True)
class RemoteShards:
    """Transfers shards between ranks through `url`, the run folder in object storage."""

    url: str

    def send(self, checkpoint: str, rank: int, files: Mapping[str, Iterable[tuple[int, memoryview]]]) -> None:
        """Upload the rows of this rank. `files` maps each file name to the offsets and bytes of its parts.

        Raises HostError if the storage fails.
        """
        path = self._get_local_file(rank)
        try:
            with path.open("wb") as file:
                part_list = [[name, start, file.write(data)] for name, parts in files.items() for start, data in parts]
                text = json.dumps(part_list).encode()
                file.write(text + len(text).to_bytes(_LENGTH_BYTES, "little"))
            with as_host_errors(f"{path}: not uploaded"):
                self._open_storage().upload(_make_object_name(checkpoint, rank), path)
        finally:
            path.unlink(missing_ok=True)

    def receive(self, checkpoint: str, rank: int, folder: Path) -> None:
        """Download the object with the rows of `rank`, write the rows into files in `folder`, and remove the object.

        Only rank 0 calls this method.
        """
        path, name, storage = self._get_local_file(rank), _make_object_name(checkpoint, rank), self._open_storage()
        try:
            with as_host_errors(f"{self.url}/{name}: not downloaded"):
                storage.download(name, path)
            with path.open("rb") as file:
                end = file.seek(-_LENGTH_BYTES, os.SEEK_END)
                length = int.from_bytes(file.read(), "little")
                if not 0 <= length <= min(end, _MAX_LIST_BYTES):
                    raise HostError(f"{self.url}/{name}: damaged; start again to continue from the last checkpoint")
                file.seek(end - length)
                part_list = plainfile.parse_json(file.read(length))
                file.seek(0)
                for file_name, start, size in part_list:
                    durable.write_at(folder / file_name, [(start, memoryview(file.read(size)))])
            with as_host_errors(f"{self.url}/{name}: not removed"):
                storage.remove(name)
        finally:
            path.unlink(missing_ok=True)

    def _open_storage(self) -> Storage:
        return open_storage(self.url)

    def _get_local_file(self, rank: int) -> Path:
        return get_storage_folder(self.url) / f"shards-rank-{rank}-{os.getpid()}"


def _make_object_name(checkpoint: str, rank: int) -> str:
    """Return the name of the object with the rows of a rank. A later save removes what a killed save left."""
    return f"{store.FOLDER}/.{checkpoint}.tmp-0/rank-{rank}"
