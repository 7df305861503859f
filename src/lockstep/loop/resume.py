"""Reads a checkpoint of a custom loop, and checks that it matches the current loop and model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.core.sample_order import SHUFFLED
from lockstep.core.shard import get_local_tensor
from lockstep.errors import UsageError
from lockstep.loop.distributed_model import PlacedModel
from lockstep.loop.member import Member
from lockstep.loop.record import reject_different_loop
from lockstep.run.checkpoints import ResumeCheckpoint
from lockstep.training.checkpoint import saved_state
from lockstep.training.checkpoint.read_same_checkpoint import read_same_checkpoint
from lockstep.training.checkpoint.signing import read_signing_key


def read_loop_checkpoint(member: Member, path: Path, placed: PlacedModel) -> tuple[ResumeCheckpoint, dict[str, Any]]:
    """Return the checkpoint and the settings of the loop that saved it. All ranks must call this function.

    Raises UsageError if the settings or the model differ from the current loop.
    """
    manifest, snapshot = read_same_checkpoint(member.rendezvous, path, read_signing_key(member.settings.run.key_file))
    state = saved_state.parse_state(path, snapshot.state)
    loop = state.recipe.get("loop")
    if not isinstance(loop, dict):
        raise UsageError(f"{path}: saved by a recipe, not by a custom training loop; choose a different dir")
    # Checkpoints of earlier Lockstep versions lack these keys.
    loop = {"chunks": 1, "plan": {}, "scheduler": None, "ema": None, "order": SHUFFLED, **loop}
    reject_different_loop(path, loop, placed.get_decisive_settings())
    _check_tensor_specs(path, snapshot.model, placed.canonical.state().model)
    return ResumeCheckpoint(snapshot, state, manifest.weights_sha256), loop


def _check_tensor_specs(path: Path, saved: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Raise UsageError if the tensors of a checkpoint and of the model differ in name, shape or dtype."""
    expected_specs = {name: (tuple(value.shape), get_local_tensor(value).dtype) for name, value in model.items()}
    saved_specs = {name: (tuple(value.shape), get_local_tensor(value).dtype) for name, value in saved.items()}
    differing_names = [
        name for name in sorted({*expected_specs, *saved_specs}) if expected_specs.get(name) != saved_specs.get(name)
    ]
    if differing_names:
        raise UsageError(
            f"{path}: does not match the model: different shape, dtype or name of {', '.join(differing_names[:5])}; "
            f"choose a different dir"
        )
