"""Whether a loop of the user's own gives the same numbers on all placements: `lockstep.verify`.

The function, or the script, is run once for each placement, in processes of its own. What rank 0 saw is written after
each step, its loss and a digest of each tensor of the model, and compared with one process.

Then one placement is stopped between two steps, as by a signal, which saves it, and another one resumes: what a
checkpoint does not hold shows in the steps after that.
"""

import json
import os
import re
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final, final

from lockstep.common import plainfile
from lockstep.common.hashing import other_seed
from lockstep.common.patterns import list_some
from lockstep.config.blame import with_places
from lockstep.config.load import load
from lockstep.config.placement import Placement
from lockstep.errors import EXIT_DONE, EXIT_SAVED, EXIT_USAGE, UsageError, VerificationError
from lockstep.loop.model import explain_errors
from lockstep.loop.script import run_script
from lockstep.probe.traits import ModelTraits
from lockstep.probe.witness import NUMPY, PYTHON, TORCH, record_reads
from lockstep.ranks.rendezvous import Rendezvous
from lockstep.reporting.jsonl import EVENTS, JsonLines, read
from lockstep.reporting.sink import Sink
from lockstep.reporting.verification import Verdict, against
from lockstep.run.start import can_be_spawned, import_for_all, in_workers_silently
from lockstep.runs.worker_context import WORKER_CONTEXT, WorkerContext
from lockstep.setup.user_code import own_modules
from lockstep.training.events import Event, Started
from lockstep.verification.cases import verify_on
from lockstep.verification.causes import of_hashes
from lockstep.verification.kept import Kept, Lost

STRATEGIES: Final = ("ddp", "zero1", "zero2", "zero3")
_TRACE: Final = "trace.jsonl"
_OF_STRATEGY: Final = re.compile(r"\bstrategy\b(?!\.)")  # stands in refusals of what only some strategies can be
_WITNESSED: Final = "witnessed-{}.json"  # by a rank
_RUN: Final = "run"  # the run folder of a placement
_STATE: Final = "state.json"  # of the script, as the run that was stopped had it
_LOST: Final = "lost.json"  # of that, what the run that resumed it has not
_SAME: Final = ("identical", "within tolerance")
_SHOWN: Final = 3  # tensors
_STEPS: Final = 4  # of a recipe, as the command compares

Asked = str | Mapping[str, Any]  # a strategy: its name, or that and its options
Step = tuple[int, str, dict[str, str]]  # its number, its loss, and the digests of all tensors
_PLAN: Final = ("train_samples", "batch", "microbatches", "steps")  # of Started: what run.steps was asked for


@dataclass(frozen=True)
class Trace:
    """What rank 0 saw: the steps that were compared, what each call of run.steps asked for, what was warned of."""

    steps: list[Step]
    plans: list[dict[str, int]]
    warnings: list[str]

    @property
    def first_run(self) -> list[Step]:
        """The steps of the first run, if the function joins several."""
        later = [number for number, step in enumerate(self.steps) if number and step[0] <= self.steps[number - 1][0]]
        return self.steps[: later[0]] if later else self.steps


@dataclass(frozen=True)
class Checked:
    """The result of one placement in `verify`.

    `verdict` is identical, within tolerance, differs, failed or not possible; `reason` names the first difference, or
    why it failed or is not possible. `resumed` says after which step the run was stopped, and what resumed it.
    """

    strategy: str
    processes: int
    verdict: Verdict
    steps: int = 0
    reason: str = ""
    resumed: str = ""

    @property
    def good(self) -> bool:
        """Whether the numbers agree, or the placement is not possible."""
        return self.verdict in (*_SAME, "not possible")

    @property
    def line(self) -> str:
        """The placement and its verdict, in a line."""
        steps = f", {self.steps} step{'' if self.steps == 1 else 's'}" if self.verdict in _SAME else ""
        reason = f"{', ' if steps else ': '}{self.reason}" if self.reason else ""
        resumed = f", {self.resumed}" if self.resumed else ""
        return f"{self.strategy} on {self.processes}{resumed}: {self.verdict}{steps}{reason}"


