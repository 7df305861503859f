"""Implements `lockstep replay`: selects the steps, runs the replays one after another, and writes the results."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lockstep.config.recorded import CONFIG
from lockstep.errors import EXIT_DONE, EXIT_VERIFICATION, UsageError, os_error_as
from lockstep.replay import page
from lockstep.replay.own import replay_script
from lockstep.replay.run import Replay, ReplayRequest, checkpoint_before, list_samples, replay_here
from lockstep.reporting.jsonl import EVENTS, last_step
from lockstep.reporting.page import page as html
from lockstep.runs import digest_file
from lockstep.training.checkpoint import durable


@dataclass(frozen=True)
class Options:
    """The options of `lockstep replay`. See commands/replay.py."""

    folder: Path
    step: int | None
    steps: str | None
    check: int | None
    samples: bool
    changes: tuple[str, ...]
    out: Path | None
    overrides: tuple[str, ...]
    trust: bool
    trace: Path | None = None
    script: Sequence[str] = ()  # command that runs a custom training loop


def replay(options: Options, tell: Callable[[str], None]) -> int:
    """Run `lockstep replay`, and return the exit code."""
    if [options.step, options.steps, options.check].count(None) != 2:
        raise UsageError("replay: pass exactly one of --step N, --steps A:B and --check K")
    if options.samples and options.step is None:
        raise UsageError("--samples: lists the samples of a single step; use --step N")
    if options.trace is not None and (options.step is None or options.samples):
        raise UsageError("--trace: traces a single step; use --step N without --samples")
    if options.script and (
        options.check or options.samples or options.changes or options.overrides or options.trace is not None
    ):
        raise UsageError(
            "--check, --samples, --change, --trace and overrides are not supported with a script; use only --step or "
            "--steps"
        )
    if options.check is not None:
        return _check(options, options.check, tell)
    first, last = _span(options)
    request = _request(options, first, last, examined=options.step is not None)
    if options.samples:
        for name in list_samples(request):
            tell(name)
        return EXIT_DONE
    out = options.out or Path(f"replay-{last}.html" if first == last else f"replay-{first}-{last}.html")
    for path in filter(None, (out, options.trace)):
        if path.resolve().is_relative_to(options.folder.resolve()):
            raise UsageError(f"{path}: inside the run folder, which a replay does not change; use a path outside of it")

    def report(result: Replay) -> None:
        _tell(tell, result)
        contents = {out: html(f"Replay of {options.folder}", [*page.sections(result)])}
        if options.trace is not None and result.trace is not None:
            contents[options.trace] = result.trace.text()
        for path, content in contents.items():
            with os_error_as(UsageError, f"{path}: cannot write"):
                durable.replace(path, content.encode(errors="backslashreplace"))
            tell(f"written {path}")

    return _script(request, options.script, report) if options.script else replay_here(request, report)


def _script(request: ReplayRequest, command: Sequence[str], report: Callable[[Replay], None]) -> int:
    """Replay steps of a custom training loop, and return the exit code.

    Raises UsageError if the script ended too early.
    """
    if (request.folder / CONFIG).exists():
        raise UsageError(f"{request.folder}: contains a run of a recipe, which needs no command; remove the command")
    result = replay_script(request.folder, request.first, request.last, command, examined=request.examined)
    report(result)
    if result.ended:
        raise UsageError(result.ended)
    return EXIT_DONE if result.different is None else EXIT_VERIFICATION


def _request(options: Options, first: int, last: int, *, examined: bool = False) -> ReplayRequest:
    has_trace = options.trace is not None
    return ReplayRequest(
        options.folder, first, last, options.overrides, options.changes, options.trust, examined, has_trace
    )


def _span(options: Options) -> tuple[int, int]:
    if options.step is not None:
        return options.step, options.step
    assert options.steps is not None
    first, colon, last = options.steps.partition(":")
    if not colon or not first.isdecimal() or not last.isdecimal() or not 1 <= int(first) <= int(last):
        raise UsageError(f"--steps: expected the first and the last step, such as 100:120, got {options.steps}")
    return int(first), int(last)


def _check(options: Options, count: int, tell: Callable[[str], None]) -> int:
    """Replay a random selection of the steps with a recorded digest."""
    if options.changes:
        raise UsageError("--check: compares with the run, so --change is not supported; remove --change")
    path = options.folder / digest_file.DIGESTS
    steps = [digest.step for digest in digest_file.read(path) if not digest.weights]
    if not steps:
        steps_done = last_step(options.folder / EVENTS)
        raise UsageError(
            f"{path}: contains no digest of the {steps_done} steps, so there is nothing to compare; use --step N"
        )
    sample = sorted(random.SystemRandom().sample(steps, min(count, len(steps))))
    tell(f"chosen: step{'s' if len(sample) > 1 else ''} {', '.join(map(str, sample))}")
    spans: dict[int, list[int]] = {}  # replayed steps by the step of the checkpoint that the replay starts from
    for step in sample:
        spans.setdefault(checkpoint_before(options.folder, step)[0], []).append(step)
    return max(replay_here(_request(options, span[0], span[-1]), partial(_tell, tell)) for span in spans.values())


def _tell(tell: Callable[[str], None], result: Replay) -> None:
    for line in page.lines(result):
        tell(line)
