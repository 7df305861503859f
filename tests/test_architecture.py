"""The shape of the code: who may import whom, what is forbidden everywhere, and how long functions are."""

import ast
import re
import statistics
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import lockstep

ROOT = Path(lockstep.__file__).parent
MODULES = {path.relative_to(ROOT).with_suffix("").as_posix(): path for path in sorted(ROOT.rglob("*.py"))}

# What each folder may import of ours, beside itself: folders, or single modules.
ALLOWED = {
    "common": [],
    "core": [],
    "config": ["core", "strategies/__init__"],
    "device": ["core"],
    "comm": ["core", "device"],
    "ranks": ["core", "device", "comm"],
    "tasks": ["core"],
    "data": ["core", "tasks"],
    "models": ["core", "tasks", "device/cached_tensors", "device/kernels", "device/meta"],
    "parallel": ["core", "device", "comm", "tasks"],
    "strategies": ["core", "device", "comm", "tasks", "parallel"],
    "training": ["core", "device", "comm", "ranks", "tasks", "data", "parallel/engine"],
    "launchers": ["core"],
    "checkup": ["core", "device", "comm", "ranks", "launchers"],
    "reporting": ["core", "training/events"],
    "runs": ["config/recorded", "device", "ranks", "tasks/base", "training", "reporting"],
    "setup": [
        *("core", "config", "device", "comm", "ranks", "tasks", "data", "models", "parallel", "strategies"),
        *("training", "reporting/jsonl", "reporting/wording", "runs"),
    ],
    "probe": [
        *("core", "config", "device", "comm", "ranks", "tasks", "data", "models", "parallel", "training"),
        *("reporting/verification", "setup"),
    ],
    "run": [
        *("core", "config", "device", "comm", "ranks", "tasks", "data", "parallel", "strategies"),
        *("training", "reporting"),
        *("launchers", "setup", "runs", "probe"),
    ],
    "loop": [
        *("core", "config", "device", "comm", "ranks", "tasks", "data", "models", "parallel", "strategies"),
        *("training", "reporting"),
        *("launchers", "setup", "runs", "probe", "run"),
    ],
    "comparison": ["config", "strategies/__init__", "training", "reporting", "setup", "runs", "run"],
    "jobs": ["core", "config", "ranks/secret", "launchers", "training", "reporting", "setup", "runs", "loop/script"],
    "inference": [
        *("core", "config", "device", "comm/named_sums", "comm/world", "tasks", "data", "models"),
        *("parallel/numerics", "parallel/weights"),
        *("training", "reporting", "setup", "runs", "run", "jobs/reader"),
    ],
    "exports": ["core", "config", "tasks", "data", "models", "training", "setup", "runs", "run", "inference"],
    "replay": [
        *("core", "config", "device", "comm", "ranks", "tasks", "data", "parallel", "training", "reporting"),
        *("setup", "runs", "run", "loop/replaying", "loop/examination"),
    ],
    "planning": [
        *("core", "config", "device", "comm", "ranks", "parallel/engine", "training/digests", "training/loop"),
        *("training/progress", "training/turn", "strategies"),
        *("setup", "runs", "run"),
    ],
    "verification": [
        *("core", "config", "device", "comm", "ranks", "tasks", "data", "models", "parallel", "strategies"),
        *("training", "reporting"),
        *("setup", "runs", "probe", "run", "loop"),
    ],
}
# For all, and themselves using nothing else.
FREE = ["errors", "common", "__init__"]
WITHOUT_TORCH = ["cli", "errors", "common", "config", "launchers", "training/events"]
# Where it is known what is learned from what, as few places as can be: the rest knows batches, weights and figures.
ROOMS = {
    "tasks": "what is learned",
    "models": "what learns it",
    "data/images": "samples that are images",
    "data/text": "samples that are text",
    "data/tables/table": "its option `kind` says what a column is to become",
    "data/sources": "the names of data sets, which users type",
    "data/request": "keys of a recipe, as the sources of data get them",
    "config/recipe": "keys of a recipe, which users type",
    "config/naming": "the same keys, of which some go with a name",
    "config/elsewhere": "the same of other frameworks",
    "config/shipped": "the names of recipes, which users type",
    "run/sinks": "a token is a secret there, by the name of an option",
    "runs/storage": "the same, by the name of a variable",
    "inference": "what a task makes of new samples",
    "exports": "what other programs call it",
    "commands/predict": "options, which users type",
    "commands/export": "what of a run is exported, told to users",
    "commands/prepare": "what of the data is decoded, told to users",
    "commands/report": "what of a run is shown, told to users",
    "commands/submit": "an image is a container's there, by the name of an option",
    "launchers/kubernetes": "the same",
    "device/kernels": "torch's operations, by their names and by what they are called for",
}
# `class` and `label` alone are Python's and a message's, and cannot be told apart; what goes with them is enough.
WORDS_OF_TASKS = re.compile(
    r"(?<![a-z])(images?|pictures?|pixels?|crops?|classes|classif[a-z]*|labels|label_smoothing|num_class|class_weights?"
    r"|top_?[k15]|accurac(?:y|ies)|perplexit(?:y|ies)|segmentation|tokens?(?!_hex)|tokenizers?|vocabular(?:y|ies))(?![a-z])"
)
# The library: what a loop of the user's own needs. It should not need the application, which trains recipes. What it
# imports of it still is listed here; nothing is added.
LIBRARY = [
    "common",
    "core",
    "device",
    "comm",
    "ranks",
    "launchers",
    "parallel",
    "strategies",
    "training",
    "loop",
    "runs",
]
APPLICATION = [
    *("config/recipe", "config/load", "config/key_conflicts", "setup", "probe", "models", "tasks", "run/events"),
    *("run/training", "run/evaluation", "run/rank_training", "reporting/verification"),
]
FOR_ALL = ["tasks/base"]  # the words for batches and figures
STILL_NEEDED = {
    "loop/chunk_check": ["setup/chunk_check"],
    "loop/dataset_check": ["probe/probe"],
    "loop/distributed_model": ["models/check", "setup/chunking", "setup/strategy"],
    "loop/model_check": ["models/check"],
    "loop/run": ["setup/strategy"],
}
SHARED_BY_LAUNCHERS = {
    f"launchers/{name}" for name in ("agents", "base", "environment", "hostlist", "job", "variables")
}
LAUNCHERS_OF_TWO_FILES = {"launchers/batch": "launchers/slurm", "launchers/kubernetes": "launchers/node"}
FORBIDDEN_WORDS = ["manager", "helper", "util", "misc", "handler"]


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


