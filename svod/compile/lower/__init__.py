"""Lowering of a scheduled kernel (a state) to LINEAR, the instructions that every backend prints."""
