"""From a graph to kernels, in the order they run."""