def verify(
    function: Callable[[], object] | str | Path,
    *,
    processes: Sequence[int] = (1, 2, 3),
    strategies: Sequence[str | Mapping[str, Any]] = STRATEGIES,
    steps: int | None = None,
    seed: int | None = 0,
) -> list[Checked]:
    """Compare each step of a training loop on these placements with one process: its loss and all weights.

    `function` joins a run and goes through its steps; in its place may stand the name of a recipe, its file, or that of
    a script. It runs in processes of its own, once for each placement, and is ended after `steps` steps; left out, it
    runs to its end, and a recipe for 4 steps.

    `strategies`, names or mappings of `name` and options, replace what the function gives to `run.place`, on each of
    `processes` above 1. With 1 among them the reference is run twice, the second time with another seed of Python's
    hashes.

    Then a placement is stopped after a step that `seed` draws, saved as by a signal, and resumed on another one, also
    if the function saves nothing itself. With `seed=None` a function or a script is not resumed. A recipe is resumed
    on each placement, half way.

    VerificationError where any placement differs or fails, UsageError where the function joins no run or no placement
    is possible.
    """
    if isinstance(function, str | Path) and not str(function).endswith(".py"):
        return _of_recipe(str(function), processes, strategies, steps or _STEPS)
    if isinstance(function, str | Path):
        function = script(Path(function), ())
    rows = list(check_placements(function, processes, strategies, steps, seed=seed))
    if not all(row.good for row in rows):
        raise VerificationError("\n".join(["placements differ from one process:", *(row.line for row in rows)]))
    check_compared(rows)
    return rows


def check_compared(rows: Sequence[Checked]) -> None:
    """Raise UsageError where no placement was possible, so that nothing was compared."""
    if all(row.verdict == "not possible" for row in rows):
        raise UsageError("nothing was compared: none of these placements is possible for the loop; choose others")


def _of_recipe(recipe: str, processes: Sequence[int], strategies: Sequence[Asked], steps: int) -> list[Checked]:
    """Compare placements of a recipe."""
    loaded = load(recipe)
    with with_places(loaded):
        found = verify_on(loaded, _places(processes, strategies), steps)
    if not found.agree:
        raise VerificationError(against(found))
    return [Checked(each.strategy, each.processes, each.verdict, len(found.steps), each.reason) for each in found.rows]


def _places(processes: Sequence[int], strategies: Sequence[Asked]) -> list[tuple[Asked, int]]:
    """Return one process, if it is among `processes`, and each strategy on each other number of them."""
    alone: list[tuple[Asked, int]] = [("single", 1)] if 1 in processes else []
    return [*alone, *((strategy, count) for strategy in strategies for count in processes if count > 1)]


