"""Processes that a candidate may kill."""
