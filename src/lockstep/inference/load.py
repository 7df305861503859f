"""Loads the model of a checkpoint in plain PyTorch."""

import warnings
from collections.abc import Callable
from pathlib import Path

from torch import nn

from lockstep.common.user_code import UserCode
from lockstep.config.base import section_to_dict
from lockstep.config.recipe import Recipe
from lockstep.core.shard import get_local_tensor
from lockstep.errors import TrainingError, UsageError, convert_error
from lockstep.models.finetuning import build_finetuned
from lockstep.models.reference import remove_reference
from lockstep.runs.remote import make_local_copy
from lockstep.setup.build import make_model_builder, make_tuning, open_recipe_data
from lockstep.setup.chunk_check import check_saved_model
from lockstep.setup.examples import load_example_batches
from lockstep.setup.resume import get_checkpoint_recipe
from lockstep.setup.user_code import get_import_paths
from lockstep.tasks.find import find_task
from lockstep.training.checkpoint import saved_state, store


def load(
    run: str | Path, *, model: nn.Module | Callable[[], nn.Module] | None = None, trust: bool = False
) -> nn.Module:
    """Return the trained model of a run folder or a checkpoint as a plain PyTorch module.

    The module is on the CPU and in evaluation mode.

    If `run` is a run folder, the newest checkpoint is loaded. If the run has averaged weights (EMA), they are used.

    By default, the recipe builds the model. To load the weights into your own model, pass `model`, which is a module or
    a function that returns a module. A custom training loop has no recipe, so you need to pass `model`. User code that
    a recipe references only runs if you pass `trust=True`, because the author of the folder could run any code on your
    machine.

    If the recipe builds the model and the run was trained in chunks (recipe.model.chunks), samples of the run's data
    are used to check that the unchunked model computes the same function. If this isn't possible, a warning is shown.

    Raises UsageError if the weights don't match the model, if the checkpoint is damaged, or if the unchunked model
    computes a different function than its chunks.
    """
    checkpoint = store.load(make_local_copy(run))
    recipe: Recipe | None = None
    if model is None:
        recipe, module = _build_model_from_recipe(checkpoint, trust)
    elif isinstance(model, nn.Module):
        module = model
    else:
        with UserCode("model"):
            module = model()
    weights = checkpoint.snapshot.model if checkpoint.snapshot.ema is None else checkpoint.snapshot.ema
    with convert_error(UsageError, RuntimeError, f"{checkpoint.path}: its weights do not fit {type(module).__name__}"):
        module.load_state_dict({name: get_local_tensor(tensor) for name, tensor in weights.items()}, strict=True)
    remove_reference(module)
    module.eval()  # not chained, because eval() returns the result of train(), which user code may override
    if recipe is not None and recipe.model.chunks > 1:
        _check_chunks(checkpoint.path, module, recipe, trust)
    return module


def _check_chunks(path: Path, model: nn.Module, recipe: Recipe, trust: bool) -> None:
    """Check that the unchunked model computes the same outputs as its chunks on samples of the run's data.

    Data isn't downloaded. Creating samples can run user code that the recipe references for the data or the task. If
    there is such code and `trust` is false, a warning is shown instead.
    """
    if not trust and (paths := get_import_paths(recipe)):
        warnings.warn(
            f"{path}: trained in {recipe.model.chunks} chunks, but not compared with the unchunked model, because the "
            f"recipe references user code to create samples: {', '.join(paths.values())}; pass trust=True if you trust "
            f"its author",
            stacklevel=3,
        )
        return
    try:
        dataset = open_recipe_data(recipe, allow_download=False)
        example, evaluation = load_example_batches(recipe, dataset)
    except (UsageError, TrainingError) as error:
        warnings.warn(
            f"{path}: trained in {recipe.model.chunks} chunks, but not compared with the unchunked model, because the "
            f"data cannot be opened: {error}",
            stacklevel=3,
        )
        return
    task, _ = find_task(section_to_dict(recipe), f"model {recipe.model.name}", dataset.facts, example)
    check_saved_model(path, model, recipe.model, task.inputs(evaluation))


def _build_model_from_recipe(checkpoint: store.FoundCheckpoint, trust: bool) -> tuple[Recipe, nn.Module]:
    recipe = get_checkpoint_recipe(checkpoint.path, checkpoint.snapshot)
    state = saved_state.parse_state(checkpoint.path, checkpoint.snapshot.state)
    paths = get_import_paths(recipe)
    if "model" in paths and not trust:
        raise UsageError(
            f"{checkpoint.path}: its recipe references user code, {paths['model']}, which would run with your "
            f"permissions; pass model=, or pass trust=True if you trust its author"
        )
    return recipe, build_finetuned(make_model_builder(recipe, state.data), make_tuning(recipe))
