"""Loads a configuration from a YAML file or a shipped recipe, with overrides. All problems are reported together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any, Final, Self

from pydantic import ValidationError

from lockstep.common import plainfile
from lockstep.common.names import format_choices, format_suggestion
from lockstep.common.text import printable_line
from lockstep.config import key_conflicts, wording, write
from lockstep.config.base import section_to_dict
from lockstep.config.document import UNREADABLE, Document, KeyProblem, Path, SourcePosition, format_key, parse
from lockstep.config.earlier_defaults import keep_earlier_defaults
from lockstep.config.naming import drop_obsolete_values
from lockstep.config.overrides import SHORTHAND_KEYS, apply_overrides
from lockstep.config.recipe import Recipe, find_keys_without_effect
from lockstep.config.recorded import drop_locations
from lockstep.config.schema import Config
from lockstep.config.shipped import list_shipped_recipes
from lockstep.errors import ConfigError

_MAX_BYTES: Final = 1 << 18  # larger files are rejected, because they would take long to parse


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A valid configuration, the name of its recipe, and the origin of each value by dotted key.

    An origin is `file:line:column`, `override` or `default`. Keys with the value None have no origin. `notes` contains
    messages for the user about values that an override removed, and about values that have no effect.
    """

    config: Config
    name: str
    origins: Mapping[str, str]
    notes: Sequence[str] = ()

    def replace_values(self, section: str, values: Mapping[str, Any]) -> Self:
        """Return a copy with new values in a section. The new values aren't validated."""
        update = {section: getattr(self.config, section).model_copy(update=values)}
        return replace(self, config=self.config.model_copy(update=update))


def split_arguments(arguments: Sequence[str], default_recipe: str = "digits") -> tuple[str, Sequence[str]]:
    """Split the command-line arguments `[RECIPE] [key=value ...]` into the recipe and the overrides.

    The recipe defaults to `default_recipe`. If the first argument is the name of a file, it is a recipe even if it
    contains `=`.
    """
    if arguments and ("=" not in arguments[0] or _is_file(arguments[0])):
        return arguments[0], arguments[1:]
    return default_recipe, arguments


def _is_file(word: str) -> bool:
    try:
        return FilePath(word).is_file()
    except OSError:  # an override can be longer than the maximum length of a file name
        return False