@cache
def nodes(module: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree(module)))


@cache
def imported(module: str, only_at_import: bool = False) -> set[str]:
    """Return all modules that a module imports, anywhere in it, by their dotted names."""
    found: set[str] = set()
    for node in _run_at_import(tree(module)) if only_at_import else nodes(module):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def ours(module: str) -> set[str]:
    """Return those of our modules that a module imports, as paths below the package.

    Of the package itself without what it imports for type checkers: it has public names from everywhere.
    """
    found = imported(module, only_at_import=module == "__init__")
    names = {name.removeprefix("lockstep").removeprefix(".") for name in found if _inside(name, "lockstep")}
    return {_path(name) for name in names} - {module}


def _path(name: str) -> str:
    path = name.replace(".", "/")
    while path and path not in MODULES and f"{path}/__init__" not in MODULES:
        path = path.rpartition("/")[0]
    return path if path in MODULES else f"{path}/__init__".lstrip("/")


def _inside(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def _within(module: str, place: str) -> bool:
    return module == place or module.startswith(f"{place}/")


def _run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes that are executed when the module is imported; `if TYPE_CHECKING:` is not."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and child in node.body:
            continue
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        yield from _run_at_import(child)


def in_folder(folder: str) -> list[str]:
    return [module for module in MODULES if _within(module, folder)]


def test_the_modules_are_found() -> None:
    """Otherwise every test below would hold."""
    assert len(MODULES) > 50
    assert {module.partition("/")[0] for module in MODULES if "/" in module} - {"commands"} <= ALLOWED.keys()
    assert {"core/tree", "core/reduction"} <= ours("comm/canonical")
    assert "torch.distributed" in imported("comm/carrier")
    assert "lockstep.config.load.load" in imported("commands/_recipe")
    assert "lockstep.config.load.load" not in imported("commands/_recipe", only_at_import=True)


@pytest.mark.parametrize("folder", ALLOWED)
def test_imports_run_one_way(folder: str) -> None:
    allowed = [folder, *ALLOWED[folder], *FREE]
    wrong = {
        module: others
        for module in in_folder(folder)
        if (others := {each for each in ours(module) if not any(_within(each, place) for place in allowed)})
    }
    assert not wrong


def test_the_library_needs_no_more_of_the_application() -> None:
    def inside(module: str, rooms: list[str]) -> bool:
        return any(_within(module, room) for room in rooms)

    more = {
        module: others
        for module in MODULES
        if inside(module, LIBRARY)
        and (others := [each for each in ours(module) if inside(each, APPLICATION) and not inside(each, FOR_ALL)])
        and (others := sorted({*others} - {*STILL_NEEDED.get(module, ())}))
    }
    assert not more, "a training loop of one's own should not need what trains recipes: pass plain values instead"


def test_what_all_may_import_imports_little() -> None:
    for module in (module for place in FREE for module in in_folder(place)):
        assert all(any(_within(each, place) for place in FREE) for each in ours(module)), module


def test_strategies_know_no_siblings_and_launchers_only_what_they_share() -> None:
    for module in in_folder("strategies"):
        siblings = [each for each in ours(module) if _within(each, "strategies") and each != "strategies/base"]
        assert not siblings, module
    for module in in_folder("launchers"):
        if not module.endswith("__init__"):
            own = {LAUNCHERS_OF_TWO_FILES[module]} if module in LAUNCHERS_OF_TWO_FILES else set()
            assert {each for each in ours(module) if _within(each, "launchers")} <= SHARED_BY_LAUNCHERS | own, module


def test_no_two_modules_import_each_other() -> None:
    pairs = [(one, other) for one in MODULES for other in ours(one) if one < other and one in ours(other)]
    assert not pairs


@pytest.mark.parametrize("place", WITHOUT_TORCH)
def test_what_must_be_light_imports_no_torch(place: str) -> None:
    heavy = ("torch", "torchvision", "timm", "tensorboard")
    for module in in_folder(place):
        reached = {module, *_reached_at_import(module)}
        for each in reached:
            names = imported(each, only_at_import=True)
            assert not [name for name in names if any(_inside(name, package) for package in heavy)], (module, each)


def _reached_at_import(module: str) -> set[str]:
    found: set[str] = set()
    waiting = [module]
    while waiting:
        names = imported(waiting.pop(), only_at_import=True)
        below = {_path(name.removeprefix("lockstep").removeprefix(".")) for name in names if _inside(name, "lockstep")}
        waiting += below - found
        found |= below
    return found


def test_commands_are_listed_without_torch() -> None:
    """`lockstep --help` imports every command."""
    for module in in_folder("commands"):
        name = module.rpartition("/")[2]
        if not name.startswith("_") or name == "__init__":
            names = imported(module, only_at_import=True)
            assert not [each for each in names if _inside(each, "torch") or _inside(each, "timm")], module


def test_torch_distributed_is_behind_one_door() -> None:
    users = {module for module in MODULES for name in imported(module) if _inside(name, "torch.distributed")}
    users |= {
        module for module in MODULES if any("torch.distributed" in ast.unparse(each) for each in _attributes(module))
    }
    assert users
    assert all(any(_within(module, room) for room in ("comm", "ranks", "device")) for module in users)


def test_core_is_arithmetic() -> None:
    """No files, clocks, processes or logging; torch only where a tensor is computed with."""
    forbidden = ("os", "io", "pathlib", "time", "datetime", "logging", "subprocess", "socket", "threading", "random")
    for module in in_folder("core"):
        assert not [name for name in imported(module) if any(_inside(name, each) for each in forbidden)], module
        assert "open" not in {_callee(call) for call in _calls(module)}, module


def test_only_what_puts_a_run_together_reads_the_configuration() -> None:
    users = {module for module in MODULES if any(_within(each, "config") for each in ours(module))}
    allowed = (
        "commands",
        "setup",
        "runs",
        "probe",
        "run",
        "loop",
        "jobs",
        "comparison",
        "inference",
        "exports",
        "replay",
        "planning",
        "verification",
        "testing",
        "ray",
        "config",
    )
    assert all(any(_within(module, place) for place in allowed) for module in users)


def test_names_say_what_a_thing_is() -> None:
    for module in MODULES:
        names = {module.lower(), *(name.lower() for name in _defined(module))}
        assert not [(name, word) for name in names for word in FORBIDDEN_WORDS if word in name], module


def test_what_is_learned_is_known_in_few_rooms() -> None:
    """Names, strings and comments; where the rest speaks of images, classes or tokens it works for one task only."""
    found = {module: words for module in MODULES if (words := _words_of_tasks(MODULES[module].read_text("utf-8")))}
    strangers = {m: words for m, words in found.items() if not any(_within(m, room) for room in ROOMS)}
    assert not strangers
    assert not [room for room in ROOMS if not any(_within(module, room) for module in found)]  # none too many


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ImageFinish(topk=1)", ["image", "topk"]),
        ("facts.get('classes')  # of N_TOKENS", ["classes", "tokens"]),
        ("from lockstep.data.images import base  # see data/images/base.py", []),
        ("class Label: ClassVar; secrets.token_hex(8); stoken", []),
    ],
)
def test_words_of_tasks_are_found(text: str, words: list[str]) -> None:
    assert _words_of_tasks(text) == words


