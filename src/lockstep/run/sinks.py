"""Opens the sinks of a run: the files in the run folder, the terminal, and the sinks in `run.sinks`."""

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TextIO, final

from lockstep.common.importing import import_object
from lockstep.common.location import is_url
from lockstep.common.names import format_choices
from lockstep.common.text import printable
from lockstep.common.user_code import UserCode
from lockstep.config.run import RunConfig, SinkConfig
from lockstep.errors import UsageError
from lockstep.reporting import mlflow_sink, wandb_sink
from lockstep.reporting.console import Console
from lockstep.reporting.jsonl import JsonLines, to_json_fields
from lockstep.reporting.optional import OptionalSink
from lockstep.reporting.sink import Sink
from lockstep.reporting.skipped import SkippedFiles
from lockstep.reporting.tables import CsvTables
from lockstep.run.uploads import UploadSink
from lockstep.runs import folder as run_folder
from lockstep.runs.remote import Mirror
from lockstep.training.events import Event

_VARIABLE: Final = re.compile(r"\$\{([A-Za-z_]\w*)\}")
_SECRETS: Final = r"(?:password|passwd|passphrase|secret|token|credentials?|api_?key|(?:access|private|secret)_key)"
_SECRET_NAME: Final = re.compile(rf"(?:^|[_.]){_SECRETS}$", re.IGNORECASE)
_SECRET_IN_URL: Final = re.compile(rf"//[^/@\s]*:(?!\$\{{)[^/@\s]+@|[?&;]{_SECRETS}=(?!\$\{{)\S", re.IGNORECASE)
_OPTIONS: Final = {"mlflow": mlflow_sink.OPTIONS, "wandb": wandb_sink.OPTIONS}
_SINK_ADVICE: Final = "see docs/extend.md"


def check_sinks(run: RunConfig) -> None:
    """Raise UsageError if a sink isn't installed or callable, or if its options are invalid or contain secrets."""
    for index, sink in enumerate(run.sinks):
        if ":" in sink.name:
            if not callable(import_object(sink.name, "sink")):
                raise UsageError(
                    f"sink {sink.name}: is not callable; use the import path of a class or function ({_SINK_ADVICE})"
                )
        elif sink.name == "csv":
            _check_sink_options(index, sink, ())
        else:
            spec = find_spec(sink.name)
            # A spec without an origin is a namespace package, which may be any folder with this name.
            if spec is None or spec.origin is None:
                raise UsageError(
                    f"sink {sink.name}: {sink.name} is not installed; pip install 'lockstep-train[{sink.name}]'"
                )
            _check_sink_options(index, sink, _OPTIONS[sink.name])
        for key, text in _iterate_strings(sink.model_extra or {}):
            if _is_secret(key, text):
                raise UsageError(
                    f"run.sinks.{index}.{key}: contains a secret, which config.yaml and environment.json would store; "
                    f"put the secret into an environment variable NAME, and write ${{NAME}} here"
                )


def list_custom_sinks(run: RunConfig) -> list[str]:
    """Return the import paths of the custom sinks in `run.sinks`."""
    return [sink.name for sink in run.sinks if ":" in sink.name]


@contextmanager
def open_sinks(
    run: RunConfig, recipe_values: Mapping[str, Any], lr_formula: str, folder: Path, streams: Sequence[TextIO]
) -> Iterator[list[Sink]]:
    """Return a context manager that opens the sinks of a run and yields them. Only rank 0 calls it.

    Sinks that may fail to open are opened first.

    - `recipe_values`: The settings by name, which services such as MLflow save with the metrics.
    - `lr_formula`: The formula of the learning rate, as text.
    - `streams`: The terminal and, if there is one, the log of rank 0.
    """

    def warn(text: str) -> None:
        print(printable(text), file=sys.stderr)
        for log in streams[1:]:
            log.write(f"{printable(text)}\n")

    url = run.dir if run.dir is not None and is_url(run.dir) else ""
    with ExitStack() as stack:
        optional: list[Sink] = []
        for config in run.sinks:
            optional.append(OptionalSink(f"sink {config.name}", _open_sink(config, recipe_values, folder), warn))
            stack.callback(optional[-1].close)
        if run.tensorboard:
            # Imported lazily, because the import takes about a second.
            from lockstep.reporting.tensorboard import TensorBoard

            tensorboard = TensorBoard(folder / run_folder.TENSORBOARD)
            optional.append(OptionalSink("tensorboard", tensorboard, warn))
            stack.callback(optional[-1].close)
        file_sinks: list[Sink] = [
            JsonLines(folder / run_folder.EVENTS),
            SkippedFiles(folder / run_folder.SKIPPED),
            *(Console(stream, url or str(folder), lr_formula) for stream in streams),
            *([UploadSink(Mirror(url, run.keep), warn)] if url else []),
        ]
        for sink in file_sinks:
            stack.callback(sink.close)
        yield [*file_sinks, *optional]


