"""A kernel and the states that opts make of it."""
