"""Opens the sinks of a run: files in the run folder, the terminal, and the sinks in `run.sinks`."""

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
from lockstep.common.own_code import OwnCode
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
    """Raise UsageError if a sink isn't installed, isn't callable, or has invalid options or a secret among them."""
    for number, sink in enumerate(run.sinks):
        if ":" in sink.name:
            if not callable(import_object(sink.name, "sink")):
                raise UsageError(f"sink {sink.name}: is not callable; name a class or a function ({_CONTRACT})")
        elif sink.name == "csv":
            _check_options(number, sink, ())
        else:
            spec = find_spec(sink.name)
            if spec is None or spec.origin is None:  # a namespace package: a folder with this name
                raise UsageError(
                    f"sink {sink.name}: {sink.name} is not installed; pip install 'lockstep-train[{sink.name}]'"
                )
            _check_options(number, sink, _OPTIONS[sink.name])
        for key, text in _texts(sink.model_extra or {}):
            if _is_secret(key, text):
                raise UsageError(
                    f"run.sinks.{number}.{key}: contains a secret, which config.yaml and environment.json would store; "
                    f"put the secret into an environment variable NAME, and write ${{NAME}} here"
                )


def own_paths(run: RunConfig) -> list[str]:
    """Return the import paths of custom sinks."""
    return [sink.name for sink in run.sinks if ":" in sink.name]


@contextmanager
def open_sinks(
    run: RunConfig, decided: Mapping[str, Any], rule: str, folder: Path, streams: Sequence[TextIO]
) -> Iterator[list[Sink]]:
    """Open the sinks of a run while the block runs. Only rank 0 calls it. Sinks that can fail are opened first.

    - `decided`: Settings that services such as MLflow save next to the figures, by name.
    - `rule`: The formula of the learning rate.
    - `streams`: The terminal and, if there is one, the log of rank 0.
    """

    def warn(text: str) -> None:
        print(printable(text), file=sys.stderr)
        for log in streams[1:]:
            log.write(f"{printable(text)}\n")

    with ExitStack() as held:
        optional: list[Sink] = []
        for named in run.sinks:
            optional.append(Optional(f"sink {named.name}", _open_sink(named, decided, folder), warn))
            held.callback(optional[-1].close)
        if run.tensorboard:
            from lockstep.reporting.tensorboard import TensorBoard  # imported here because it takes a second

            curves = TensorBoard(folder / run_folder.TENSORBOARD)
            optional.append(Optional("tensorboard", curves, warn))
            held.callback(optional[-1].close)
        kept: list[Sink] = [
            JsonLines(folder / run_folder.EVENTS),
            SkippedFiles(folder / run_folder.SKIPPED),
            *(Console(stream, str(folder), rule) for stream in streams),
        ]
        for each in kept:
            held.callback(each.close)
        yield [*kept, *optional]


def _open_sink(named: Named, decided: Mapping[str, Any], folder: Path) -> Sink:
    options = _expand_variables(f"sink {named.name}", named.model_extra or {})
    if ":" in named.name:
        return _own(named.name, folder, options)
    if named.name == "csv":
        return Tables(folder)
    with OwnCode(f"sink {named.name}"):
        if named.name == "wandb":
            return wandb_sink.Wandb(folder, options, decided)
        return mlflow_sink.Mlflow(folder, options, decided)


@final
class _Own:
    """A custom sink. It receives events as mappings with the fields of events.jsonl."""

    def __init__(self, sink: Any) -> None:
        self._sink = sink

    def write(self, event: Event, time: float) -> None:
        self._sink.write(figures(event, time))

    def close(self) -> None:
        self._sink.close()


def _own(path: str, folder: Path, options: Mapping[str, Any]) -> _Own:
    with OwnCode(f"sink {path}"):
        made = import_object(path, "sink")(folder, **options)
        found = dir(made)
    if missing := [name for name in ("write", "close") if name not in found]:
        raise UsageError(f"sink {path}: has no {' and no '.join(missing)} method; add it ({_CONTRACT})")
    return _Own(made)


def _texts(options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield key and text for each text in the options, including nested lists and mappings."""
    for key, value in options.items():
        if isinstance(value, str):
            yield key, value
        elif isinstance(value, Mapping):
            yield from ((f"{key}.{below}", text) for below, text in _texts(value))
        elif isinstance(value, list):
            yield from _texts({f"{key}.{number}": each for number, each in enumerate(value)})


def _is_secret(key: str, text: str) -> bool:
    """Return whether an option is a plain-text secret: its name says so, or it is a URL that contains a secret."""
    named = _SECRET.search(key) and not _VARIABLE.fullmatch(text)
    return bool(named or _IN_URL.search(text))


def _expand_variables(label: str, value: Any) -> Any:
    """Replace `${NAME}` by the values of environment variables. Raises UsageError if a variable isn't set."""
    if isinstance(value, Mapping):
        return {key: _expand_variables(label, each) for key, each in value.items()}
    if isinstance(value, list):
        return [_expand_variables(label, each) for each in value]
    if not isinstance(value, str):
        return value
    if missing := [name for name in _VARIABLE.findall(value) if name not in os.environ]:
        raise UsageError(f"{label}: an option uses the environment variable {missing[0]}, which is not set; set it")
    return _VARIABLE.sub(lambda found: os.environ[found[1]], value)


def _check_options(number: int, sink: Named, valid: tuple[str, ...]) -> None:
    for key, value in (sink.model_extra or {}).items():
        if key not in valid:
            raise UsageError(f"run.sinks.{number}.{key}: sink {sink.name} has no such option{choices(key, valid)}")
        listed = isinstance(value, list) and all(isinstance(each, str) for each in value)
        if not (listed if key == "tags" else isinstance(value, str)):
            expected = "a list of strings" if key == "tags" else "text"
            raise UsageError(f"run.sinks.{number}.{key}: expected {expected}; got {value!r}")
