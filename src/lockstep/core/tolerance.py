"""How far two correct computations of the same sums may differ: the measure for strategies that are only close.

A sum of n terms, rounded at each addition by at most the unit roundoff u, is off by at most gamma_n = n u / (1 - n u)
times the sum of the terms' magnitudes, in whatever order it is added (Higham 2002, ISBN 978-0-89871-521-7, lemma
3.1 and section 4.2). That is the worst case. Roundings are not all of one sign: with mean
zero and independent ones the bound grows with the root of n (Higham and Mary 2019, A New Approach to Probabilistic
Rounding Error Analysis, SIAM J. Sci. Comput. 41(5), theorem 2.4).
"""

import math
from typing import Final

# With the hidden one, of a recipe's precision: of what is rounded most.
SIGNIFICAND_BITS: Final = {
    "fp64": 53,
    "fp32": 24,
    "tf32": 11,
    "fp16": 11,
    "fp16-compute": 11,
    "fp16-true": 11,
    "bf16": 8,
    "bf16-compute": 8,
}

# The bound of a sum of n terms then fails with a probability of at most 2 n exp(-LAMBDA**2 / 2): for 10**9 terms that
# is 3e-5.
LAMBDA: Final = 8.0


def unit_roundoff(precision: str) -> float:
    """Return the largest relative error of rounding to the nearest number of `precision`."""
    return 2.0 ** -SIGNIFICAND_BITS[precision]


def worst_case(roundoff: float, length: int) -> float:
    """Return gamma_n for sums of `length` terms; infinite where n u reaches 1, since nothing is promised there."""
    product = length * roundoff
    return product / (1 - product) if product < 1 else math.inf


def likely(roundoff: float, length: int) -> float:
    """Return the probabilistic bound for sums of `length` terms: exp(LAMBDA sqrt(n) u + n u**2 / (1 - u)) - 1."""
    exponent = LAMBDA * math.sqrt(length) * roundoff + length * roundoff**2 / (1 - roundoff)
    return math.expm1(exponent) if exponent < 1 else math.inf


def comm_tolerance(roundoff: float, ranks: int, steps: int) -> float:
    """Return how much further a run may be from another where ranks send gradients in another precision.

    Each rank rounds what it sends, and `ranks` are added: a step's gradient is off by gamma of their number. What that
    does to the next gradient is less than twice as much while learning rate times curvature is below 2, beyond which no
    training is stable: hence 2 x steps.
    """
    return 2 * steps * worst_case(roundoff, ranks)


def tolerance(roundoff: float, length: int, depth: int, steps: int) -> float:
    """Return how far two runs may differ, as a part of the largest magnitude of what is compared.

    `length` is the number of terms of the longest sum, `depth` how many such sums follow each other in a forward or
    backward pass, `steps` how many updates were done. To first order in u the errors of what follows each other add
    up (Higham 2002, section 3.5), and each of the two runs has its own: hence 2 x depth x steps. Of the two bounds on
    a sum it takes the smaller. It says nothing of models that amplify a small difference from step to step, and is
    therefore meant for a few steps.
    """
    return 2 * depth * steps * min(worst_case(roundoff, length), likely(roundoff, length))
