"""Predicted costs of states, and the chains that the costs suggest."""
