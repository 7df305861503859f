"""What a type checker sees of the public names: their types, not Any, and no name that is none."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import lockstep

pytestmark = pytest.mark.slow("runs whole commands")

ROOT = Path(__file__).parent.parent
SCRIPT = """
import torch
import lockstep

run: lockstep.Run = lockstep.join(seed=0, dir="runs/a")
net = torch.nn.Linear(2, 2)
model, optimizer = run.place(net, torch.optim.SGD(net.parameters(), lr=0.1))
reveal_type(model)
reveal_type(optimizer)
for step in run.steps([1, 2], batch=2, epochs=1):
    reveal_type(step.loss)
reveal_type(run.fingerprint())
reveal_type(lockstep.load("runs/a"))
for event in lockstep.train("digits"):
    match event:
        case lockstep.Stepped(loss=loss):
            reveal_type(loss)
        case lockstep.Saved() | lockstep.Done():
            reveal_type(event.weights_sha256)
reveal_type(lockstep.evaluate("runs/a").figures)
reveal_type(lockstep.compare("digits", placements=["zero3", {"name": "hsdp", "replicate": 2}]).rows[0].seconds)
reveal_type(lockstep.Recipe.model_validate({}).batch)
reveal_type(lockstep.Placement().workers)
reveal_type(lockstep.verify(print)[0].line)
reveal_type(lockstep.UsageError.exit_code)
reveal_type(lockstep.predict("runs/a", ["a.png"], top=1)[0]["classes"])
reveal_type(lockstep.export("runs/a", "onnx").path)
reveal_type(lockstep.report(["runs/a"], png=True).charts)
lockstep.join(seed="0")
lockstep.jion(seed=0)
lockstep.export("runs/a", "onxx")
"""
SEEN = [
    "torch.nn.modules.linear.Linear",
    "torch.optim.sgd.SGD",
    "torch._tensor.Tensor",
    "str",
    "torch.nn.modules.module.Module",
    "float",
    "str",
    "dict[str, float]",
    "float | None",
    "int",
    "int",
    "str",
    "int",
    "list[dict[str, Any]]",
    "pathlib.Path",
    "tuple[pathlib.Path, ...]",
]


def test_a_script_of_the_users_is_checked(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(tmp_path / "mine.py")]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    notes = [line.partition('Revealed type is "')[2][:-1] for line in found.splitlines() if "Revealed type" in line]
    assert [each.replace("builtins.", "") for each in notes] == SEEN, found
    errors = [line for line in found.splitlines() if ": error: " in line]
    assert len(errors) == 3, found
    assert 'Argument "seed" to "join" has incompatible type "str"; expected "int"' in errors[0]
    assert 'Module has no attribute "jion"' in errors[1]
    assert "incompatible type \"Literal['onxx']\"" in errors[2]


def test_the_package_says_that_it_has_types() -> None:
    assert (Path(lockstep.__file__).parent / "py.typed").is_file()
    data = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-data"]
    assert "py.typed" in data["lockstep"]


def test_the_types_are_of_what_is_imported_later() -> None:
    tree = ast.parse(Path(lockstep.__file__).read_text(encoding="utf-8"))
    [later] = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for node in ast.walk(later) if isinstance(node, ast.ImportFrom)]
    shown = {str(node.module): [each.name for each in node.names] for node in imports}
    places: dict[str, str] = vars(lockstep)["_MODULES"]
    ours = {module: sorted(names) for module, names in shown.items() if module.startswith("lockstep.")}
    assert ours == {f"lockstep.{place}": sorted(names.split()) for place, names in places.items()}
