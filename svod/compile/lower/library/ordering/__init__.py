"""Sorting, order of positions, and the first of each row: the library kernels SORT, ARGSORT and TOPK."""
