"""Implements `lockstep replay`: selects the steps, runs one replay after another, and writes the results."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lockstep.config.recorded import CONFIG_NAME
from lockstep.errors import EXIT_DONE, EXIT_VERIFICATION, UsageError, convert_os_error
from lockstep.replay import page
from lockstep.replay.custom_loop import replay_script
from lockstep.replay.run import Replay, ReplayRequest, find_checkpoint_before, list_samples, replay_here
from lockstep.reporting.jsonl import EVENTS, read_last_step
from lockstep.reporting.page import render_page
from lockstep.runs import digest_file
from lockstep.training.checkpoint import durable


@dataclass(frozen=True)
class ReplayOptions:
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


def replay(options: ReplayOptions, print_line: Callable[[str], None]) -> int:
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
        return _replay_random_steps(options, options.check, print_line)
    first, last = _parse_steps(options)
    request = _make_request(options, first, last, with_observations=options.step is not None)
    if options.samples:
        for name in list_samples(request):
            print_line(name)
        return EXIT_DONE
    out = options.out or Path(f"replay-{last}.html" if first == last else f"replay-{first}-{last}.html")
    for path in filter(None, (out, options.trace)):
        if path.resolve().is_relative_to(options.folder.resolve()):
            raise UsageError(f"{path}: inside the run folder, which a replay does not change; use a path outside of it")

    def report(result: Replay) -> None:
        _print_result(print_line, result)
        contents = {out: render_page(f"Replay of {options.folder}", [*page.make_sections(result)])}
        if options.trace is not None and result.trace is not None:
            contents[options.trace] = result.trace.to_text()
        for path, content in contents.items():
            with convert_os_error(UsageError, f"{path}: cannot write"):
                durable.replace(path, content.encode(errors="backslashreplace"))
            print_line(f"written {path}")

    return _replay_script(request, options.script, report) if options.script else replay_here(request, report)


def _replay_script(request: ReplayRequest, command: Sequence[str], report: Callable[[Replay], None]) -> int:
    """Replay steps of a custom training loop by running its script with `command`, and return the exit code.

    Raises UsageError if the script ended too early.
    """
    if (request.folder / CONFIG_NAME).exists():
        raise UsageError(f"{request.folder}: contains a run of a recipe, which needs no command; remove the command")
    result = replay_script(
        request.folder, request.first_step, request.last_step, command, with_observations=request.with_observations
    )
    report(result)
    if result.end_reason:
        raise UsageError(result.end_reason)
    return EXIT_DONE if result.first_difference is None else EXIT_VERIFICATION


def _make_request(
    options: ReplayOptions, first_step: int, last_step: int, *, with_observations: bool = False
) -> ReplayRequest:
    with_trace = options.trace is not None
    return ReplayRequest(
        options.folder,
        first_step,
        last_step,
        options.overrides,
        options.changes,
        options.trust,
        with_observations,
        with_trace,
    )


def _parse_steps(options: ReplayOptions) -> tuple[int, int]:
    if options.step is not None:
        return options.step, options.step
    assert options.steps is not None
    first, colon, last = options.steps.partition(":")
    if not colon or not first.isdecimal() or not last.isdecimal() or not 1 <= int(first) <= int(last):
        raise UsageError(f"--steps: expected the first and the last step, such as 100:120, got {options.steps}")
    return int(first), int(last)


def _replay_random_steps(options: ReplayOptions, count: int, print_line: Callable[[str], None]) -> int:
    """Replay up to `count` random steps with a recorded digest, and return the exit code."""
    if options.changes:
        raise UsageError("--check: compares with the run, so --change is not supported; remove --change")
    path = options.folder / digest_file.DIGESTS
    steps = [digest.step for digest in digest_file.read(path) if not digest.is_weights]
    if not steps:
        steps_done = read_last_step(options.folder / EVENTS)
        raise UsageError(
            f"{path}: contains no digest of the {steps_done} steps, so there is nothing to compare; use --step N"
        )
    sample = sorted(random.SystemRandom().sample(steps, min(count, len(steps))))
    print_line(f"chosen: step{'s' if len(sample) > 1 else ''} {', '.join(map(str, sample))}")
    spans: dict[int, list[int]] = {}  # steps to replay, by the step of the checkpoint to start from
    for step in sample:
        spans.setdefault(find_checkpoint_before(options.folder, step)[0], []).append(step)
    return max(
        replay_here(_make_request(options, span[0], span[-1]), partial(_print_result, print_line))
        for span in spans.values()
    )


def _print_result(print_line: Callable[[str], None], result: Replay) -> None:
    for line in page.format_lines(result):
        print_line(line)
