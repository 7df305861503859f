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
from lockstep.common.names import choices
from lockstep.common.own_code import UserCode
from lockstep.common.text import printable
from lockstep.config.run import RunConfig
from lockstep.config.run import SinkConfig as Named
from lockstep.errors import UsageError
from lockstep.reporting import mlflow_sink, wandb_sink
from lockstep.reporting.console import Console
from lockstep.reporting.jsonl import JsonLines, figures
from lockstep.reporting.optional import Optional
from lockstep.reporting.sink import Sink
from lockstep.reporting.skipped import SkippedFiles
from lockstep.reporting.tables import Tables
from lockstep.runs import folder as run_folder
from lockstep.training.events import Event

_VARIABLE: Final = re.compile(r"\$\{([A-Za-z_]\w*)\}")
_SECRETS: Final = r"(?:password|passwd|passphrase|secret|token|credentials?|api_?key|(?:access|private|secret)_key)"
_SECRET: Final = re.compile(rf"(?:^|[_.]){_SECRETS}$", re.IGNORECASE)
_IN_URL: Final = re.compile(rf"//[^/@\s]*:(?!\$\{{)[^/@\s]+@|[?&;]{_SECRETS}=(?!\$\{{)\S", re.IGNORECASE)
_OPTIONS: Final = {"mlflow": mlflow_sink.OPTIONS, "wandb": wandb_sink.OPTIONS}
_CONTRACT: Final = "see docs/extend.md"


def check_sinks(run: RunConfig) -> None:
    """Raise UsageError if a sink isn't installed, isn't callable, has invalid options, or has options with secrets."""
    for index, sink in enumerate(run.sinks):
        if ":" in sink.name:
            if not callable(import_object(sink.name, "sink")):
                raise UsageError(f"sink {sink.name}: is not callable; name a class or a function ({_CONTRACT})")
        elif sink.name == "csv":
            _check_options(index, sink, ())
        else:
            spec = find_spec(sink.name)
            # No origin means a namespace package, which may be any folder with this name.
            if spec is None or spec.origin is None:
                raise UsageError(
                    f"sink {sink.name}: {sink.name} is not installed; pip install 'lockstep-train[{sink.name}]'"
                )
            _check_options(index, sink, _OPTIONS[sink.name])
        for key, text in _texts(sink.model_extra or {}):
            if _is_secret(key, text):
                raise UsageError(
                    f"run.sinks.{index}.{key}: contains a secret, which config.yaml and environment.json would store; "
                    f"put the secret into an environment variable NAME, and write ${{NAME}} here"
                )


def own_paths(run: RunConfig) -> list[str]:
    """Return the import paths of custom sinks."""
    return [sink.name for sink in run.sinks if ":" in sink.name]


@contextmanager
def open_sinks(
    run: RunConfig, recipe_values: Mapping[str, Any], rule: str, folder: Path, streams: Sequence[TextIO]
) -> Iterator[list[Sink]]:
    """Open the sinks of a run while the block runs. Only rank 0 calls it. Opens sinks that can fail first.

    - `recipe_values`: Settings by name, which services such as MLflow save with the metrics.
    - `rule`: The formula of the learning rate.
    - `streams`: The terminal and, if there is one, the log of rank 0.
    """

    def warn(text: str) -> None:
        print(printable(text), file=sys.stderr)
        for log in streams[1:]:
            log.write(f"{printable(text)}\n")

    with ExitStack() as stack:
        optional: list[Sink] = []
        for config in run.sinks:
            optional.append(Optional(f"sink {config.name}", _open_sink(config, recipe_values, folder), warn))
            stack.callback(optional[-1].close)
        if run.tensorboard:
            from lockstep.reporting.tensorboard import TensorBoard  # imported lazily, because it takes a second

            curves = TensorBoard(folder / run_folder.TENSORBOARD)
            optional.append(Optional("tensorboard", curves, warn))
            stack.callback(optional[-1].close)
        file_sinks: list[Sink] = [
            JsonLines(folder / run_folder.EVENTS),
            SkippedFiles(folder / run_folder.SKIPPED),
            *(Console(stream, str(folder), rule) for stream in streams),
        ]
        for sink in file_sinks:
            stack.callback(sink.close)
        yield [*file_sinks, *optional]


def _open_sink(config: Named, recipe_values: Mapping[str, Any], folder: Path) -> Sink:
    options = _expand_variables(f"sink {config.name}", config.model_extra or {})
    if ":" in config.name:
        return _open_custom_sink(config.name, folder, options)
    if config.name == "csv":
        return Tables(folder)
    with UserCode(f"sink {config.name}"):
        if config.name == "wandb":
            return wandb_sink.Wandb(folder, options, recipe_values)
        return mlflow_sink.Mlflow(folder, options, recipe_values)


@final
class _CustomSink:
    """A custom sink. It receives events as dicts with the fields of events.jsonl."""

    def __init__(self, sink: Any) -> None:
        self._sink = sink

    def write(self, event: Event, time: float) -> None:
        self._sink.write(figures(event, time))

    def close(self) -> None:
        self._sink.close()


def _open_custom_sink(path: str, folder: Path, options: Mapping[str, Any]) -> _CustomSink:
    with UserCode(f"sink {path}"):
        sink = import_object(path, "sink")(folder, **options)
        members = dir(sink)
    if missing := [name for name in ("write", "close") if name not in members]:
        raise UsageError(f"sink {path}: has no {' and no '.join(missing)} method; add it ({_CONTRACT})")
    return _CustomSink(sink)


def _texts(options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the key and the text of each string in the options, including nested lists and mappings."""
    for key, value in options.items():
        if isinstance(value, str):
            yield key, value
        elif isinstance(value, Mapping):
            yield from ((f"{key}.{subkey}", text) for subkey, text in _texts(value))
        elif isinstance(value, list):
            yield from _texts({f"{key}.{index}": item for index, item in enumerate(value)})


def _is_secret(key: str, text: str) -> bool:
    """Return whether an option is a plain-text secret, because of its name or because it is a URL with a secret."""
    has_secret_name = _SECRET.search(key) and not _VARIABLE.fullmatch(text)
    return bool(has_secret_name or _IN_URL.search(text))


def _expand_variables(label: str, value: Any) -> Any:
    """Replace `${NAME}` with the values of environment variables. Raises UsageError if a variable isn't set."""
    if isinstance(value, Mapping):
        return {key: _expand_variables(label, item) for key, item in value.items()}
    if isinstance(value, list):
        return [_expand_variables(label, item) for item in value]
    if not isinstance(value, str):
        return value
    if missing := [name for name in _VARIABLE.findall(value) if name not in os.environ]:
        raise UsageError(f"{label}: an option uses the environment variable {missing[0]}, which is not set; set it")
    return _VARIABLE.sub(lambda match: os.environ[match[1]], value)


def _check_options(index: int, sink: Named, option_names: tuple[str, ...]) -> None:
    for key, value in (sink.model_extra or {}).items():
        if key not in option_names:
            raise UsageError(
                f"run.sinks.{index}.{key}: sink {sink.name} has no such option{choices(key, option_names)}"
            )
        is_string_list = isinstance(value, list) and all(isinstance(item, str) for item in value)
        if not (is_string_list if key == "tags" else isinstance(value, str)):
            expected = "a list of strings" if key == "tags" else "text"
            raise UsageError(f"run.sinks.{index}.{key}: expected {expected}; got {value!r}")
