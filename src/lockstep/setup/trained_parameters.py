"""Describes how many parameters a run trains, and which weights it starts from."""

import math

from lockstep.models.reference import PREFIX
from lockstep.setup.build import Setup


def describe_fine_tuning(setup: Setup) -> str:
    """Return a line with the number of trained parameters and the source of the initial weights.

    Returns "" if the run trains from scratch. Frozen reference models, as in DPO, aren't counted.
    """
    recipe, summary = setup.recipe, setup.summary
    trained = sum(math.prod(spec.shape) for spec in summary.trained_parameters.values())
    reference_specs = (
        spec for name, spec in summary.tensors.items() if name.startswith(PREFIX) and name not in summary.buffers
    )
    total = summary.num_parameters - sum(math.prod(spec.shape) for spec in reference_specs)
    if setup.initial_weights is not None:
        source = f"the weights of {setup.initial_weights.label}"
    elif recipe.model.weights is not None or recipe.start is not None:
        source = "the weights that the run recorded"
    elif recipe.model.pretrained:
        source = f"the pretrained weights of {recipe.model.name}"
    elif recipe.model.lora is not None or recipe.model.freeze:
        source = f"random weights (recipe.seed={recipe.seed}); to start from trained weights, set recipe.model.weights"
    else:
        return ""
    return f"{trained:,} of {total:,} parameters are trained ({100 * trained / total:.3g} %), starting from {source}"
