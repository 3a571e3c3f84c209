"""Rewrites of a graph for the devices that compute it: the order of axes in memory, the width of numbers, subnormal probabilities."""
