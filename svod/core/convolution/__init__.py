"""Convolutions of a graph computed by Fourier transforms of blocks: the rewrite, the block lengths, and their prices."""
