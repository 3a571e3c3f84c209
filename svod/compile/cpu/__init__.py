"""The CPU: its target, its threads, its runtime."""
