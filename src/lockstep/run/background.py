"""Trains and evaluates in background processes, so that a notebook or script sees no side effects in its process."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, final, get_args

import torch

from lockstep.common import plainfile
from lockstep.config.base import section_to_dict
from lockstep.config.load import LoadedConfig, load_text
from lockstep.config.load import load as load_recipe
from lockstep.config.recipe import Recipe
from lockstep.errors import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_PREFLIGHT,
    EXIT_SAVED,
    EXIT_USAGE,
    LockstepError,
    PreflightError,
    TrainingError,
    UsageError,
)
from lockstep.reporting.sink import Sink
from lockstep.run.evaluation import EvalRequest, evaluate_here
from lockstep.run.training import train_here
from lockstep.setup.completed import find_completed_run
from lockstep.training.events import Evaluated, Event

# Exit codes that don't raise an error. The last event of the run shows how the run ended.
_EXPECTED_CODES: Final = (EXIT_DONE, EXIT_SAVED, EXIT_INTERRUPTED)
_END: Final = "end"
_POLL_S: Final = 0.5

TrainFunction = Callable[[LoadedConfig, Sink], int]  # returns the exit code


def train(
    recipe: str | Path | Recipe, *, processes: int | None = None, overrides: Mapping[str, Any] | None = None
) -> Iterator[Event]:
    """Train a recipe in background processes, and yield the events of the run as they happen.

    `recipe` is the name of a built-in recipe, a file, or a `Recipe`. `overrides` have dotted keys, such as
    `{"recipe.epochs": 3, "run.dir": "runs/a"}`. `processes` sets `placement.processes`.

    Training starts when you request the first event. If you leave the iteration early, the run is saved and stopped. To
    resume it, pass the same run.dir. If the run is already complete, only its last event, `Done`, is yielded. Nothing
    is printed, and the models and random number generators of your process don't change.

    Raises UsageError if the recipe, the data or an override is invalid, PreflightError if the machine doesn't support
    the training, and TrainingError if training fails.
    """
    override_words = to_arguments(overrides, processes)
    if isinstance(recipe, Recipe):
        loaded = load_text(json.dumps({"recipe": section_to_dict(recipe)}), "recipe", recipe.model.name, override_words)
    else:
        loaded = load_recipe(str(recipe), override_words)
    if (completed_event := find_completed_run(loaded)) is not None:
        yield completed_event
    else:
        yield from train_in_background(loaded)


def train_in_background(loaded: LoadedConfig, train_function: TrainFunction = train_here) -> Generator[Event]:
    """Call `train_function` in a background process, and yield the events of the run. See `train`."""
    for message in _receive_messages(partial(train_function, loaded)):
        yield _parse_event(message)


def evaluate(
    run: str | Path, *, processes: int | None = None, overrides: Mapping[str, Any] | None = None, trust: bool = False
) -> Evaluated:
    """Evaluate a run folder or a checkpoint on all validation samples, in background processes.

    For a run folder, the newest checkpoint is evaluated. If the run has averaged weights (EMA), these are used. User
    code that the recipe of the run references is only executed if your `overrides` also reference it, or if `trust` is
    True. `processes` and `overrides` work as in `train`.

    Raises the same errors as `train`.
    """
    request = EvalRequest(str(run), tuple(to_arguments(overrides, processes)), trust)
    [message] = _receive_messages(lambda pipe: evaluate_here(request, lambda result: pipe.write(result.event, 0.0)))
    event = _parse_event(message)
    assert isinstance(event, Evaluated)
    return event


def to_arguments(overrides: Mapping[str, Any] | None, processes: int | None = None) -> list[str]:
    """Return overrides as command-line arguments, such as `recipe.epochs=3`. Paths are converted to strings."""
    placement_overrides = {} if processes is None else {"placement.processes": processes}
    return [
        f"{key}={json.dumps(value, default=os.fspath)}"
        for key, value in {**placement_overrides, **(overrides or {})}.items()
    ]


def to_path_arguments(paths: str | Path | Sequence[str | Path]) -> list[str]:
    """Return a path or a sequence of paths as a list of command-line arguments."""
    return [str(paths)] if isinstance(paths, str | Path) else [str(path) for path in paths]


def run_in_background(make_rows: Callable[[], Iterable[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Call `make_rows` in a background process, and return its rows, which must be JSON-compatible."""
    return list(_receive_messages(partial(_send_rows, make_rows)))


def _parse_event(message: Mapping[str, Any]) -> Event:
    kinds = {kind.__dataclass_fields__["name"].default: kind for kind in get_args(Event)}
    kind: Callable[..., Event] = kinds[message["name"]]
    return kind(**{name: value for name, value in message.items() if name != "name"})


def _receive_messages(function: Callable[[EventPipe], int]) -> Generator[dict[str, Any]]:
    """Call `function` in a background process, and yield the messages that it sends. Reraise its error here."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run_background, args=(function, sender))
    process.start()
    sender.close()
    has_ended = False
    try:
        with closing(receiver):
            while not has_ended:
                if not receiver.poll(_POLL_S):
                    has_ended = not process.is_alive() and not receiver.poll(0)
                    continue
                message = plainfile.parse_json(receiver.recv_bytes())
                if _END not in message:
                    yield message
                    continue
                has_ended = True
                _raise_error(message)
            if process.exitcode:
                raise TrainingError(
                    f"the background process exited with code {process.exitcode}; see its output for the cause"
                )
    finally:
        if not has_ended:
            process.terminate()  # makes the run save and stop
        process.join()


def _raise_error(end_message: Mapping[str, Any]) -> None:
    code, text = end_message[_END], end_message["text"]
    if code in _EXPECTED_CODES:
        return
    kinds: dict[int, type[LockstepError]] = {EXIT_USAGE: UsageError, EXIT_PREFLIGHT: PreflightError}
    raise kinds.get(code, TrainingError)(text)


@final
@dataclass(frozen=True)
class EventPipe:
    """A sink in a background process that sends each event as JSON to the parent process."""

    connection: Connection

    def write(self, event: Event, time: float) -> None:
        """See Sink.write."""
        self.send(asdict(event))

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a JSON-compatible message. Paths are converted to strings."""
        self.connection.send_bytes(json.dumps(message, default=os.fspath).encode())

    def close(self) -> None:
        """See Sink.close."""


def _run_background(function: Callable[[EventPipe], int], connection: Connection) -> None:
    """Call `function` in the background process. Print nothing, and send the exit code or error to the parent."""
    errors = io.StringIO()
    with (
        Path(os.devnull).open("w", encoding="utf-8") as null_stream,
        redirect_stdout(null_stream),
        redirect_stderr(errors),
    ):
        try:
            code, text = function(EventPipe(connection)), ""
        except LockstepError as error:
            code, text = error.exit_code, str(error)
        except SystemExit as end:  # a signal arrived before the workers were started
            code, text = int(end.code or 0), ""
        except KeyboardInterrupt:  # the terminal also sends Ctrl-C to this process
            code, text = EXIT_INTERRUPTED, ""
    connection.send_bytes(json.dumps({_END: code, "text": text or errors.getvalue().strip()}).encode())
    sys.stdout.flush()


def _send_rows(make_rows: Callable[[], Iterable[Mapping[str, Any]]], pipe: EventPipe) -> int:
    torch.set_num_threads(1)  # a forked process must not inherit a thread pool
    for row in make_rows():
        pipe.send(row)
    return EXIT_DONE
