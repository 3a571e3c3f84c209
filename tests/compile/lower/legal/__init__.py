"""Tests of svod.compile.lower.legal."""
