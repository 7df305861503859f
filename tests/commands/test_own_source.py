"""The user's own source files are part of a run: kept, compared between ranks, and where a run is resumed."""

import hashlib
import json
import re
import sys
from pathlib import Path

import pytest
from conftest import DIGITS
from forked import as_rank
from waiting import free_port

from lockstep.common.user_source import describe_source_changes, hash_sources

pytestmark = pytest.mark.slow("runs whole commands")

TRAIN = ("train", *DIGITS, "run.dir=run", "recipe.model=", "recipe.model.name=zoo.nets:net")
NETS = (
    "from torch import nn\n"
    "from .blocks import WIDTH\n"
    "def net(num_classes):\n"
    "    return nn.Sequential(nn.Flatten(), nn.Linear(64, WIDTH), nn.Linear(WIDTH, num_classes))\n"
)


@pytest.fixture
def here(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that modules are imported from."""
    monkeypatch.setattr(sys, "path", [str(here), *sys.path])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return here


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def test_files_are_found_along_their_imports(here: Path) -> None:
    files = {
        "own/__init__.py": "",
        "own/nets.py": "import absent\nfrom . import blocks\nfrom .more.norms import Norm\nimport flat.deep as deep",
        "own/blocks.py": "def late():\n    from own import lazy",
        "own/lazy.py": "from own.nets import *",
        "own/more/__init__.py": "from ..... import beyond",
        "own/more/norms.py": "class Norm: ...",
        "own/unused.py": "",
        "flat/deep.py": "import json",  # in a folder without __init__.py
        "losses.py": "def (",  # told elsewhere
    }
    write(here, files)
    found = hash_sources(["own.nets:net", "losses:loss"])
    assert found == {name: digest(text) for name, text in sorted(files.items()) if name != "own/unused.py"}


def test_neither_libraries_nor_what_is_installed_nor_lockstep_is_the_users(here: Path) -> None:
    write(here, {"lib/site-packages/installed.py": "", "nets.py": "import installed, torch, json, lockstep.core.tree"})
    sys.path.append(str(here / "lib/site-packages"))
    assert list(hash_sources(["nets:net", "torch.nn:Linear", "lockstep.models.botnet:botnet50"])) == ["nets.py"]


def test_a_package_installed_as_editable_is_the_users(here: Path) -> None:
    write(here, {"lib/site-packages/mine.pth": f"{here}/work/src\n", "work/src/mine/nets.py": "x = 1"})
    import site

    site.addsitedir(str(here / "lib/site-packages"))
    assert hash_sources(["mine.nets:net"]) == {"mine/nets.py": digest("x = 1")}


def test_what_is_found_does_not_depend_on_what_is_imported(here: Path) -> None:
    write(here, {"own/__init__.py": "", "own/nets.py": "from own import blocks", "own/blocks.py": "x = 1"})
    before = hash_sources(["own.nets:net"])
    __import__("own.nets")
    assert hash_sources(["own.nets:net"]) == before
    assert len(before) == 3


def test_changes_are_named() -> None:
    before = {"a.py": "1", "b.py": "2", "c.py": "3"}
    assert describe_source_changes(before, {"a.py": "1", "b.py": "5", "d.py": "4"}) == "b.py, c.py (gone), d.py (new)"
    assert describe_source_changes(before, before) == ""
    many = {f"{number:02}.py": "" for number in range(13)}
    assert describe_source_changes({}, many).endswith("09.py (new) and 3 more")


def test_a_resumed_run_warns_of_what_changed(run, tmp_path: Path) -> None:
    write(tmp_path, {"zoo/nets.py": NETS, "zoo/blocks.py": "WIDTH = 8\n"})
    stopping = ("run.save_every.steps=5", "recipe.loss.name=cross_entropy", "placement.processes=1")
    run(*TRAIN, *stopping)
    kept = {"zoo/blocks.py": digest("WIDTH = 8\n"), "zoo/nets.py": digest(NETS)}
    assert json.loads((tmp_path / "run/environment.json").read_text())["source"] == kept
    start = "run/checkpoints/step-00000020"
    assert json.loads((tmp_path / start / "state.json").read_text())["source"] == kept
    again = (*TRAIN, *stopping, f"run.resume={start}")
    assert run(*again, "run.dir=same").err == ""
    write(tmp_path, {"zoo/blocks.py": "WIDTH = 2 * 4\n"})
    resumed = run(*again, "run.dir=changed")
    assert resumed.err == (
        "warning: your source files changed since step 20 was saved: zoo/blocks.py; the run continues with the new "
        "files, and its results can differ from those of an uninterrupted run\n"
    )


def test_ranks_with_other_source_are_refused(server, tmp_path: Path) -> None:
    port = free_port()
    commands = []
    for rank, width in enumerate(("8", "2 * 4")):
        write(tmp_path / str(rank), {"zoo/nets.py": NETS, "zoo/blocks.py": f"WIDTH = {width}\n"})
        words = (*TRAIN, "recipe.loss.name=cross_entropy")
        commands.append(server.start("command", words, tmp_path / str(rank), as_rank(rank, 2, port)))
    assert [command.wait() for command in commands] == [2, 2]
    told = (
        r"your source files: rank 1 \(\S+\) differs from rank 0 \(\S+\): zoo/blocks\.py: "
        r"[0-9a-f]{16}, not [0-9a-f]{16}; start all ranks with the same value"
    )
    assert all(re.search(told, command.err) for command in commands), commands[0].err