def load(source: str, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Load a YAML file, or a shipped recipe by name, and apply the overrides `a.b=value` in order.

    Raises ConfigError with a list of all problems, one per line: `location  key: problem; fix`.
    """
    if recipe := list_shipped_recipes().get(source):
        label = recipe.file.name
        document = recipe.apply_to(_parse_mapping(_read_text(recipe.file, label), label))
        return _load_document(document, source, overrides, splits_steps=True)
    return _load_document(read_document(source), FilePath(source).stem, overrides, splits_steps=True)


def read_document(source: str) -> Document:
    """Parse a user-provided YAML file. Raises ConfigError if the file can't be read."""
    return _parse_mapping(_read_text(_find_file(source), source), source)


def load_text(
    text: str, label: str, name: str, overrides: Sequence[str] = (), *, splits_steps: bool = True
) -> LoadedConfig:
    """Load a configuration from YAML or JSON text.

    - `label`: The file name for messages.
    - `name`: The name of the recipe.
    - `splits_steps`: Whether the micro-batches of a step are split across processes. If False, as in an evaluation,
      there can be more processes than micro-batches.
    """
    return _load_document(_parse_mapping(text, label), name, overrides, splits_steps)


def _load_document(
    original_document: Document, config_name: str, overrides: Sequence[str], splits_steps: bool
) -> LoadedConfig:
    document = apply_overrides(original_document, overrides)
    drop_notes = drop_obsolete_values(original_document, document)
    keep_earlier_defaults(document)
    config = _validate(document, splits_steps)
    origins = {
        format_key(path): _find_origin(path, document) for path, _ in write.iterate_leaves(section_to_dict(config))
    }
    return LoadedConfig(config, config_name, origins, [*drop_notes, *find_keys_without_effect(config.recipe)])


def read_run_recipe(config: FilePath) -> Recipe:
    """Return the recipe of a run. `config` is the path of its config.yaml, which an earlier version may have written.

    The file may come from an untrusted user, so symbolic links aren't followed, and opening a named pipe doesn't block.
    Raises ConfigError if the file can't be read or is invalid.
    """
    try:
        text = plainfile.read_bytes(config, _MAX_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            [f"{config}: cannot be read: {error.strerror if isinstance(error, OSError) else 'not UTF-8'}"]
        ) from error
    return _validate(_parse_mapping(text, str(config)), splits_steps=True).recipe


def to_yaml(loaded: LoadedConfig) -> str:
    """Return the full configuration as YAML, with the origin of each value as a comment. `load` can read the result."""
    return "\n".join(write.format_block(section_to_dict(loaded.config), loaded.origins)) + "\n"


def list_recipe_differences(run_recipe: Mapping[str, Any], current_recipe: Mapping[str, Any]) -> list[str]:
    """Return a line for each key that differs between two recipes, such as `seed: 0 in the run, 1 now`."""
    before, after = (
        {path: write.format_flow(value) for path, value in write.iterate_leaves(recipe)}
        for recipe in (run_recipe, current_recipe)
    )
    return [
        f"{format_key(path)}: {before.get(path, 'not set')} in the run, {after.get(path, 'not set')} now"
        for path in before | after
        if before.get(path) != after.get(path)
    ]


def select_comparable_values(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a recipe that must be the same in two runs if you want to compare the runs.

    The locations of data and initial weights are left out, because files can be moved. `microbatch` is left out,
    because `microbatches` determines the size of a micro-batch.
    """
    return {key: value for key, value in drop_locations(recipe).items() if key != "microbatch"}


def _find_file(source: str) -> FilePath:
    """Return the path of a user-provided recipe. Raises ConfigError if there is no such file."""
    file = FilePath(source)
    try:
        file.stat()
    except (OSError, ValueError) as error:  # ValueError is raised for a NUL character in the path
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise ConfigError([f"{printable_line(source)[:200]}: cannot be read: {reason}"]) from error
    if file.is_dir():
        raise ConfigError([f"{source}: is a folder; pass a YAML file, such as {file / 'config.yaml'}"])
    if file.exists():
        return file
    if file.suffix in {".yaml", ".yml"} or len(file.parts) > 1:
        siblings = [str(file.with_name(sibling.name)) for sibling in file.parent.glob("*.y*ml")]
        raise ConfigError([f"{source}: no such file{format_suggestion(source, siblings)}"])
    raise ConfigError([f"{source}: no such file or shipped recipe{format_choices(source, list_shipped_recipes())}"])


def _read_text(file: FilePath, label: str) -> str:
    try:
        with plainfile.open_reader(file, links=True) as stream:
            content = stream.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError([f"{label}: cannot be read: {error.strerror}"]) from error
    if len(content) > _MAX_BYTES:
        raise ConfigError(
            [f"{label}: larger than {_MAX_BYTES} bytes, the maximum size of a recipe; pass a YAML recipe"]
        )
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        position = SourcePosition(
            label, content.count(b"\n", 0, error.start) + 1, error.start - content.rfind(b"\n", 0, error.start)
        )
        raise ConfigError(
            [f"{position}  not UTF-8: byte {content[error.start]:#04x}; save the file as UTF-8"]
        ) from error


def _parse_mapping(text: str, label: str) -> Document:
    """Parse YAML whose top level must be a mapping.

    If it isn't, the document gets a problem that says so, and placeholders as values, so that overrides are still
    checked.
    """
    document = parse(text, label)
    if isinstance(document.values, dict):
        return document
    if document.values is not UNREADABLE:
        description = "the file is empty" if document.values is None else f"got {write.format_value(document.values)}"
        text = f"expected a mapping with the keys recipe, placement and run; {description}"
        document.problems.append(KeyProblem(document.positions[()], (), text))
    return Document({"recipe": UNREADABLE}, document.positions, document.problems)


def _validate(document: Document, splits_steps: bool) -> Config:
    """Validate a document. Raises ConfigError with a list of all problems, including problems found by the parser."""
    problems = [
        *document.problems,
        *key_conflicts.find_cross_key_problems(document.values, document.positions, splits_steps),
    ]
    try:
        config = Config.model_validate(document.values)
    except ValidationError as error:
        problems += wording.convert_validation_error(error, document.positions)
    problems = wording.merge_typos(problems)
    if problems:
        # Sort by line. Overrides have no line, and come last.
        problems = sorted(
            dict.fromkeys(problems), key=lambda problem: (not problem.position.line, *problem.position[1:])
        )
        raise ConfigError([str(problem) for problem in problems])
    return config


def _find_origin(path: Path, document: Document) -> str:
    """Return the origin of the value at `path`: a position in the file, `override` or `default`.

    If a bare value is used as a shorthand for the enclosing mapping, returns the position of the bare value.
    """
    value: Any = document.values
    for depth, name in enumerate(path):
        if not isinstance(value, dict):
            return str(document.positions[path[:depth]]) if SHORTHAND_KEYS.get(path[:depth]) == name else "default"
        if value.get(name) is None:
            return "default"
        value = value[name]
    return str(document.positions[path])
