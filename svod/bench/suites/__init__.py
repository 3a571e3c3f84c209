"""The benchmarked cases and their reference results."""
