"""Initializes the weights of a model from a seed, with the same result in every process and on every machine."""

import random as python_random

import numpy as np
import torch
from torch import nn

from lockstep.core import random
from lockstep.tasks.base import ModelFactory


def initialize_model(build: ModelFactory, seed: int) -> nn.Module:
    """Seed the global RNGs of Python, NumPy and torch, and build the model on the CPU.

    Move the model to its device afterwards, because a GPU would generate different random numbers. The RNG states
    aren't restored, because training seeds the RNGs for each micro-batch.
    """
    key = random.make_key(random.INITIAL, seed)
    torch.manual_seed(random.make_torch_seed(key))
    np.random.seed(key & 0xFFFFFFFF)
    python_random.seed(key)
    return build()
