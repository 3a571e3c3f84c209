"""Measuring speed: timers, ceilings, comparisons, benchmark runs."""
