"""What a machine offers, as data."""
