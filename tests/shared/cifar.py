"""Files in the form of CIFAR-10, small and drawn at random."""

import hashlib
import io
import pickle
import tarfile
from pathlib import Path

import numpy as np

ARCHIVE = "cifar-10-python.tar.gz"


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def _batch(number: int) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (4, 3 * 32 * 32), np.uint8)
    return pickle.dumps({"data": pixels, "labels": [number, 0, 1, 9]})


def cifar_files() -> dict[str, bytes]:
    batches = {f"data_batch_{number}": _batch(number) for number in range(1, 6)}
    names = pickle.dumps({"label_names": [f"thing {number}" for number in range(10)]})
    return {**batches, "test_batch": _batch(6), "batches.meta": names}


def write_archive(folder: Path) -> dict[str, object]:
    """Write the archive to a folder, and return what torchvision's class has of it, but for the url."""
    files = cifar_files()
    with tarfile.open(folder / ARCHIVE, "w:gz") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    listed = [[name, md5(content)] for name, content in files.items()]
    return {
        "tgz_md5": md5((folder / ARCHIVE).read_bytes()),
        "train_list": listed[:5],
        "test_list": listed[5:6],
        "meta": {"filename": "batches.meta", "key": "label_names", "md5": listed[6][1]},
    }
