"""Measuring candidates: compiling, timing and verifying them."""
