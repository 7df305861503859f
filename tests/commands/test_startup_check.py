"""What a first start of a run warns of: code that would give other weights on another number of processes."""

import os
import random
import time
from typing import Any

import numpy as np
import planted
import pytest
import torch
from conftest import DIGITS
from forked import as_rank, events
from timm.layers import EvoNorm2dB0
from torch import nn

from lockstep.config.load import load
from lockstep.models.find import build_model
from lockstep.probe import findings as causes
from lockstep.probe import startup_check as looking
from lockstep.probe.startup_check import check_in_background, is_part_of_lockstep, is_plain
from lockstep.setup.build import Setup, build_setup
from lockstep.tasks.dataset_properties import make_dataset_info

pytestmark = pytest.mark.slow("runs whole commands")

NOISY = 'recipe.model={{name: "planted:noisy", options: {{source: {}}}}}'
LOOKING = (*DIGITS, 'recipe.loss={name: "cross_entropy"}', "run.probe=auto", "run.dir=run")


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a look as long as it takes beside other tests; as a user waits for it, 10 s were too short there."""
    monkeypatch.setattr(looking, "_MAX_WAIT_S", 60.0)


def ready(*overrides: str) -> Setup:
    return build_setup(load("digits", ["recipe.batch=16", *overrides]).config.recipe)


def culprits(setup: Setup) -> list[str]:
    with check_in_background(setup) as look:
        return [finding.culprit for finding in look()]


@pytest.mark.parametrize(
    ("override", "culprit"),
    [
        ('recipe.model={name: "planted:Remembering"}', causes.ATTRIBUTES),
        (NOISY.format("numpy"), causes.FOREIGN_RANDOMNESS),
        (NOISY.format("global"), causes.GLOBALS),
        (NOISY.format("rank"), causes.RANKED),
        ('recipe.model={name: "planted:spectral_by_hook"}', causes.SPECTRAL_NORM),
        ('recipe.model={name: "planted:spectral_by_parametrization"}', causes.SPECTRAL_NORM),
        ('recipe.loss={name: "planted:counting_loss"}', causes.GLOBALS),
        ('recipe.data={name: "planted:jittering"}', causes.RANDOM_DATA),
        ('recipe.data={name: "planted:sharded"}', causes.RANKED_DATA),
    ],
)
def test_code_that_depends_on_the_placement_is_warned_of(override, culprit):
    linear = [] if "recipe.model" in override else ['recipe.model={name: "planted:linear"}']
    assert culprits(ready(override, *linear)) == [culprit]


@pytest.mark.parametrize(
    "override",
    [
        'recipe.model={name: "planted:linear"}',
        'recipe.model={name: "planted:Counting"}',  # to no consequence
        'recipe.model={name: "planted:Caching"}',
        'recipe.model={name: "planted:InPlace"}',
        "recipe.model={name: digits_convnet, options: {dropout: 0.1}}",
    ],
)
def test_clean_code_is_not_warned_of(override):
    assert culprits(ready(override)) == []


def test_the_run_sees_nothing_of_the_look():
    """Neither generators, nor globals, nor the environment, nor the position in a file that the data has open."""
    chosen = ready(NOISY.format("global"))
    torch.manual_seed(1)
    before = [*map(repr, (random.getstate(), np.random.get_state(), torch.get_rng_state().sum(), dict(os.environ)))]
    counted = [*planted._COUNTED]
    assert culprits(chosen) == [causes.GLOBALS]
    after = [*map(repr, (random.getstate(), np.random.get_state(), torch.get_rng_state().sum(), dict(os.environ)))]
    assert (after, planted._COUNTED) == (before, counted)


def test_files_that_the_data_has_open_are_read_at_offsets_of_its_own(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(b"0123456789")
    with path.open("rb", buffering=0) as file:
        file.read(3)
        if not (child := os.fork()):
            looking._reopen_files()
            os._exit(file.read(1)[0])
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == ord("3")
        assert file.tell() == 3


def test_a_look_that_takes_too_long_or_fails_is_told_and_ends_no_run(monkeypatch):
    def slow(*_: Any, **__: Any) -> None:
        time.sleep(60)

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("no such layer")

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), 9)

    chosen = ready('recipe.model={name: "planted:linear"}')
    for what, reason in ((slow, "more than 0 s"), (fail, "ValueError: no such layer"), (die, "was killed")):
        monkeypatch.setattr(looking, "run_quick_probe", what)
        monkeypatch.setattr(looking, "_MAX_WAIT_S", 0.1 if what is slow else 60.0)
        with check_in_background(chosen) as look:
            (finding,) = look()
        assert finding.culprit == looking.NOT_CHECKED
        assert reason in finding.text
    monkeypatch.setattr(looking, "_MAX_PARAMETERS", 100)
    assert culprits(chosen) == [looking.NOT_CHECKED]


@pytest.mark.parametrize(("name", "plain"), [("resnet18", True), ("swin_tiny_patch4_window7_224", True)])
def test_models_of_timm_are_known_by_their_layers(name, plain):
    with torch.device("meta"):
        model = build_model(
            name=name, source="timm", dataset_info=make_dataset_info([*map(str, range(10))], (3, 224, 224))
        )
    assert is_plain(model)


def test_hooks_parametrizations_and_layers_of_others_are_not_known():
    layers = nn.utils.spectral_norm(nn.Linear(2, 2)), nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2))
    assert not any(is_plain(layer) for layer in (*layers, planted.MyNorm(2), EvoNorm2dB0(2)))  # it keeps a variance
    assert is_plain(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))


def test_only_lockstep_itself_is_known_to_be_clean():
    assert is_part_of_lockstep(ready())
    assert not is_part_of_lockstep(ready('recipe.loss={name: "planted:contrasting"}'))
    assert not is_part_of_lockstep(
        ready('recipe.data={name: "planted:seeded"}', 'recipe.model={name: "planted:linear"}')
    )


def test_train_warns_once_and_its_bits_do_not_change(run):
    words = ("train", *LOOKING, NOISY.format("numpy"), "placement.processes=1", "recipe.steps=3", "recipe.epochs=")
    looked = run(*words)
    (warning,) = events(looked.folder / "run", "warning")
    assert warning["culprit"] == causes.FOREIGN_RANDOMNESS
    assert "NumPy's random generator" in warning["text"]
    line = f"warning: {warning['text']}\n"
    assert looked.out.count(line) == (looked.folder / "run/logs/rank-0.log").read_text().count(line) == 1
    off = run(*words, "run.probe=off", "run.dir=off")
    assert events(off.folder / "off", "warning") == []
    assert off.sha256 == looked.sha256
    assert off.left() == looked.left() == []


def test_a_run_that_goes_on_is_not_looked_at_again(run):
    words = ("train", *LOOKING, 'recipe.model={name: "planted:Remembering"}', "placement.processes=2")
    first = run(*words)
    assert "warning: the model keeps state in plain attributes" in first.out
    assert len(events(first.folder / "run", "warning")) == 1
    run(*words)
    assert len(events(first.folder / "run", "warning")) == 1


def test_rank_0_of_another_launcher_looks(start, tmp_path):
    words = ("train", *LOOKING, NOISY.format("rank"), f"placement.rendezvous=file://{tmp_path}/meet")
    ranks = [start(*words, **as_rank(rank, 2, 1)) for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [0, 0]
    assert ["warning: on rank 1 of 2" in rank.out for rank in ranks] == [True, False]