def _words_of_tasks(text: str) -> list[str]:
    """Return the words of tasks in a source, but for the names of our own modules."""
    text = re.sub(r"\blockstep(\.\w+)+|(\w+/)+\w+\.py\b", "", text)
    return WORDS_OF_TASKS.findall(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", text).lower())


def test_our_code_is_not_inherited() -> None:
    """Nobody reads two classes to know what one does; errors and events have none, sections only refuse keys."""
    classes = [(m, node) for m in MODULES for node in nodes(m) if isinstance(node, ast.ClassDef)]
    names = {node.name for _, node in classes}
    assert len(names) > 40
    for module, node in classes:
        foreign = {name.rpartition(".")[2] for name in imported(module) if not _inside(name, "lockstep")}
        inherited = {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases} & names - foreign
        promises = any(ast.unparse(base) == "Protocol" for base in node.bases)  # and no code
        plain = all(base.endswith("Error") or base in ("Section", "_Event") for base in inherited)
        assert promises or plain, f"{node.name} of {inherited}"


def test_attributes_are_known_not_asked_for() -> None:
    for module in MODULES:
        assert "hasattr" not in {_callee(call) for call in _calls(module)}, module


def test_nothing_happens_on_import() -> None:
    """Modules and classes only define, and name values: plain ones, or made by a class or by a pure function."""
    pure = {
        "frozenset",
        "re.compile",
        "random.make_key",
        "field",
        "Path(__file__).with_name",
        "make_shorthand_validator",
        "_make_backward_entry",
    }
    for module in MODULES.keys() - {"__main__"}:
        for node in _statements(tree(module)):
            where = f"{module}:{node.lineno}: {ast.unparse(node)}"
            assert not isinstance(node, ast.For | ast.While | ast.With | ast.Try), where
            assert not isinstance(node, ast.Expr) or isinstance(node.value, ast.Constant), where
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                called = {ast.unparse(each.func) for each in _run_at_import(node.value) if isinstance(each, ast.Call)}
                assert all(name in pure or _is_class(name) for name in called), where


def _statements(node: ast.Module | ast.ClassDef) -> Iterator[ast.stmt]:
    for each in node.body:
        yield each
        if isinstance(each, ast.ClassDef):
            yield from _statements(each)


def _is_class(name: str) -> bool:
    return name.rpartition(".")[2].lstrip("_")[0].isupper()


def test_modules_say_what_they_are() -> None:
    assert not [module for module in MODULES if not ast.get_docstring(tree(module))]


def test_every_room_is_a_package() -> None:
    """What is installed, and checked by mypy, are the folders that have an `__init__.py`; git may have ignored one."""
    folders = {module.rpartition("/")[0] for module in MODULES}
    assert [folder for folder in sorted(folders) if f"{folder}/__init__".lstrip("/") not in MODULES] == []


def test_options_have_names() -> None:
    """Nothing is taken as **kwargs, and so nothing is passed on unseen."""
    functions = [node for module in MODULES for node in nodes(module) if isinstance(node, ast.FunctionDef)]
    taken = [node.name for node in functions if node.args.kwarg is not None]
    # The names of the user's figures, and those of the forward of a model, a block or a layer.
    assert sorted(taken) == ["__call__", "_call", "_recompute", "log", "sum"]


def test_no_two_tests_have_one_file_name() -> None:
    """pytest imports them by that name alone, and collects none of the second."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert len(names) == len(set(names)), sorted({name for name in names if names.count(name) > 1})


def test_what_is_imported_of_ours_is_there() -> None:
    """In benchmarks, scripts and tests too, most of which are not imported by the quick tests."""
    places = [*Path(__file__).parent.rglob("*.py"), *(ROOT.parents[1] / "benchmarks").glob("*.py")]
    scripts = [
        path
        for path in (ROOT.parents[1] / "scripts").iterdir()
        if path.is_file() and path.read_bytes().startswith(b"#!/usr/bin/env python3")
    ]
    missing = [
        f"{path.name}: {node.module}.{alias.name}"
        for path in [*places, *scripts]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "lockstep"
        for alias in node.names
        if not _is_there(str(node.module), alias.name)
    ]
    assert scripts
    assert missing == []


@cache
def _is_there(module: str, name: str) -> bool:
    try:
        return hasattr(import_module(module), name) or find_spec(f"{module}.{name}") is not None
    except ImportError:  # no such module, or one that holds no others
        return False


def test_functions_are_short() -> None:
    lengths = [
        (node.end_lineno or 0) - node.lineno + 1
        for module in MODULES
        for node in nodes(module)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert statistics.median(lengths) <= 13
    assert sum(length > 50 for length in lengths) <= 0.08 * len(lengths)


def _calls(module: str) -> Iterator[ast.Call]:
    return (node for node in nodes(module) if isinstance(node, ast.Call))


def _callee(call: ast.Call) -> str:
    return ast.unparse(call.func)


def _attributes(module: str) -> Iterator[ast.Attribute]:
    return (node for node in nodes(module) if isinstance(node, ast.Attribute))


def _defined(module: str) -> Iterator[str]:
    for node in nodes(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
