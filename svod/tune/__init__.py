"""The tuner: searches opts for the kernels of a model, and chooses a chain of opts for each."""
