"""Tests of costs and sketches on targets with groups."""
