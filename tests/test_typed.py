"""What a type checker sees of the public names: their types, not Any, and no name that is none."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import lockstep

ROOT = Path(__file__).parent.parent
SCRIPT = """
import torch
import lockstep

run = lockstep.join(seed=0, dir="runs/a")
net = torch.nn.Linear(2, 2)
model, optimizer = run.place(net, torch.optim.SGD(net.parameters(), lr=0.1))
reveal_type(model)
reveal_type(optimizer)
for step in run.steps([1, 2], batch=2, epochs=1):
    reveal_type(step.loss)
reveal_type(run.fingerprint())
reveal_type(lockstep.load("runs/a"))
reveal_type(next(iter(lockstep.train("digits"))).step)
reveal_type(lockstep.evaluate("runs/a").figures)
reveal_type(lockstep.compare("digits", placements=["zero3", {"name": "hsdp", "replicate": 2}]).rows[0].seconds)
reveal_type(lockstep.Recipe.model_validate({}).batch)
reveal_type(lockstep.Placement().workers)
reveal_type(lockstep.verify(print)[0].line)
reveal_type(lockstep.UsageError.exit_code)
lockstep.join(seed="0")
lockstep.jion(seed=0)
"""
SEEN = [
    "torch.nn.modules.linear.Linear",
    "torch.optim.sgd.SGD",
    "torch._tensor.Tensor",
    "str",
    "torch.nn.modules.module.Module",
    "int",
    "dict[str, float]",
    "float | None",
    "int",
    "int",
    "str",
    "int",
]


@pytest.mark.timeout(900)
def test_a_script_of_the_users_is_checked(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(tmp_path / "mine.py")]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    notes = [line.partition('Revealed type is "')[2][:-1] for line in found.splitlines() if "Revealed type" in line]
    assert [each.replace("builtins.", "") for each in notes] == SEEN, found
    errors = [line for line in found.splitlines() if ": error: " in line]
    assert len(errors) == 2, found
    assert 'Argument "seed" to "join" has incompatible type "str"; expected "int"' in errors[0]
    assert 'Module has no attribute "jion"' in errors[1]


def test_the_package_says_that_it_has_types() -> None:
    assert (Path(lockstep.__file__).parent / "py.typed").is_file()
    data = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-data"]
    assert "py.typed" in data["lockstep"]


def test_the_types_are_of_what_is_imported_later() -> None:
    lines = (Path(lockstep.__file__).read_text(encoding="utf-8")).splitlines()
    shown = {
        name: words[1]
        for words in (line.replace(",", "").split() for line in lines if line.startswith("    from lockstep."))
        for name in words[3:]
    }
    places: dict[str, str] = vars(lockstep)["_PLACES"]
    assert shown == {name: f"lockstep.{place}" for name, place in places.items()}
