"""Lowering: a state becomes LINEAR, the instructions that every backend prints."""
