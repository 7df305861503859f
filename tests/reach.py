"""Which test files a change reaches: those that import what has changed, directly or through others, or name it.

Imports are read, not run. Three more kinds of edge make up for what an import statement does not show:

- A test that starts programs, executes text, or calls what runs commands and scripts may need all of src/lockstep.
  What the commands import that it names is near to it, everything else is far.
- A module named in a string is imported by that name: `"lockstep.models.gpt:GPT"`, or a whole package by
  `f"lockstep.strategies.{name}"`. A package that is imported itself reaches its modules, as `pkgutil` would list them.
- Any other file, such as a page, a recipe or a program, is reached by those who name it in a string.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final, Self

PACKAGE: Final = "src/lockstep"
# A change to one of them may change the outcome of any test.
FOR_ALL: Final = ("pyproject.toml", "tests/conftest.py", f"{PACKAGE}/__init__.py")
_FOLDERS: Final = (PACKAGE, "tests", "benchmarks", "scripts", "examples", "tutorial")
_TOPS: Final = (
    "src/",
    "",
    "tests/",
    "tests/shared/",
    "tests/commands/",
    "scripts/",
)  # where `import name` is looked for
_STARTERS: Final = frozenset({"subprocess", "runpy"})
# What runs commands and users' scripts, here or in processes of their own, which may import anything of ours.
_RUN_COMMANDS: Final = ("cli.py", "__main__.py", "jobs/", "replay/", "verification/")
_NAMED: Final = re.compile(r"\blockstep((?:\.\w+)+)(\.?)")
_WORD: Final = re.compile(r"(?:scripts/)?[\w-]+(?:\.\w+)+|scripts/[\w-]+|\b\w+:(?=\w)")  # a.md, scripts/size, nets:Mlp
_INDEX: Final = re.compile(
    r"README(\.zh)?\.md"
)  # of every folder: who names it means the one of a folder it goes through
_ANY: Final = "any module of ours"  # stands between all of them and those who may need any
FAR: Final = 100  # imports: more than any way has
_GONE_THROUGH: Final = ("examples", "tutorial")  # folders that tests go through without naming each file


class Reach:
    """The graph of a working tree: an edge from each Python file to the files that it needs."""

    def __init__(self, root: Path) -> None:
        self._files = dict(_python_files(root))
        self._modules = [name for name in self._files if name.startswith(f"{PACKAGE}/")]
        self._helpers = {PurePosixPath(name).stem: name for name in self._files if name.startswith("tests/")}
        commands = [name for name in self._modules if name.startswith(f"{PACKAGE}/commands/")]
        self._commands = {PurePosixPath(name).stem.rstrip("_").replace("_", "-"): name for name in commands}
        sources = {name: Source.read(path) for name, path in self._files.items()}
        self._public = self._public_names(sources.get(f"{PACKAGE}/__init__.py"))
        self._named_in: defaultdict[str, set[str]] = defaultdict(set)
        self._needed_by: defaultdict[str, set[str]] = defaultdict(set)
        for name in self._modules:
            self._needed_by[name].add(_ANY)
        for name, source in sources.items():
            if not name.startswith(f"{PACKAGE}/"):  # what a message names is not read
                uses_scripts = "scripts" in source.strings or "component.script" in source.imported
                for text in source.strings:
                    words = {text, *_WORD.findall(text), *([f"scripts/{text}"] if uses_scripts else ())}
                    for word in words:
                        self._named_in[word].add(name)
            for needed in self._needs(name, source):
                self._needed_by[needed].add(name)

    def test_files(self) -> list[str]:
        """Return all test files, as paths from the root."""
        return sorted(name for name in self._files if name.startswith("tests/") and _is_test(name))

    def by(self, changed: Iterable[str]) -> dict[str, int]:
        """Return the test files that changed files reach, each with the number of imports on the shortest way.

        It is FAR or more if a test may need any module, and names no command that leads to the change. Paths are
        relative to the root. A changed file need not exist any more.
        """
        changed = [*changed]
        if any(name in FOR_ALL for name in changed):
            return dict.fromkeys(self.test_files(), 1)
        distance = dict.fromkeys(changed, 0)
        self._follow(distance)
        if any(_ANY in self._needed_by[name] for name in [*distance]):
            distance[_ANY] = FAR
            self._follow(distance)
        return {name: distance[name] for name in self.test_files() if name in distance}

    def _follow(self, distance: dict[str, int]) -> None:
        """Add to files with their distance from a change those that need them, but for what may need any module."""
        waiting = deque(distance)
        while waiting:
            name = waiting.popleft()
            for user in (self._needed_by[name] | self._named_by(name)) - {_ANY}:
                if user not in distance:
                    distance[user] = distance[name] + 1
                    waiting.append(user)

    def _needs(self, name: str, source: Source) -> set[str]:
        """Return what a file needs: by its imports, by the names of modules in its strings, and by what it starts."""
        needed = {file for dotted in source.imported for file in self._imports(name, dotted)}
        needed |= {self._public.get(attribute, f"{PACKAGE}/__init__.py") for attribute in source.of_lockstep}
        for text in source.strings:
            for found in _NAMED.finditer(text):
                needed |= {*self._named_module(found[1][1:], open_ended=bool(found[2]) and text.endswith(found[0]))}
        if name.startswith("tests/"):
            needed |= {*self._conftests(name)}
        if not name.startswith(f"{PACKAGE}/") and (source.starts_programs or any(map(_runs_commands, needed))):
            needed.add(_ANY)
        if name.startswith("tests/") and (_ANY in needed or not needed.isdisjoint(self._conftests(name))):
            first_words = {text.split(maxsplit=1)[0] for text in source.strings if text.strip()}
            needed |= {file for command, file in self._commands.items() if command in first_words}
        return needed

    def _imports(self, importer: str, dotted: str) -> Iterator[str]:
        """Yield the file of a module that is imported, or of the one that has this name, and all of a package."""
        if dotted == "lockstep":
            return
        if dotted.startswith("lockstep.") and dotted.removeprefix("lockstep.") in self._public:
            yield self._public[dotted.removeprefix("lockstep.")]
            return
        parts = dotted.split(".")
        for top in (f"{PurePosixPath(importer).parent}/", *_TOPS):
            for count in range(len(parts), 0, -1):
                base = top + "/".join(parts[:count])
                if f"{base}.py" in self._files:
                    yield f"{base}.py"
                    return
                if f"{base}/__init__.py" in self._files and base != PACKAGE:
                    yield f"{base}/__init__.py"
                    if count == len(parts):
                        yield from self._inside(f"{base}/")
                    return
        if parts[0] in self._helpers:
            yield self._helpers[parts[0]]

    def _named_module(self, dotted: str, *, open_ended: bool) -> Iterator[str]:
        """Yield the module of ours that a string names, or all whose names it begins; `a.b.name` is of module `a.b`."""
        base = f"{PACKAGE}/{dotted.replace('.', '/')}"
        if f"{base}.py" in self._files:
            yield f"{base}.py"
        elif open_ended or f"{base}/__init__.py" in self._files:
            yield from self._inside(f"{base}/")
        elif begun := [*self._inside(base)]:
            yield from begun
        elif "." in dotted:
            yield from self._named_module(dotted.rpartition(".")[0], open_ended=False)

    def _public_names(self, package: Source | None) -> dict[str, str]:
        """Return the modules of the names that the package itself has."""
        imported = package.imported if package else ()
        modules = {each.rpartition(".")[2]: each.rpartition(".")[0].replace(".", "/") for each in imported}
        return {name: f"src/{module}.py" for name, module in modules.items() if f"src/{module}.py" in self._files}

    def _inside(self, prefix: str) -> Iterator[str]:
        return (name for name in self._files if name.startswith(prefix))

    def _conftests(self, name: str) -> Iterator[str]:
        for folder in PurePosixPath(name).parents:
            if (conftest := f"{folder}/conftest.py") in self._files and conftest not in (name, "tests/conftest.py"):
                yield conftest

    def _named_by(self, name: str) -> set[str]:
        """Return the Python files that name a file: with its suffix or, of a program or a module of tests, without."""
        path = PurePosixPath(name)
        if name.startswith(f"{PACKAGE}/"):
            return {*self._modules} if path.suffix != ".py" else set()  # what comes with the package may be read by all
        words = set[str]() if _INDEX.fullmatch(path.name) or _is_test(name) else {path.name}
        if path.parts[0] == "scripts":
            words = {path.name, f"scripts/{path.name}"} if path.suffix else {f"scripts/{path.name}"}
        elif path.parts[0] == "tests" and path.suffix == ".py" and not _is_test(name):
            words |= {path.stem, f"{path.stem}:"}
        if path.parts[0] in _GONE_THROUGH:
            words.add(path.parts[0])
        return {user for word in words for user in self._named_in[word]} - {name}


@dataclass(frozen=True)
class Source:
    """What is read of a Python file: names that it imports, attributes of `lockstep`, strings but for docstrings."""

    imported: frozenset[str]
    of_lockstep: frozenset[str]
    strings: frozenset[str]
    starts_programs: bool  # or executes text

    @classmethod
    def read(cls, path: Path) -> Self:
        """Parse a file."""
        imported, attributes, strings, documented = set[str](), set[str](), set[str](), set[int]()
        executes = False
        names = attributes_of = 0  # how often the name `lockstep` is used, and how often for an attribute
        for node in ast.walk(ast.parse(path.read_bytes())):  # an expression before the constant that it is
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "lockstep":
                attributes.add(node.attr)
                attributes_of += 1
            elif isinstance(node, ast.Name) and node.id == "lockstep":
                names += 1
            elif isinstance(node, ast.Name) and node.id == "exec":
                executes = True
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                documented.add(id(node.value))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
                strings.add(node.value)
        if names > attributes_of and "lockstep" in imported:
            attributes.add("")  # the package itself, of which any name may be asked
        starts = executes or not imported.isdisjoint(_STARTERS)
        return cls(frozenset(imported), frozenset(attributes), frozenset(strings), starts)


def _python_files(root: Path) -> Iterator[tuple[str, Path]]:
    for folder in _FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            program = path.parent.name == "scripts" and not path.suffix and path.is_file()
            if path.suffix == ".py" or (program and path.read_bytes().startswith(b"#!/usr/bin/env python3")):
                yield path.relative_to(root).as_posix(), path


def _is_test(name: str) -> bool:
    return PurePosixPath(name).name.startswith("test_")


def _runs_commands(name: str) -> bool:
    return name.startswith(tuple(f"{PACKAGE}/{place}" for place in _RUN_COMMANDS))
