"""Search strategies, which propose candidates and choose the ones to keep: one file per strategy, one interface."""
