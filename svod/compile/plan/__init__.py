"""From kernels and their code to a plan that runs."""
