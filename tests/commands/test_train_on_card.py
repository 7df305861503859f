"""`lockstep train` on a pretended card: from the data to the checkpoint the CPU's bits, and what waits is known."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from card import DEVICE, Card
from conftest import invoke

from lockstep.core import norm
from lockstep.device import machine
from lockstep.run import session

pytestmark = pytest.mark.slow("runs whole commands")

RECIPE = ["digits", "recipe.epochs=1", "recipe.microbatches=4", "run.log_every=8", "run.probe=off"]
PLACEMENT = ["placement.processes=1", "placement.affinity=off"]
# Functions that wait: at the start, with a report, an evaluation or a save, or for a constant that is made once.
MAY_WAIT = {
    "__init__": "the start",
    "<listcomp>": "the start: BatchNorm's counters",
    "compute_normalization_constants": "the first batch",
    "check": "a report",
    "report": "a report",
    "get_weighted_statistics": "the first batch: BatchNorm's calls, which are written when they change",
    "read": "a report",
    "compute_step_sums": "a report",
    "evaluate": "an evaluation",
    "_to_int_tensor": "a report or an evaluation: the task's whole numbers",
    "compute_total": "a report or an evaluation: what is not whole",
    "details": "an evaluation: the confusion matrix",
    "to_bytes": "a save",
    "_make_word_keys": "the first digest",
    "_get_block_keys": "the first digest",
    "add": "the first eight digests, whose time is taken",
    "_choose_interval": "a report or a save: digests are collected",
    "collect": "a report or a save",
}


def _weights(arguments: list[str]) -> str:
    [found] = re.findall(r"weights sha256 (\w+)", invoke("train", *arguments).output)
    return str(found)


def _pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    numerics = machine.make_fingerprint
    properties = SimpleNamespace(name="a card", uuid="0", total_memory=1 << 36, major=9, minor=0)
    monkeypatch.setattr(session, "choose_device", lambda *_: DEVICE)
    monkeypatch.setattr(machine, "make_fingerprint", lambda _, **more: numerics(torch.device("cpu"), **more))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)


def test_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm, "_is_folded", lambda _: True)  # on the CPU too
    expected = _weights([*RECIPE, *PLACEMENT, f"run.dir={tmp_path}/cpu"])
    _pretend(monkeypatch)
    with Card() as card:
        found = _weights([*RECIPE, *PLACEMENT, f"run.dir={tmp_path}/card"])
    assert found == expected
    assert not card.races
    waited = [re.search(r"\((\S+)\)$", each) for each in card.waits]
    assert {each[1] for each in waited if each} <= MAY_WAIT.keys(), card.waits
    assert sum("watch.py" in each for each in card.waits) == 3, (
        card.waits
    )  # 23 steps, a report each 8 and one at the end
    manifests = [(tmp_path / each / "checkpoints/latest/manifest.json").read_bytes() for each in ("cpu", "card")]
    assert manifests[0] == manifests[1]
