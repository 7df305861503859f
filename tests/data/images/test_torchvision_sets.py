"""CIFAR and MNIST from forged archives: download, checksum, one process at a time, and what is said on failure."""

import gzip
import pickle
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cifar import ARCHIVE, md5, write_archive
from torchvision import datasets

from lockstep.data.images.torchvision_sets import open_torchvision_set
from lockstep.errors import UsageError

# torchvision 0.26 unpacks without a filter, as Python up to 3.13 does by itself; 3.12 and 3.13 announce that.
pytestmark = pytest.mark.filterwarnings("ignore:Python 3.14 will, by default, filter:DeprecationWarning")


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A web server on this machine: its folder and its address."""
    folder = tmp_path / "server"
    folder.mkdir()
    with HTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield folder, f"http://127.0.0.1:{http.server_port}/"
        http.shutdown()
        thread.join()


@pytest.fixture
def cifar(tmp_path: Path, server: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small archive in CIFAR-10's form, for torchvision to download from this machine; returns where to."""
    described = {"url": f"{server[1]}{ARCHIVE}", **write_archive(server[0])}
    for name, value in described.items():
        monkeypatch.setattr(datasets.CIFAR10, name, value)
    return tmp_path / "data"


def test_downloads_and_reads(cifar: Path) -> None:
    data = open_torchvision_set("cifar10", str(cifar), True)
    assert (len(data.train), len(data.validation)) == (20, 4)
    assert data.facts["shape"] == [3, 32, 32]
    assert data.facts["classes"][3] == "thing 3"
    assert data.facts["mean"] == [0.4914, 0.4822, 0.4465]
    assert data.train.in_memory
    images, targets = data.train.fetch(np.array([4, 0]), None)
    assert targets.tolist() == [2, 1]
    original = np.random.default_rng(2).integers(0, 256, (4, 3 * 32 * 32), np.uint8)[0].reshape(3, 32, 32)
    assert torch.equal(images[0], torch.from_numpy(original))


def test_what_is_there_is_not_downloaded_again(cifar: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_torchvision_set("cifar10", str(cifar), True)
    monkeypatch.setattr(datasets.CIFAR10, "url", "http://127.0.0.1:9/")
    (cifar / "cifar-10-python.tar.gz").unlink()
    assert len(open_torchvision_set("cifar10", str(cifar), True).train) == 20
    assert len(open_torchvision_set("cifar10", str(cifar), False).train) == 20


def _touch(path: str) -> None:
    Path(path).touch()


class _Attack:
    """Reads as a call: what a pickle of a stranger can do."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> Any:
        return _touch, (self._path,)


@pytest.mark.parametrize("name", ["data_batch_3", "test_batch", "batches.meta"])
def test_a_pickle_with_another_checksum_is_never_opened(cifar: Path, name: str) -> None:
    open_torchvision_set("cifar10", str(cifar), True)
    trace = cifar / "attacked"
    (cifar / "cifar-10-batches-py" / name).write_bytes(pickle.dumps(_Attack(trace)))
    with pytest.raises(UsageError, match=r"dataset cifar10: missing or incomplete in .*: RuntimeError: .*corrupted"):
        open_torchvision_set("cifar10", str(cifar), False)
    assert not trace.exists()


def test_a_damaged_download_is_refused(cifar: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.CIFAR10, "tgz_md5", "0" * 32)
    with pytest.raises(UsageError, match=r"cifar10: cannot download it to .*data: RuntimeError: .*corrupted"):
        open_torchvision_set("cifar10", str(cifar), True)
    assert not (cifar / "cifar-10-batches-py").exists()


def test_a_failed_download_says_what_to_do(cifar: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.CIFAR10, "url", "http://127.0.0.1:9/cifar-10-python.tar.gz")  # nobody listens
    message = r"^dataset cifar10: cannot download it to .*data: URLError: .*refused.*; check the network .*CIFAR10"
    with pytest.raises(UsageError, match=message):
        open_torchvision_set("cifar10", str(cifar), True)


def test_missing_without_download(tmp_path: Path) -> None:
    message = r"no such folder; set recipe\.data\.root to .*recipe\.data\.download=true$"
    with pytest.raises(UsageError, match=message):
        open_torchvision_set("mnist", str(tmp_path / "absent"), False)
    assert not (tmp_path / "absent").exists()
    with pytest.raises(UsageError, match=r"mnist: missing or incomplete in .*: RuntimeError: Dataset not found"):
        open_torchvision_set("mnist", str(tmp_path), False)


def test_a_root_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot create the folder .*file/data: Not a directory; set recipe"):
        open_torchvision_set("mnist", str(tmp_path / "file" / "data"), True)


def _idx(values: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes:
    return struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape) + values.tobytes()


@pytest.mark.parametrize(("name", "kind"), [("mnist", "MNIST"), ("fashion_mnist", "FashionMNIST")])
def test_mnist_and_its_kin(
    tmp_path: Path, server: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 28, 28), np.uint8)
    parts = {
        "train-images-idx3-ubyte": pixels,
        "train-labels-idx1-ubyte": np.arange(6, dtype=np.uint8),
        "t10k-images-idx3-ubyte": pixels[:2],
        "t10k-labels-idx1-ubyte": np.array([8, 9], np.uint8),
    }
    files = {f"{part}.gz": gzip.compress(_idx(values)) for part, values in parts.items()}
    for file, content in files.items():
        (server[0] / file).write_bytes(content)
    monkeypatch.setattr(getattr(datasets, kind), "mirrors", [server[1]])
    monkeypatch.setattr(getattr(datasets, kind), "resources", [(each, md5(files[each])) for each in files])
    data = open_torchvision_set(name, str(tmp_path / "data"), True)
    assert data.facts["shape"] == [1, 28, 28]
    assert len(data.facts["classes"]) == 10
    images, targets = data.train.fetch(np.array([5, 2]), None)
    assert torch.equal(images, torch.from_numpy(pixels[[5, 2]])[:, None])
    assert targets.tolist() == [5, 2]
    assert data.validation.fetch(np.array([1]), None)[1].tolist() == [9]


# The set is a stand-in that is slow to download, and so is torchvision, which is slow to import.
_TWO = """
import os, pathlib, sys, time, types
import numpy

root, go = map(pathlib.Path, sys.argv[1:])
ready = root / "ready"

class Slow:
    classes = ["a"]
    def __init__(self, where, train, download):
        if download and not ready.exists():
            with open(root / "downloads", "a") as log:
                log.write("x")
            time.sleep(0.5)
            ready.touch()
        assert ready.exists()
        self.data, self.targets = numpy.zeros((1, 4, 4, 3), numpy.uint8), [0]

stand_in = types.ModuleType("torchvision")
stand_in.datasets = types.SimpleNamespace(CIFAR10=Slow)
sys.modules["torchvision"] = stand_in
from lockstep.data.images.torchvision_sets import open_torchvision_set

(go / str(os.getpid())).touch()
while len(list(go.iterdir())) < 2:
    time.sleep(0.01)
print(len(open_torchvision_set("cifar10", str(root), True).train))
"""


@pytest.mark.slow("starts a Python of its own")
def test_of_two_processes_one_downloads_and_the_other_waits(tmp_path: Path) -> None:
    root, go = tmp_path / "data", tmp_path / "go"
    go.mkdir()
    root.mkdir()
    command = [sys.executable, "-c", _TWO, str(root), str(go)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    assert [process.communicate()[0] for process in both] == [b"1\n", b"1\n"]
    assert (root / "downloads").read_text() == "x"
