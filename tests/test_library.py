"""The public names: which, that they come without torch, and that each one's example in the docs runs."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import lockstep

pytestmark = pytest.mark.slow("runs whole commands")

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
LOOP = DOCS / "own-loop.md"
PAGES = [LOOP, DOCS / "own-loop-rejected.md", DOCS / "own-loop-more.md"]
# What the loop of the README is about: a model, its optimizer and a dataset of the reader's.
THEIRS = """\
import lockstep, torch
from torch.nn import functional as F

torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dataset = torch.utils.data.TensorDataset(torch.randn(600, 4), torch.randint(3, (600,)))
"""
EVENTS = ["Started", "Warned", "Stepped", "Evaluated", "Logged", "Skipped", "Corrupted", "Saved", "Stopped", "Done"]
ELSEWHERE = ["BatchSampler"]  # its page is keep-your-trainer.md, whose example test_docs.py runs
RESULTS = ["Checked", "Comparison", "Exported", "Prediction", "Report", "Run", "Step"]  # seen, not called
NAMES = [
    *("LockstepError", "PreflightError", "TrainingError", "UsageError", "VerificationError", "Recipe", "Placement"),
    *("compare", "evaluate", "export", "join", "load", "predict", "report", "train", "verify"),
]


def test_the_public_names_are_these():
    assert sorted(lockstep.__all__) == sorted([*NAMES, *RESULTS, *ELSEWHERE, *EVENTS, "Event"])
    assert {*lockstep.__all__} <= {*dir(lockstep)}
    assert get_args(lockstep.Event) == tuple(getattr(lockstep, name) for name in EVENTS)
    for name in {*lockstep.__all__} - {"Event"}:
        assert getattr(lockstep, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        lockstep.trian  # noqa: B018


def test_importing_takes_no_torch():
    code = "import sys, lockstep; lockstep.UsageError, lockstep.Stepped; assert not {'torch', 'numpy'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)


def examples(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def test_each_name_has_an_example():
    shown = [example for page in PAGES for example in examples(page)]
    assert [name for name in NAMES if not any(f"lockstep.{name}" in example for example in shown)] == []


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which the first example of the first page, loop.py, has left a run."""
    folder = tmp_path_factory.mktemp("first")
    execute(folder / "loop.py", examples(LOOP)[0])
    return folder


VERIFIED = pytest.mark.slow("verification/test_custom_loop.py verifies a loop, and refuses one that joins no run")


@pytest.mark.parametrize(
    ("page", "number"),
    [
        pytest.param(page, number, id=f"{page.stem}-{number}", marks=VERIFIED if (page, number) == (LOOP, 1) else ())
        for page in PAGES
        for number in range(len(examples(page)))
        if (page, number) != (LOOP, 0)  # which the fixture runs
    ],
)
def test_the_examples_of_the_docs_run(page: Path, number: int, first: Path, tmp_path: Path) -> None:
    """Run each by itself, in a folder in which the first has left a run."""
    shutil.copytree(first, tmp_path, symlinks=True, dirs_exist_ok=True)
    execute(tmp_path / "example.py", examples(page)[number])


def test_the_loop_of_the_readme_runs(tmp_path: Path) -> None:
    [loop] = examples(ROOT / "README.md")
    execute(tmp_path / "loop.py", THEIRS + loop)


def execute(file: Path, text: str) -> None:
    """Write an example, and run it in its folder."""
    file.write_text(text, encoding="utf-8")
    done = subprocess.run([sys.executable, str(file)], cwd=file.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
