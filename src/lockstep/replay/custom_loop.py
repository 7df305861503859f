"""Replays steps of a custom training loop by running its script with a temporary run folder."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from lockstep.errors import UsageError
from lockstep.loop.examination import read_observations
from lockstep.loop.replaying import ReplayRequest
from lockstep.replay.run import Replay, check_step_reached, find_checkpoint_before, read_recorded_digests
from lockstep.reporting.jsonl import EVENTS, read_events
from lockstep.training.checkpoint import store


def replay_script(
    folder: Path, first_step: int, last_step: int, command: Sequence[str], *, with_observations: bool
) -> Replay:
    """Replay steps `first_step` to `last_step` by running a script with `command`, and return the result.

    The script resumes from the checkpoint before `first_step`, in a temporary run folder. Raises UsageError if the
    script ends before `last_step` is complete. With `with_observations`, the script may end during `last_step`, for
    example with its own error if a loss is NaN. In this case, the result contains the observations up to that point,
    and `end_reason` is set.
    """
    check_step_reached(folder, last_step)
    start, checkpoint = find_checkpoint_before(folder, first_step)
    with TemporaryDirectory(prefix="lockstep-replay-") as temporary:
        run_folder = Path(temporary, "run")
        (run_folder / store.FOLDER).mkdir(parents=True)
        if checkpoint is not None:
            shutil.copytree(checkpoint, run_folder / store.FOLDER / checkpoint.name, copy_function=_link)
        variables = ReplayRequest(run_folder, last_step, with_observations).variables
        completed = subprocess.run(
            command, env={**os.environ, **variables}, capture_output=True, text=True, check=False
        )
        events = [*read_events(run_folder / EVENTS)] if (run_folder / EVENTS).exists() else []
        observations = read_observations(run_folder)
        end_reason = ""
        if not any(event.get("step") == last_step for event in events) or (
            completed.returncode and observations is None
        ):
            last_lines = "\n".join((completed.stdout + completed.stderr).splitlines()[-20:])
            end_reason = (
                f"{' '.join(command)}: ended with exit code {completed.returncode} before step {last_step} was "
                f"complete:\n{last_lines}"
            )
            if observations is None:
                raise UsageError(end_reason)
        digests = read_recorded_digests(run_folder)
    recorded = read_recorded_digests(folder)
    [start_event] = [event for event in events if event["event"] == "started"]
    replay = Replay(folder, start, start_event["strategy"], start_event["processes"], end_reason=end_reason)
    if observations is not None:
        replay.sample_indices, replay.observations, replay.parameter_norms = (
            observations.samples,
            observations.examined,
            observations.layers,
        )
    for event in events:
        if event["event"] == "step":
            replay.add_step(event["step"], float(event["loss"]), event["lr"], digests, recorded, first_step)
    return replay


def _link(source: str, target: str) -> None:
    """Hard-link a checkpoint file, which is never modified. If hard links aren't possible, copy the file."""
    try:
        os.link(source, target)
    except OSError:  # on a different file system
        shutil.copyfile(source, target)
