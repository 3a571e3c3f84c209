"""The decisions of a search: proposals, beams, budgets. `svod.tune.measure` carries them out."""
