"""What is benchmarked, and the right results."""
