"""What is used of torch that no release promises to keep, each with its reason and the test that fails without it.

A name is private where a part of it begins with an underscore. Of attributes only the name is seen, not what they are
of: those that a class of ours has too are looked for where it stands in RECORDS.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import pytest

import lockstep

TESTS: Final = Path(__file__).parent
SRC: Final = Path(lockstep.__file__).parent
MODULES: Final = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SRC.rglob("*.py"))]

# Private names of torch and torchvision: what they are used for, and the file of tests that goes through that use.
INTERNALS: Final = {
    name: (reason, tests)
    for line in (TESTS / "torch_internals.txt").read_text(encoding="utf-8").splitlines()
    if line.count(" | ") == 2
    for name, reason, tests in [line.split(" | ")]
}
# Of other libraries, and words that are no names of theirs.
OTHERS: Final = {
    *("_asdict", "_current_frames", "_exit", "_fields", "_getframe", "_replace"),  # Python
    *("_hp_mapping", "_reassign_or_swap_out_partitioned_parameters"),  # DeepSpeed
    "_model_mapping",  # transformers
    "_disable_adapters",  # peft
    *("_distributed", "_epoch", "_ex_iterable", "_formatting", "_starting_state_dict"),  # datasets
    *("_number_of_shards_in_gen_kwargs", "_split_gen_kwargs"),  # datasets
    "_pytest",  # the name of a library
    *("_32x4d", "_EnterBackward", "_dir", "_get_", "_hooks", "_hooks_", "_snapshot", "_test", "_token"),
}
# What modules of torch keep by these names, in strings or of another object than self.
RECORDS: Final = {"_parameters", "_buffers", "_modules"}


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


@cache
def _ours() -> frozenset[str]:
    """Return what our own modules and classes define by private names."""
    found = set()
    for node in (node for module in MODULES for node in ast.walk(module)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if ast.unparse(node.value) == "self" else set()
    return frozenset(found - RECORDS)


def _used(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        match node:
            case ast.Import(names=names):
                yield from (each.name for each in names if _of_torch(each.name))
            case ast.ImportFrom(module=str(place), names=names) if _of_torch(place):
                yield from (f"{place}.{each.name}" for each in names)
            case ast.Attribute() if _of_torch(_dotted(node)):
                yield _dotted(node)
            case ast.Attribute(attr=name, value=ast.Name(id="self")):
                pass
            case ast.Attribute(attr=name) | ast.Constant(value=str(name)) if name.isidentifier():
                yield name if name.startswith("_") and name not in _ours() | OTHERS else ""


def _dotted(node: ast.expr) -> str:
    """Return a name and what is after its dots, "" of anything else."""
    if isinstance(node, ast.Attribute):
        return f"{before}.{node.attr}" if (before := _dotted(node.value)) else ""
    return node.id if isinstance(node, ast.Name) else ""


def _of_torch(name: str) -> bool:
    return name.partition(".")[0] in ("torch", "torchvision")


def used() -> set[str]:
    """Return the private names of torch that our modules use, each as far as it is written."""
    found = {name for module in MODULES for name in _used(module) if name and _is_private(name)}
    found = {name for name in found if not name.startswith("__")}
    # `torch._C` and `torch._C._autograd` are only the way to what is used of them.
    return {name for name in found if not any(other.startswith(f"{name}.") for other in found) or name in INTERNALS}


def test_what_is_used_of_torch_without_a_promise_is_listed() -> None:
    assert used() == INTERNALS.keys()


@pytest.mark.parametrize("name", INTERNALS)
def test_each_names_the_tests_that_fail_without_it(name: str) -> None:
    reason, tests = INTERNALS[name]
    assert reason
    assert (TESTS / tests).is_file()
