"""Which test files a change reaches: in a small tree made for it, and in this one."""

import pytest
from reach import FAR, Reach
from selection import ROOT, has_slow_tests

TREE = {
    "src/lockstep/__init__.py": "if TYPE_CHECKING:\n    from lockstep.loop.run import join\n",
    "src/lockstep/core/__init__.py": "",
    "src/lockstep/core/tree.py": "def add():\n    raise ValueError('call lockstep.join first')\n",
    "src/lockstep/comm/canonical.py": "from lockstep.core.tree import add\n",
    "src/lockstep/loop/run.py": "def join(): ...\n",
    "src/lockstep/formats/__init__.py": "",
    "src/lockstep/formats/onnx.py": "",
    "src/lockstep/formats/find.py": "import_module(f'lockstep.formats.{name}')\n",
    "src/lockstep/commands/convert.py": "from lockstep.formats.find import find\n",
    "src/lockstep/recipes/digits.yaml": "",
    "scripts/prove-bits": "#!/usr/bin/env python3\nfrom lockstep.core import tree\n",
    "scripts/size": "#!/usr/bin/env python3\n",
    "tests/conftest.py": "",
    "tests/shared/toys.py": "from lockstep.comm import canonical\n",
    "tests/commands/conftest.py": "from toys import Toy\n",
    "tests/commands/own_tasks.py": "",
    "tests/commands/test_train.py": "import subprocess\n",
    "tests/test_programs.py": "import subprocess\n\nsubprocess.run(['lockstep', 'convert digits'])\n",
    "tests/commands/test_eval.py": "TASK = 'own_tasks:Task'\n",
    "tests/core/test_tree.py": "from lockstep.core.tree import add\n",
    "tests/loop/test_run.py": "import lockstep\n\nlockstep.join()\n",
    "tests/formats/test_find.py": "from lockstep.formats.find import find\n",
    "tests/parallel/test_engine.py": "import toys\n\nSIZE = 'size'\n",
    "tests/test_prove_bits.py": "from component import script\n\nscript('prove-bits')\n",
    "tests/test_pages.py": "PAGE = ROOT / 'docs' / 'loops.md'\n",
    "tests/test_words.py": "WORDS = Path(__file__).with_name('words.txt')\n",
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Reach:
    root = tmp_path_factory.mktemp("tree")
    for name, text in TREE.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return Reach(root)


PROGRAMS = ("tests/commands/test_train.py", "tests/test_programs.py")
EVERY = {name for name in TREE if "/test_" in name}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        # By imports through a module, a helper, a conftest and a program; by a process that may import anything.
        (
            "src/lockstep/core/tree.py",
            {
                *("tests/core/test_tree.py", "tests/parallel/test_engine.py", "tests/test_prove_bits.py"),
                *("tests/commands/test_train.py", "tests/commands/test_eval.py", "tests/test_programs.py"),
            },
        ),
        # By an attribute of the package, and not by what a message names.
        ("src/lockstep/loop/run.py", {"tests/loop/test_run.py", *PROGRAMS}),
        # By a module that imports others by their names.
        ("src/lockstep/formats/onnx.py", {"tests/formats/test_find.py", *PROGRAMS}),
        ("src/lockstep/__init__.py", EVERY),
        ("pyproject.toml", EVERY),
        ("tests/conftest.py", EVERY),
        ("tests/core/test_tree.py", {"tests/core/test_tree.py"}),
        ("tests/commands/own_tasks.py", {"tests/commands/test_eval.py"}),
        ("tests/words.txt", {"tests/test_words.py"}),
        ("docs/loops.md", {"tests/test_pages.py"}),
        ("docs/limits.md", set()),
        ("README.md", set()),
        ("scripts/prove-bits", {"tests/test_prove_bits.py"}),
        ("scripts/size", set()),  # a word that stands for other things, too
        ("src/lockstep/core/gone.py", set()),  # who imported it has changed as well
    ],
)
def test_a_change_reaches_who_needs_it(small: Reach, changed: str, expected: set[str]) -> None:
    assert {*small.by([changed])} == expected


def test_what_comes_with_the_package_may_be_read_by_all_of_it(small: Reach) -> None:
    assert {*small.by(["src/lockstep/recipes/digits.yaml"])} >= EVERY - {
        *("tests/test_pages.py", "tests/test_words.py", "tests/formats/test_find.py"),
    }


def test_the_way_is_counted(small: Reach) -> None:
    found = small.by(["src/lockstep/core/tree.py"])
    assert found["tests/core/test_tree.py"] == 1
    assert found["tests/parallel/test_engine.py"] == 3
    assert found["tests/test_programs.py"] > FAR
    found = small.by(["src/lockstep/formats/onnx.py"])
    assert (found["tests/formats/test_find.py"], found["tests/test_programs.py"]) == (2, 3)  # by the command it starts
    assert small.by(["tests/core/test_tree.py", "src/lockstep/core/tree.py"])["tests/core/test_tree.py"] == 0


@pytest.fixture(scope="module")
def ours() -> Reach:
    return Reach(ROOT)


def slow(reach: Reach, *changed: str) -> set[str]:
    return {file for file in reach.by(changed) if has_slow_tests(file)}


def test_a_change_in_core_selects_all_its_users(ours: Reach) -> None:
    found = slow(ours, "src/lockstep/core/tree.py")
    engines = {file for file in ours.test_files() if "import worlds" in (ROOT / file).read_text(encoding="utf-8")}
    assert found > {file for file in engines if has_slow_tests(file)} > set()
    assert {"tests/commands/test_train.py", "tests/launchers/test_real.py", "tests/faults/test_faults.py"} < found


def test_a_change_in_docs_selects_none(ours: Reach) -> None:
    assert slow(ours, "docs/design.md", "docs/limits.md", "README.md") == set()


def test_a_change_in_the_changelog_selects_the_release_that_checks_it(ours: Reach) -> None:
    assert slow(ours, "CHANGELOG.md") == {"tests/test_release.py"}


def test_a_change_in_exports_selects_the_tests_of_exports_and_of_commands(ours: Reach) -> None:
    found = slow(ours, "src/lockstep/exports/to_onnx.py")
    assert {"tests/commands/test_export.py", "tests/commands/test_train.py", "tests/test_library.py"} < found
    engines = ("tests/comm/test_world.py", "tests/parallel/test_same_bits.py", "tests/parallel/tensor/test_slices.py")
    assert found.isdisjoint(engines)
    assert all(has_slow_tests(file) for file in engines)


def test_each_strategy_reaches_the_engines_tests(ours: Reach) -> None:
    """They are imported by their names alone."""
    for name in ("ddp", "zero3", "pipeline"):
        assert "tests/parallel/test_same_bits.py" in ours.by([f"src/lockstep/strategies/{name}.py"])


def test_each_module_is_reached_by_a_test(ours: Reach) -> None:
    modules = [path.relative_to(ROOT).as_posix() for path in (ROOT / "src/lockstep").rglob("*.py")]
    assert [module for module in modules if not ours.by([module])] == []
