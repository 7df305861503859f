"""Load the model of a checkpoint in plain PyTorch."""

from collections.abc import Callable
from pathlib import Path

from torch import nn

from lockstep.common.own_code import OwnCode
from lockstep.core.shard import local_tensor
from lockstep.errors import UsageError, error_as
from lockstep.models.finetuning import build_finetuned
from lockstep.run.build import plain_model, tuning_of
from lockstep.run.resume import checkpoint_recipe
from lockstep.run.user_code import import_paths
from lockstep.training.checkpoint import saved_state, store


def load(
    run: str | Path, *, model: nn.Module | Callable[[], nn.Module] | None = None, trust: bool = False
) -> nn.Module:
    """Return the trained model of a run folder or a checkpoint in plain PyTorch: on the CPU, and in evaluation mode.

    Of a run folder the newest checkpoint is taken, with averaged weights (ema) if the run has them. `model`, a module
    or a function that returns one, is given the weights; left out, the recipe builds it. A loop of your own has no
    recipe, and needs `model`. Code that a recipe names runs only with `trust`: whoever wrote the folder could run
    anything.

    UsageError where the weights do not fit the model, or a checkpoint is damaged.
    """
    found = store.load(Path(run))
    if model is None:
        made = _build_from_recipe(found, trust)
    elif isinstance(model, nn.Module):
        made = model
    else:
        with OwnCode("model"):
            made = model()
    weights = found.snapshot.model if found.snapshot.ema is None else found.snapshot.ema
    with error_as(UsageError, RuntimeError, f"{found.path}: its weights do not fit {type(made).__name__}"):
        made.load_state_dict({name: local_tensor(held) for name, held in weights.items()}, strict=True)
    made.eval()  # calls train(), which of the user's own may return nothing
    return made


def _build_from_recipe(found: store.FoundCheckpoint, trust: bool) -> nn.Module:
    recipe = checkpoint_recipe(found.path, found.snapshot)
    state = saved_state.parse_state(found.path, found.snapshot.state)
    paths = import_paths(recipe)
    if "model" in paths and not trust:
        raise UsageError(
            f"{found.path}: its recipe names code, {paths['model']}, which would run with your rights; give model=, or "
            f"trust=True where you know who wrote it"
        )
    return build_finetuned(plain_model(recipe, state.data), tuning_of(recipe))
