"""Rewrites instructions that a renderer does not print into instructions that it does."""