def check_placements(
    function: Callable[[], object],
    processes: Sequence[int],
    strategies: Sequence[Asked],
    steps: int | None,
    guarded: bool = True,
    *,
    seed: int | None = 0,
) -> Iterator[Checked]:
    """Yield what becomes of each placement, as it is known, and of one that is stopped after a step and resumed.

    Not `guarded`, what a loop must leave as it is (loop/guard.py) is no longer refused, and shows in the numbers
    instead: this is for tests of the comparison, since a refusal with its line is the better answer. What no
    comparison shows is refused all the same (loop/loss_check.py): a loss divided by a constant gives one set of weights
    everywhere.
    """
    import_for_all()
    with tempfile.TemporaryDirectory(prefix="lockstep-verify-") as folder:
        loop = _Loop(function, steps, guarded, Path(folder))
        code, message = loop.run("single", 1, "reference")
        if code != EXIT_DONE:
            kind = UsageError if code == EXIT_USAGE else VerificationError
            raise kind(f"the reference, one process: {message}")
        reference = loop.trace("reference")
        places = _places(processes, strategies)
        if reference.warnings and 1 not in processes:
            places = [("single", 1), *places]
        agreeing: list[tuple[Asked, int]] = []
        for number, (strategy, count) in enumerate(places):
            if count == 1:
                again = _again(loop, reference, can_be_spawned(function))
                if again.verdict == "identical":
                    agreeing.append((strategy, count))
                yield again
                continue
            code, message = loop.run(strategy, count, str(number))
            label = _label(strategy)
            if code != EXIT_DONE:  # what one process passed, and several are refused, is a fault of the loop
                unfit = code == EXIT_USAGE and _OF_STRATEGY.search(message)
                yield Checked(label, count, "not possible" if unfit else "failed", reason=message)
                continue
            found = loop.trace(str(number))
            departure = _mismatch(reference, found)
            if departure:
                reads, kept, traits = loop.witnessed(strategy, count, f"{number}-witnessed")
                cause = _likely_cause(reads, kept)
                departure += cause or _of_model(traits, _command(function, label, count))
            else:
                agreeing.append((strategy, count))
            yield Checked(label, count, "differs" if departure else "identical", len(found.steps), departure)
        if seed is not None and agreeing and not reference.warnings and len(reference.first_run) > 1:
            yield _resume(loop, reference, agreeing, seed)


def _label(strategy: Asked) -> str:
    return strategy if isinstance(strategy, str) else str(strategy["name"])


def _resume(loop: "_Loop", reference: Trace, agreeing: Sequence[tuple[Asked, int]], seed: int) -> Checked:
    """Stop the last placement that agrees after a step, resume on another, and compare its steps with the reference."""
    last = len(reference.first_run) - 1
    strategy, count = agreeing[-1] if last > 1 else ("single", 1)
    # Several ranks agree to stop while the next step computes, so none stops after the first.
    stop = Random(seed).randint(min(count, 2), last)
    others = [each for each in agreeing if each[1] != count]
    carrier, size = others[0] if others else ("single", 1)
    resumed = f"stopped after step {stop} (seed {seed}) and resumed by {_label(carrier)} on {size}"
    row = Checked(_label(strategy), count, "failed", resumed=resumed)
    code, message = loop.run(strategy, count, "stopped", stop=stop)
    if code != EXIT_DONE:
        return replace(row, reason=message)
    code, message = loop.run(carrier, size, "resumed", resumes="stopped")
    if code != EXIT_DONE:
        return replace(row, reason=f"resumed: {message}")
    found = loop.trace("resumed")
    departure = _mismatch(replace(reference, steps=reference.steps[stop:]), found)
    if not departure:
        return replace(row, verdict="identical", steps=len(found.steps))
    # A second run to the same step shows what is another in any two runs, such as a time.
    again = [loop.run(strategy, count, name, stop=stop, witness=True)[0] for name in ("stopped-again", "stopped-twice")]
    if again == [EXIT_DONE, EXIT_DONE]:
        loop.forget_varying("stopped-again", "stopped-twice")
        loop.run(carrier, size, "resumed-again", resumes="stopped-again", witness=True)
    departure += _lost_state(loop.lost("resumed-again"))
    if not loop.has_folder("reference"):
        departure += "; lockstep.join has no dir=, so runs of this loop are never resumed: --no-resume skips this check"
    return replace(row, verdict="differs", steps=len(found.steps), reason=departure)


def _lost_state(lost: Lost) -> str:
    """Name the state of the script that a resume lost, as the likely cause."""
    if lost.likely:
        return (
            f"; likely cause: no checkpoint holds {_listed(lost.likely)}; keep it in run.state from step to step, or "
            "compute the value from step.number"
        )
    unused = f"; or {_listed(lost.unused)}, which it seems not to read" if lost.unused else ""
    return (
        "; likely cause: the loop depends on something that no checkpoint holds, and that is in none of the variables "
        f"that it reads: a file, the clock, or the state of an object of a library{unused}"
    )


