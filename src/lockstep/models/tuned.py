"""A model as a recipe tunes it: with other first weights, adapters, and parameters that are not trained."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import nn

from lockstep.models.freezing import freeze

Build = Callable[[], nn.Module]


def tuned(build: Build, frozen: Sequence[str]) -> nn.Module:
    """Build a model, and let what fits the patterns `frozen` not be trained."""
    model = build()
    if frozen:
        freeze(model, frozen)
    return model


def on_meta(build: Build) -> nn.Module:
    """Build a model on the meta device, or on the CPU where that fails: for its names and shapes."""
    with warnings.catch_warnings(action="ignore"):  # the real build warns too, and not of values that are not there
        try:
            with torch.device("meta"):
                return build()
        except Exception:  # a model may read values while it is built; what fails on the CPU too is told
            return build()
