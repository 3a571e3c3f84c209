"""Sizes that differ from call to call, for which a graph has one plan."""
