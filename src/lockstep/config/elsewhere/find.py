"""Detects the framework of a configuration file, and translates the file to a recipe."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any, Final, final

from lockstep.common.names import format_suggestion
from lockstep.config import write
from lockstep.config.document import Document, KeyProblem, SourcePosition, find_position, format_key, parse
from lockstep.config.elsewhere import imagenet
from lockstep.config.elsewhere.translation import (
    KeyTable,
    TranslatedConfig,
    Translation,
    describe_type_mismatch,
    read_key_table,
)
from lockstep.config.load import LoadedConfig, load_text, read_document
from lockstep.config.naming import drop_obsolete_values
from lockstep.config.overrides import OVERRIDE, apply_overrides
from lockstep.errors import ConfigError, UsageError

_LOCKSTEP_PREFIXES: Final = ("recipe.", "placement.", "run.")
_NULL_TEXTS: Final = ("None", "none", "")
# The file is translated by the first framework whose key table matches. Distribuuuu is last, because it matches files
# with any of its keys.
_FRAMEWORKS: Final[Mapping[str, Callable[[Translation, bool], None]]] = {
    "pycls": imagenet.translate_pycls,
    "distribuuuu": imagenet.translate_distribuuuu,
}
# Libraries whose files can't be imported, but whose keys are listed in the documentation. Any of these keys identifies
# a file of the library.
_DOCUMENTED_LIBRARIES: Final = {
    "Accelerate": ("distributed_type",),
    "the Trainer": ("per_device_train_batch_size", "num_train_epochs", "learning_rate", "output_dir"),
}


@final
@dataclass(frozen=True)
class ImportedConfig:
    """A translated configuration file of `framework`, to which Lockstep overrides have been applied."""

    framework: str
    file: str
    translated: TranslatedConfig

    def to_yaml(self) -> str:
        """Return the translated configuration as the YAML text of a recipe."""
        return self.translated.to_yaml(f"From {self.file}, a configuration of {self.framework}.")

    def load(self) -> LoadedConfig:
        """Load the translated configuration as a recipe. Raises ConfigError with a list of all problems."""
        name = FilePath(self.file).stem
        loaded = load_text(self.to_yaml(), f"{self.file}, as imported", name)
        return replace(loaded, notes=[*loaded.notes, *self.translated.remarks()])


def import_file(file: str, arguments: Sequence[str], num_gpus: int) -> ImportedConfig:
    """Translate a configuration file of a different framework.

    - `arguments`: The command-line arguments: KEY VALUE pairs of the framework, and Lockstep overrides `a.b=value`.
    - `num_gpus`: The number of GPUs that the file was written for. Only used if the file sets the batch size per GPU.

    Raises UsageError if the framework is unknown or a value has no counterpart. Raises ConfigError if the file can't be
    read, or if it has unknown keys or values of a wrong type.
    """
    overrides = [word for word in arguments if word.startswith(_LOCKSTEP_PREFIXES) and "=" in word]
    file_values, positions = _read_keys(read_document(file), [word for word in arguments if word not in overrides])
    tables = [(read_key_table(name), translate) for name, translate in _FRAMEWORKS.items()]
    table, translate = next((entry for entry in tables if entry[0].matches(file_values)), (None, None))
    if table is None or translate is None:
        for library, marks in _DOCUMENTED_LIBRARIES.items():
            if any(key in file_values for key in marks):
                raise UsageError(
                    f"{file}: importing a configuration of {library} is not supported; see docs/coming-from.md"
                    f"#keys-of-accelerate-and-the-trainer for a table of its keys and the keys of Lockstep"
                )
        raise UsageError(
            f"{file}: its keys do not match Distribuuuu or pycls; pass a Lockstep recipe without --cfg: "
            f"lockstep train {file}"
        )
    file_values, positions = (
        {table.renamed.get(key, key): entry for key, entry in mapping.items()} for mapping in (file_values, positions)
    )
    _check_keys(table, file_values, positions)
    keys = Translation(table, file_values, num_gpus)
    keys.copy_mapped_keys()
    translate(keys, any(word.startswith("recipe.model") for word in overrides))
    return ImportedConfig(table.framework, file, _apply_overrides(keys.finish(), overrides))


def _read_keys(document: Document, arguments: Sequence[str]) -> tuple[dict[str, Any], dict[str, SourcePosition]]:
    """Return values and positions by dotted key, from a configuration file and the KEY VALUE pairs in `arguments`.

    If a key is set several times, the last pair takes precedence, as in yacs.
    """
    if len(arguments) % 2:
        raise UsageError(f"{arguments[-1]}: a key without a value; pass KEY VALUE pairs, such as OPTIM.BASE_LR 0.1")
    if document.problems:
        raise ConfigError([str(problem) for problem in document.problems])
    leaves = list(write.iterate_leaves(document.values))
    values = {format_key(path): value for path, value in leaves}
    positions = {format_key(path): find_position(document.positions, path) for path, _ in leaves}
    for key, text in zip(arguments[::2], arguments[1::2], strict=True):
        value = parse(text, "override")
        if value.problems:
            raise ConfigError([f"{problem.position} {key}: {problem.text}" for problem in value.problems])
        values[key], positions[key] = None if text in _NULL_TEXTS else value.values, OVERRIDE
    return values, positions


def _check_keys(table: KeyTable, file_values: Mapping[str, Any], positions: Mapping[str, SourcePosition]) -> None:
    """Raise ConfigError if a key is unknown to the framework, or if a value has the wrong type."""
    problems = []
    for key, value in file_values.items():
        if key not in table.defaults:
            text = f"{table.framework} has no such key{format_suggestion(key, table.defaults)}"
        elif expected := describe_type_mismatch(table.defaults[key], value):
            text = f"expected {expected}, got {write.format_value(value)}"
        else:
            continue
        problems.append(str(KeyProblem(positions[key], tuple(key.split(".")), text)))
    if problems:
        raise ConfigError(problems)


def _apply_overrides(translated: TranslatedConfig, overrides: Sequence[str]) -> TranslatedConfig:
    """Apply Lockstep overrides to a translated configuration."""
    positions = {
        path: SourcePosition(translated.origins[format_key(path)])
        for path, _ in write.iterate_leaves(translated.values)
    }
    before = Document(translated.values, {(): SourcePosition(""), **positions}, [])
    document = apply_overrides(before, overrides)
    if document.problems:
        raise ConfigError([str(problem) for problem in document.problems])
    drop_notes = drop_obsolete_values(before, document)
    origins = {format_key(path): str(document.positions[path]) for path, _ in write.iterate_leaves(document.values)}
    return replace(translated, values=document.values, origins=origins, notes=(*translated.notes, *drop_notes))