def _open_sink(config: SinkConfig, recipe_values: Mapping[str, Any], folder: Path) -> Sink:
    options = _expand_variables(f"sink {config.name}", config.model_extra or {})
    if ":" in config.name:
        return _open_custom_sink(config.name, folder, options)
    if config.name == "csv":
        return CsvTables(folder)
    with UserCode(f"sink {config.name}"):
        if config.name == "wandb":
            return wandb_sink.Wandb(folder, options, recipe_values)
        return mlflow_sink.Mlflow(folder, options, recipe_values)


@final
class _CustomSink:
    """Passes events to a custom sink as dicts, with the same fields as in events.jsonl."""

    def __init__(self, sink: Any) -> None:
        self._sink = sink

    def write(self, event: Event, time: float) -> None:
        self._sink.write(to_json_fields(event, time))

    def close(self) -> None:
        self._sink.close()


def _open_custom_sink(import_path: str, folder: Path, options: Mapping[str, Any]) -> _CustomSink:
    with UserCode(f"sink {import_path}"):
        sink = import_object(import_path, "sink")(folder, **options)
        members = dir(sink)
    if missing := [name for name in ("write", "close") if name not in members]:
        raise UsageError(f"sink {import_path}: has no {' and no '.join(missing)} method; add it ({_SINK_ADVICE})")
    return _CustomSink(sink)


def _iterate_strings(options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the key and the value of each string in the options, including nested lists and mappings."""
    for key, value in options.items():
        if isinstance(value, str):
            yield key, value
        elif isinstance(value, Mapping):
            yield from ((f"{key}.{subkey}", text) for subkey, text in _iterate_strings(value))
        elif isinstance(value, list):
            yield from _iterate_strings({f"{key}.{index}": item for index, item in enumerate(value)})


def _is_secret(key: str, text: str) -> bool:
    """Return whether an option contains a secret in plain text, judging by its name or by a secret in a URL."""
    has_secret_name = _SECRET_NAME.search(key) and not _VARIABLE.fullmatch(text)
    return bool(has_secret_name or _SECRET_IN_URL.search(text))


def _expand_variables(label: str, value: Any) -> Any:
    """Replace each `${NAME}` with the value of the environment variable. Raise UsageError if it isn't set."""
    if isinstance(value, Mapping):
        return {key: _expand_variables(label, item) for key, item in value.items()}
    if isinstance(value, list):
        return [_expand_variables(label, item) for item in value]
    if not isinstance(value, str):
        return value
    if missing := [name for name in _VARIABLE.findall(value) if name not in os.environ]:
        raise UsageError(f"{label}: an option uses the environment variable {missing[0]}, which is not set; set it")
    return _VARIABLE.sub(lambda match: os.environ[match[1]], value)


def _check_sink_options(sink_index: int, sink: SinkConfig, option_names: tuple[str, ...]) -> None:
    for key, value in (sink.model_extra or {}).items():
        if key not in option_names:
            raise UsageError(
                f"run.sinks.{sink_index}.{key}: sink {sink.name} has no such option{format_choices(key, option_names)}"
            )
        is_string_list = isinstance(value, list) and all(isinstance(item, str) for item in value)
        if not (is_string_list if key == "tags" else isinstance(value, str)):
            expected = "a list of strings" if key == "tags" else "text"
            raise UsageError(f"run.sinks.{sink_index}.{key}: expected {expected}; got {value!r}")
