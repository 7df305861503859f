"""Train and evaluate from Python, as in a notebook: in background processes, which leave this one as it is."""

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
from lockstep.config.base import values
from lockstep.config.load import Loaded, load_text
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
from lockstep.setup.completed import completed
from lockstep.training.events import Evaluated, Event

_STOPPED: Final = (EXIT_DONE, EXIT_SAVED, EXIT_INTERRUPTED)  # the events say which
_END: Final = "end"
_LOOK_S: Final = 0.5

Train = Callable[[Loaded, Sink], int]  # returns the exit code


def train(
    recipe: str | Path | Recipe, *, processes: int | None = None, overrides: Mapping[str, Any] | None = None
) -> Iterator[Event]:
    """Train a recipe in background processes, and yield its events as they happen.

    `recipe` is the name of a shipped recipe, a file, or a `Recipe`. `overrides` are dotted:
    `{"recipe.epochs": 3, "run.dir": "runs/a"}`. Nothing is printed, and models and generators of this process stay as
    they are. Training starts when the first event is asked for. Where the iteration is left early, the run is saved and
    stopped; with the same run.dir it resumes. Of a run that is complete there is its last event, `Done`, alone.

    UsageError where the recipe, the data or an override is wrong, PreflightError where the machine cannot do it,
    TrainingError where training fails.
    """
    words = as_words(overrides, processes)
    if isinstance(recipe, Recipe):
        loaded = load_text(json.dumps({"recipe": values(recipe)}), "recipe", recipe.model.name, words)
    else:
        loaded = load_recipe(str(recipe), words)
    if (done := completed(loaded)) is not None:
        yield done
    else:
        yield from train_in_background(loaded)


def train_in_background(loaded: Loaded, body: Train = train_here) -> Generator[Event]:
    """Train a configuration in background processes, by `body`; see `train`."""
    for message in _messages(partial(body, loaded)):
        yield _event(message)


def evaluate(
    run: str | Path, *, processes: int | None = None, overrides: Mapping[str, Any] | None = None, trust: bool = False
) -> Evaluated:
    """Evaluate a run folder or a checkpoint in background processes: every validation sample once.

    Of a run folder the newest checkpoint is taken, with averaged weights (ema) if the run has them. Code that its
    recipe names runs only if `overrides` name it too, or with `trust`. Errors are those of `train`.
    """
    asked = EvalRequest(str(run), tuple(as_words(overrides, processes)), trust)
    [message] = _messages(lambda pipe: evaluate_here(asked, lambda found: pipe.write(found.event, 0.0)))
    event = _event(message)
    assert isinstance(event, Evaluated)
    return event


def as_words(overrides: Mapping[str, Any] | None, processes: int | None = None) -> list[str]:
    """Return dotted overrides as the words of a command; a path stands for its text."""
    chosen = {} if processes is None else {"placement.processes": processes}
    return [f"{key}={json.dumps(value, default=os.fspath)}" for key, value in {**chosen, **(overrides or {})}.items()]


def as_names(paths: str | Path | Sequence[str | Path]) -> list[str]:
    """Return one path, or several, as the words of a command."""
    return [str(paths)] if isinstance(paths, str | Path) else [str(each) for each in paths]


def in_background(body: Callable[[], Iterable[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return the rows, which are ready for JSON, that `body` yields in a background process."""
    return list(_messages(partial(_rows, body)))


def _event(message: Mapping[str, Any]) -> Event:
    kinds = {kind.__dataclass_fields__["name"].default: kind for kind in get_args(Event)}
    kind: Callable[..., Event] = kinds[message["name"]]
    return kind(**{name: value for name, value in message.items() if name != "name"})


def _messages(body: Callable[[EventPipe], int]) -> Generator[dict[str, Any]]:
    """Do `body` in a background process, and yield what it reports; raise what it fails of."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_background, args=(body, sending))
    process.start()
    sending.close()
    ended = False
    try:
        with closing(receiving):
            while not ended:
                if not receiving.poll(_LOOK_S):
                    ended = not process.is_alive() and not receiving.poll(0)
                    continue
                message = plainfile.parse_json(receiving.recv_bytes())
                if _END not in message:
                    yield message
                    continue
                ended = True
                _raise(message)
            if process.exitcode:
                raise TrainingError(f"the background process ended with code {process.exitcode}")
    finally:
        if not ended:
            process.terminate()  # the run saves, and stops
        process.join()


def _raise(end: Mapping[str, Any]) -> None:
    code, text = end[_END], end["text"]
    if code in _STOPPED:
        return
    kinds: dict[int, type[LockstepError]] = {EXIT_USAGE: UsageError, EXIT_PREFLIGHT: PreflightError}
    raise kinds.get(code, TrainingError)(text)


@final
@dataclass(frozen=True)
class EventPipe:
    """The sink of the process that waits for events: a line of JSON each."""

    connection: Connection

    def write(self, event: Event, time: float) -> None:
        """See Sink."""
        self.send(asdict(event))

    def send(self, message: Mapping[str, Any]) -> None:
        """Send what is ready for JSON, and paths as text."""
        self.connection.send_bytes(json.dumps(message, default=os.fspath).encode())

    def close(self) -> None:
        """See Sink."""


def _background(body: Callable[[EventPipe], int], connection: Connection) -> None:
    """Be the background process: nothing is printed, what there is to say goes to the one that waits."""
    errors = io.StringIO()
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere, redirect_stdout(nowhere), redirect_stderr(errors):
        try:
            code, text = body(EventPipe(connection)), ""
        except LockstepError as error:
            code, text = error.exit_code, str(error)
        except SystemExit as end:  # a signal came before there were workers
            code, text = int(end.code or 0), ""
        except KeyboardInterrupt:  # a terminal sends it to this process, too
            code, text = EXIT_INTERRUPTED, ""
    connection.send_bytes(json.dumps({_END: code, "text": text or errors.getvalue().strip()}).encode())
    sys.stdout.flush()


def _rows(body: Callable[[], Iterable[Mapping[str, Any]]], pipe: EventPipe) -> int:
    torch.set_num_threads(1)  # a forked process must not inherit a pool of threads
    for row in body():
        pipe.send(row)
    return EXIT_DONE
