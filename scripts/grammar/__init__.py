"""Programs that train a loop of their own, as a grammar, and a proof that their bits do not depend on the placement."""
