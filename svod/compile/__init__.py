"""Compilation of kernels to machine code and to plans, which launch them."""
