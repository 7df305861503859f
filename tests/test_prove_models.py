"""scripts/prove-models: public models have one hash under zero3, and a run that differs, fails or hangs is reported."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import worlds
from component import script
from loop_ends import ended

from benchmarks import model_runs
from benchmarks.model_runs import (
    PLACES,
    SINGLE,
    Outcome,
    Place,
    Trace,
    call_with_limit,
    first_difference,
    judge,
    train_in,
)
from benchmarks.public_models import LIBRARIES, PublicModel, public_models

REFERENCE = Trace("ab" * 32, ["0x1.0p+1", "0x1.8p+0"], ["0x1.0p+0", "0x1.4p+0"])
TRAINED = ("fcn_resnet50", "nn.Transformer(x, x)", "test_resnet")


def find(name: str) -> PublicModel:
    [model] = [model for model in public_models() if model.name == name]
    return model


@pytest.fixture(scope="module")
def prove_models() -> ModuleType:
    return script("prove-models")


@pytest.fixture(scope="module")
def model_table() -> ModuleType:
    return script("model-table")


def trained(world: Any, strategy: str, name: str) -> tuple[str, list[Trace]]:
    traces: list[Trace] = []

    def loop(run: Any) -> None:
        traces.append(train_in(run, find(name)))

    return ended(world, strategy, loop), traces


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
@pytest.mark.parametrize("name", TRAINED)
def test_a_public_model_has_the_numbers_of_one_process_under_zero3(name: str) -> None:
    [alone] = worlds.run(1, trained, "single", name)
    assert len(alone[1]) == 1, alone[0]
    assert worlds.run(2, trained, "zero3", name) == [alone] * 2


@pytest.mark.parametrize(
    ("trace", "words"),
    [
        (REFERENCE, ""),
        (replace(REFERENCE, sha256="cd" * 32), "weights cdcdcdcdcdcdcdcd, not abababababababab"),
        (replace(REFERENCE, losses=["0x1.0p+1", "0x1.9p+0"]), "step 2: loss 1.5625, not 1.5"),
        (replace(REFERENCE, norms=["0x1.1p+0", "0x1.4p+0"]), "step 1: norm 1.0625, not 1.0"),
        (replace(REFERENCE, losses=["0x1.0p+1"], norms=["0x1.0p+0"]), "1 steps, not 2"),
    ],
)
def test_the_first_number_that_differs_is_named(trace: Trace, words: str) -> None:
    assert first_difference(REFERENCE, trace).startswith(words)
    outcome = judge(0, "", REFERENCE, trace, 1.0)
    assert outcome.verdict == ("DIFFERENT" if words else "same")


def test_exit_codes_become_verdicts() -> None:
    refused = judge(2, "rank 0 of 2: error: strategy zero2: use ddp", REFERENCE, None, 1.0)
    assert refused == Outcome("refused", "strategy zero2: use ddp", 1.0)
    assert judge(1, "Traceback", REFERENCE, None, 1.0).verdict == "error"
    assert judge(0, "", REFERENCE, None, 1.0).verdict == "error"  # no numbers were written
    assert judge(None, "", REFERENCE, None, 1.0).verdict == "hang"


def test_a_model_that_trains_on_several_processes_alone_differs() -> None:
    assert judge(0, "", None, REFERENCE, 1.0).verdict == "DIFFERENT"


def test_a_planted_difference_is_reported(
    monkeypatch: pytest.MonkeyPatch, prove_models: ModuleType, tmp_path: Path
) -> None:
    def run_place(model: PublicModel, place: Any, limit_s: float) -> Any:
        trace = replace(REFERENCE, sha256="cd" * 32) if place.label == "zero2 3" else REFERENCE
        return 0, "", trace, 0.5

    monkeypatch.setattr(model_runs, "_run_place", run_place)
    monkeypatch.setattr(prove_models, "prepare", lambda: None)
    out = tmp_path / "models.json"
    words = ["--only", "torch", "--model", "nn.LSTM", "--loops", "--out", str(out)]
    assert prove_models.main(words) == 1
    [row] = prove_models.json.loads(out.read_text())["models"].values()
    verdicts = {label: outcome["verdict"] for label, outcome in row["loop"].items()}
    assert verdicts.pop("zero2 3") == "DIFFERENT"
    assert {*verdicts.values()} == {"same"}


def test_a_placement_of_the_same_source_is_not_run_again(
    monkeypatch: pytest.MonkeyPatch, prove_models: ModuleType, tmp_path: Path
) -> None:
    runs: list[list[str]] = []

    def run_loop(model: PublicModel, places: Sequence[Place], limit_s: float) -> Mapping[str, Outcome]:
        runs.append([place.label for place in places])
        return {place.label: Outcome("same") for place in (SINGLE, *places)}

    monkeypatch.setattr(prove_models, "run_loop", run_loop)
    monkeypatch.setattr(prove_models, "prepare", lambda: None)
    monkeypatch.setattr(prove_models, "_has_source_of", lambda commit: commit is not None)
    words = ["--model", "nn.GRU", "--loops", "--out", str(tmp_path / "models.json")]
    every = [place.label for place in PLACES]
    rest = [label for label in every if label != "zero3 2"]
    assert prove_models.main([*words, "--place", "zero3 2"]) == 0
    assert prove_models.main(words) == prove_models.main(words) == 0
    assert runs == [["zero3 2"], rest]
    assert prove_models.main([*words, "--again"]) == 0
    assert runs == [["zero3 2"], rest, every]


def test_a_function_that_does_not_end_is_given_up() -> None:
    assert call_with_limit(lambda: 7, 60.0) == 7
    with pytest.raises(TimeoutError, match=r"within 0\.2 s"):
        call_with_limit(lambda: time.sleep(60), 0.2)


def test_a_process_that_dies_is_an_error() -> None:
    with pytest.raises(ChildProcessError, match="code 9"):
        call_with_limit(lambda: os._exit(9), 60.0)


def test_names_are_unique_and_libraries_are_large() -> None:
    models = public_models()
    assert len({(model.library, model.name) for model in models}) == len(models)
    counts = {library: len(public_models([library])) for library in LIBRARIES}
    assert counts["timm"] >= 40
    assert counts["transformers"] >= 20


def test_the_pages_are_those_of_the_results(model_table: ModuleType) -> None:
    assert model_table.main(["--check"]) == 0


def test_cells_are_short_and_equal_reasons_are_one_line(model_table: ModuleType) -> None:
    outcome = {"verdict": "refused", "message": "model NAME: " + "word " * 20 + "(a.py:3); do this", "seconds": 1.0}
    rows = [
        {"library": "timm", "name": name, "commit": "a", "loop": {"zero3 2": outcome | {
            "message": outcome["message"].replace("NAME", name)}}}
        for name in ("net_a", "net_b")
    ]  # fmt: skip
    [line] = model_table.exceptions(rows)
    assert line.startswith("| `net_a`, `net_b`, your own loop | `zero3 2` | refused | model MODEL: word")
    assert all(len(cell.split()) <= model_table.WORDS + 1 for cell in line.split("|"))
