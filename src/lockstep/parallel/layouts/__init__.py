"""Where parameters, gradients and the optimizer's state lie: whole on each rank, or in rows on all."""
