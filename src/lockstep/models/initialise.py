"""Initial weights as a function of the seed, the same in every process on every machine."""

import random as python_random

import numpy as np
import torch
from torch import nn

from lockstep.core import random
from lockstep.tasks.base import Build


def initialise(build: Build, seed: int) -> nn.Module:
    """Build the model on the CPU with the generators of Python, NumPy and torch seeded by `seed`.

    Move the model to its device afterwards, because a GPU would draw different numbers. The generators are left in the
    state after the build. Training seeds them again for each micro-batch.
    """
    key = random.key(random.INITIAL, seed)
    torch.manual_seed(random.torch_seed(key))
    np.random.seed(key & 0xFFFFFFFF)
    python_random.seed(key)
    return build()
