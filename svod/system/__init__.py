"""Helpers for processes, files and text that all parts of svod use. They do not depend on tensors or kernels."""
