"""Rewrites of kernels into others that compute the same by other stages: the opts ONLINE and WINOGRAD."""
