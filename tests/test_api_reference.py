"""docs/python-api.md is up to date, and its script rejects public names that are missing or have no docstring."""

from pathlib import Path
from types import ModuleType
from typing import Any

import component
import pytest

import lockstep

ROOT = Path(__file__).parent.parent


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = component.script("api-reference")
    monkeypatch.setattr(module.sys, "argv", ["api-reference", "--check"])
    return module


def test_the_page_is_up_to_date(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main() == 0, capsys.readouterr().out


def undocumented(self: Any) -> int:
    return 0


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda patch: patch.setattr(lockstep, "__all__", [*lockstep.__all__, "extra"]), "lockstep.__all__: extra\n"),
        (lambda patch: patch.setattr(lockstep.Run, "save", undocumented), "lockstep.Run.save: no docstring"),
        (lambda patch: patch.setattr(lockstep.Step, "loss", property(undocumented)), "lockstep.Step.loss: no docs"),
        (lambda patch: patch.setattr(lockstep.Saved, "__doc__", "Saved(*, step)"), "lockstep.Saved: no docstring"),
        (
            lambda patch: patch.setattr(lockstep.join, "__doc__", "Join."),
            "python-api.md: out of date; run scripts/api-reference",
        ),
    ],
)
def test_an_outdated_or_incomplete_page_is_rejected(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], change: Any, told: str
) -> None:
    change(monkeypatch)
    assert script.main() == 1
    assert told in capsys.readouterr().out


def test_private_names_are_not_on_the_page() -> None:
    page = (ROOT / "docs" / "python-api.md").read_text(encoding="utf-8")
    assert "#### step.update\n" in page
    assert "._" not in page
    assert "OwnStep" not in page
