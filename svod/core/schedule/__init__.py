"""Division of a graph into kernels, in the order in which they run."""
