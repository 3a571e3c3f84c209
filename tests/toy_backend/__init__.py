"""A device of groups of threads for tests: an interpreter of LINEAR that reports what would go wrong on a GPU."""