def _listed(changes: Mapping[str, str]) -> str:
    return list_some([f"{name} ({change})" for name, change in changes.items()], _SHOWN)


def _again(loop: "_Loop", reference: Trace, spawned: bool) -> Checked:
    """Run the reference a second time, with another order of sets where the function can be sent to a new process.

    Where its data is at fault that need not show in a few steps, which see each sample once.
    """
    if reference.warnings:
        return Checked("single", 1, "differs", reason=reference.warnings[0])
    hashes = other_seed() if spawned else None
    code, message = loop.run("single", 1, "again", hashes)
    if code != EXIT_DONE:
        return Checked("single", 1, "failed", reason=message)
    found = loop.trace("again")
    departure = _mismatch(reference, found)
    if not departure:
        note = "" if hashes else "with the same order of sets: give a function of a module, not of this script"
        return Checked("single", 1, "identical", len(found.steps), note)
    if hashes and loop.run("single", 1, "third")[0] == EXIT_DONE and not _mismatch(reference, loop.trace("third")):
        departure += f"; likely cause: {of_hashes()}"
    return Checked("single", 1, "differs", len(found.steps), departure)


def _likely_cause(reads: Mapping[str, str], kept: Mapping[str, str]) -> str:
    causes = [f"{what} ({where})" for what, where in reads.items()]
    found = f"the loop reads {' and '.join(causes)}" if causes else ""
    if kept:
        names = [f"{name} ({change})" for name, change in kept.items()]
        found += f"{', and ' if found else 'the loop '}keeps {list_some(names, _SHOWN)} from one step to the next"
    return f"; likely cause: {found}; let the loop follow from its data and its model alone" if found else ""


def _of_model(traits: Sequence[str], command: str) -> str:
    """Say what in the model may depend on the strategy, or else what to do."""
    if traits:
        return f"; perhaps since {traits[0]}"
    return (
        f"; nothing in the loop or its model was found that explains it: use strategy ddp or zero1 until this is "
        f"mended, and send the output of `{command}`"
    )


def _command(function: Callable[[], object], strategy: str, count: int) -> str:
    """Return the command that verifies this placement of a script alone, or the call for a function."""
    if isinstance(function, partial) and function.func is run_script:
        words = ["lockstep", "verify", "--processes", str(count), "--strategy", strategy, *function.args[1]]
        return shlex.join(words)
    return f"lockstep.verify(..., processes=({count},), strategies=({strategy!r},))"


def script(path: Path, arguments: Sequence[str]) -> Callable[[], object]:
    """Return a script as a function."""
    return partial(run_script, str(path), [str(path), *arguments])


class _Enough(BaseException):
    """Ends the function after the requested steps."""


