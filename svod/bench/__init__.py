"""How fast: timers, ceilings, comparisons, runs."""
