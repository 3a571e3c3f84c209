"""Predicted costs of states on targets that launch grids of groups of threads, and the chains that the costs suggest there."""
