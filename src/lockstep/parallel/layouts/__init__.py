"""Where parameters, gradients and the optimizer's state are kept: whole on each rank, or in rows on all."""
