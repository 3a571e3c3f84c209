"""Graphs: the nodes that tensor operations build, and the memory of their values."""