@dataclass(frozen=True)
class _Loop:
    """The function on a placement, in processes of its own that write what they see into a folder below `folder`."""

    function: Callable[[], object]
    steps: int | None
    guarded: bool
    folder: Path

    def run(
        self,
        strategy: Asked,
        count: int,
        name: str,
        hashes: str | None = None,
        *,
        witness: bool = False,
        stop: int | None = None,
        resumes: str | None = None,
    ) -> tuple[int, str]:
        """Run the function; return the exit code, and the message of a failure.

        `hashes` is a seed of Python's hashes for it, left out this process's. A `witness` writes down what it reads. A
        run is stopped and saved after step `stop`, and resumes the one that was stopped under the name `resumes`.
        """
        folder = self.folder / name
        folder.mkdir()
        given = strategy if isinstance(strategy, str) else dict(strategy)
        stopped = None if resumes is None else self.folder / resumes
        work = partial(self._work, given, folder, witness, stop, stopped)
        code, text = in_workers_silently(work, None, Placement(), count, hashes)
        return code, text.partition("error: ")[2] or text

    def has_folder(self, name: str) -> bool:
        """Return whether the function keeps its run in a folder."""
        return (self.folder / name / _RUN).exists()

    def forget_varying(self, name: str, other: str) -> None:
        """Leave out of the state of a run that was stopped what was another in the run `other`."""
        states = [
            plainfile.parse_json((self.folder / each / _STATE).read_text(encoding="utf-8")) for each in (name, other)
        ]
        texts, others = (dict(state["texts"]) for state in states)
        states[0]["texts"] = {key: text for key, text in texts.items() if others.get(key) == text}
        (self.folder / name / _STATE).write_text(json.dumps(states[0]), encoding="utf-8")

    def lost(self, name: str) -> Lost:
        """Return the state of the script that a run which resumed has lost."""
        path = self.folder / name / _LOST
        return Lost(*plainfile.parse_json(path.read_text(encoding="utf-8"))) if path.exists() else Lost({}, {})

    def trace(self, name: str) -> Trace:
        """Return what rank 0 saw; UsageError where it made no step."""
        path = self.folder / name / _TRACE
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        if not lines:
            raise UsageError("the function made no step: go through run.steps(...) in it")
        steps = [(int(number), str(loss), dict(digests)) for number, loss, digests in map(plainfile.parse_json, lines)]
        events = [*read(self.folder / name / EVENTS)]
        plans = [{key: each[key] for key in _PLAN} for each in events if each["event"] == "started"]
        return Trace(steps, plans, [each["text"] for each in events if each["event"] == "warning"])

    def witnessed(
        self, strategy: Asked, count: int, name: str
    ) -> tuple[Mapping[str, str], Mapping[str, str], Sequence[str]]:
        """Run the function again; return what it reads besides its batches, and in which line, and what it keeps.

        The last is what of its model may depend on the strategy.
        """
        self.run(strategy, count, name, witness=True)
        reads: dict[str, str] = {}
        kept: dict[str, str] = {}
        traits: dict[str, None] = {}
        for path in sorted((self.folder / name).glob(_WITNESSED.format("*"))):
            found = plainfile.parse_json(path.read_text(encoding="utf-8"))
            reads, kept = {**reads, **found["reads"]}, {**kept, **found["kept"]}
            traits |= dict.fromkeys(found["traits"])
        return reads, kept, [*traits]

    def _work(
        self,
        strategy: str | dict[str, Any],
        folder: Path,
        witness: bool,
        stop: int | None,
        resumes: Path | None,
        _ready: None,
        rendezvous: Rendezvous,
    ) -> int:
        """Be one of the ranks of a placement."""
        sys.stderr = sys.__stderr__
        rank = rendezvous.info.rank
        reads: dict[str, str] = {}
        kept: dict[str, str] = {}
        states: list[Kept] = []
        traits = ModelTraits()

        def observe(number: int, loss: float, digests: Mapping[str, str]) -> None:
            if rank == 0:
                with (folder / _TRACE).open("a", encoding="utf-8") as trace:
                    trace.write(json.dumps([number, loss.hex(), dict(digests)]) + "\n")
            if witness and states and not kept:
                kept.update(states[0].changes(_kept(ambient)))
            if self.steps is not None and number >= self.steps:
                raise _Enough
            if stop is None or rank or len(ambient.runs) > 1:
                return
            if witness and number == stop:
                now = _kept(ambient)
                state = {"texts": now.texts(), "likelihoods": now.likelihoods()}
                (folder / _STATE).write_text(json.dumps(state), encoding="utf-8")
            if number == stop - (rendezvous.info.size > 1):  # see World.agree_to_stop
                signal.raise_signal(signal.SIGUSR1)  # the run saves itself after step `stop`, and ends

        sinks: list[Sink] = [JsonLines(folder / EVENTS)] if rank == 0 else []
        if rank == 0 and witness and resumes is not None:
            before = plainfile.parse_json((resumes / _STATE).read_text(encoding="utf-8"))
            sinks.append(_LostState(before, folder / _LOST, lambda: _kept(ambient)))
        place, keeps = (resumes or folder) / _RUN, stop is not None or resumes is not None
        ambient = WorkerContext(rendezvous, strategy, place, keeps, observe, sinks, self.guarded)
        WORKER_CONTEXT.set(ambient)
        recorded = _record_reads(ambient, reads, states, traits) if witness and not keeps else nullcontext()
        with Path(os.devnull).open("w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
            try:
                with recorded, explain_errors(ambient.runs):
                    self.function()
            except _Enough:
                pass
            except SystemExit as end:
                if end.code not in (None, 0) and (stop is None or end.code != EXIT_SAVED):
                    raise
            if not ambient.runs:
                raise UsageError("it joined no run: call lockstep.join in it")
            for run in ambient.runs:
                run.close()
        if witness:
            found = {"reads": reads, "kept": kept, "traits": traits.texts(own_modules(()).items())}
            (folder / _WITNESSED.format(rank)).write_text(json.dumps(found), encoding="utf-8")
        return EXIT_DONE


@final
class _LostState:
    """A sink that compares the script's state, when its first loop begins, with that of the run that was stopped."""

    def __init__(self, before: Mapping[str, Any], path: Path, state: Callable[[], Kept]) -> None:
        self._before = before
        self._path = path
        self._state = state

    def write(self, event: Event, time: float) -> None:
        """See Sink. The loop over run.steps writes its first event when the script asks for the first step."""
        if isinstance(event, Started) and not self._path.exists():
            lost = self._state().lost(self._before["texts"], self._before["likelihoods"])
            self._path.write_text(json.dumps(lost), encoding="utf-8")

    def close(self) -> None:
        """See Sink."""


@contextmanager
def _record_reads(
    ambient: WorkerContext, reads: dict[str, str], states: list[Kept], traits: ModelTraits
) -> Iterator[None]:
    """Note what is read in the block, and where: the rank anywhere, all else within micro-batches alone.

    What is kept before the first of them is added to `states`, and from then on the model's `traits` are watched. A run
    is seeded before, and a dataset before each sample; but what a micro-batch draws from is torch's to seed.
    """

    def computing() -> int:
        found = max((run._computing for run in ambient.runs), default=0)
        if found and not states:
            states.append(_kept(ambient))
            for run in ambient.runs:
                if run._model is not None:
                    traits.watch(run._model)
        return found

    with record_reads(computing) as found:
        try:
            yield
        finally:
            generators = {what: f"{what} random generator" for what in (PYTHON, NUMPY)}
            reads |= {generators.get(what, what): where for what, where in found.items() if what != TORCH}


def _kept(ambient: WorkerContext) -> Kept:
    return Kept([run._model for run in ambient.runs if run._model is not None])


def _mismatch(reference: Trace, found: Trace) -> str:
    """Say what differs first, "" where nothing does."""
    for plan, other_plan in zip(reference.plans, found.plans, strict=False):
        if wrong := next((key for key in _PLAN if plan[key] != other_plan[key]), None):
            return f"run.steps: {wrong.removeprefix('train_')} is {other_plan[wrong]:,}, not {plan[wrong]:,}"
    for (number, loss, digests), (other, other_loss, others) in zip(reference.steps, found.steps, strict=False):
        if number != other:
            return f"step {other} where the reference has step {number}"
        if loss != other_loss:
            return f"step {number}: the loss is {float.fromhex(other_loss)!r}, not {float.fromhex(loss)!r}"
        names = [name for name in digests if digests[name] != others.get(name)]
        if names:
            return f"step {number}: after the same loss other weights: {list_some(names, _SHOWN)}"
    if len(reference.steps) != len(found.steps):
        return f"{len(found.steps)} steps, not {len(reference.steps)}"
    return ""
