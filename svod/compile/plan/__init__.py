"""Plans: kernels with their code and buffers, ready to run."""
