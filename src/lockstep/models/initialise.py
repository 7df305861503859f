"""First weights as a function of the seed: the same in every process, wherever it runs."""

import random as python_random

import numpy as np
import torch
from torch import nn

from lockstep.core import random
from lockstep.tasks.base import Build


def initialise(build: Build, seed: int) -> nn.Module:
    """Build the model on the CPU with the generators of Python, NumPy and torch seeded by `seed`.

    The model is moved afterwards: a GPU would draw other numbers. The generators stay as the build leaves
    them; training seeds them again for each micro-batch.
    """
    key = random.key(random.INITIAL, seed)
    torch.manual_seed(random.torch_seed(key))
    np.random.seed(key & 0xFFFFFFFF)
    python_random.seed(key)
    return build()
