"""The abilities of a machine, as data."""
