"""Tolerances for strategies without bitwise equal results: how far two correct computations of sums can differ.

If each addition has a relative rounding error of at most the unit roundoff u, the error of a sum of n terms is at most
gamma_n = n u / (1 - n u) times the sum of the magnitudes of the terms, for any order of addition (Higham 2002, ISBN
978-0-89871-521-7, lemma 3.1 and section 4.2). This is the worst case. If rounding errors are independent and have mean
zero, the bound grows with the square root of n (Higham and Mary 2019, A New Approach to Probabilistic Rounding Error
Analysis, SIAM J. Sci. Comput. 41(5), theorem 2.4).
"""

import math
from typing import Final

# The significand bits of the narrowest dtype of each precision, including the hidden bit.
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

# The probability that the bound for a sum of n terms doesn't hold is at most 2 n exp(-LAMBDA**2 / 2): 3e-5 for 10**9
# terms.
LAMBDA: Final = 8.0


def compute_unit_roundoff(precision: str) -> float:
    """Return the unit roundoff of `precision`: the largest relative error of rounding to the nearest number."""
    return 2.0 ** -SIGNIFICAND_BITS[precision]


def compute_worst_case_bound(roundoff: float, num_terms: int) -> float:
    """Return gamma_n for sums of `num_terms` terms, or infinity if n u >= 1, because the bound then doesn't hold."""
    product = num_terms * roundoff
    return product / (1 - product) if product < 1 else math.inf


def compute_probabilistic_bound(roundoff: float, num_terms: int) -> float:
    """Return the probabilistic bound for sums of `num_terms` terms: exp(LAMBDA sqrt(n) u + n u**2 / (1 - u)) - 1."""
    exponent = LAMBDA * math.sqrt(num_terms) * roundoff + num_terms * roundoff**2 / (1 - roundoff)
    return math.expm1(exponent) if exponent < 1 else math.inf


def compute_comm_tolerance(roundoff: float, num_ranks: int, num_steps: int) -> float:
    """Return the additional tolerance between two runs if ranks send gradients in lower precision.

    Each rank rounds the gradients that it sends, and the gradients of `num_ranks` ranks are added. Therefore the
    relative error of the gradient of a step is gamma_n with n = `num_ranks`. As long as the learning rate times the
    curvature is less than 2, which stable training requires, the next gradient changes by less than twice this error.
    Hence the factor 2 x steps.
    """
    return 2 * num_steps * compute_worst_case_bound(roundoff, num_ranks)


def compute_tolerance(roundoff: float, num_terms: int, depth: int, num_steps: int) -> float:
    """Return the tolerance between two runs, relative to the largest magnitude of the compared values.

    - `num_terms`: the number of terms in the longest sum.
    - `depth`: the number of consecutive sums of this length in a forward pass or backward pass.
    - `num_steps`: the number of optimizer steps.

    To first order in u, the errors of consecutive sums add up (Higham 2002, section 3.5), and both runs have errors.
    Hence the factor 2 x depth x steps. The bound for each sum is the smaller of the worst-case and the probabilistic
    bound. The tolerance doesn't account for models that amplify small differences from step to step, so only use it for
    a few steps.
    """
    bound = min(compute_worst_case_bound(roundoff, num_terms), compute_probabilistic_bound(roundoff, num_terms))
    return 2 * depth * num_steps * bound
