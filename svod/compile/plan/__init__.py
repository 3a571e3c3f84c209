"""Plans: kernels and their code, ready to run."""
