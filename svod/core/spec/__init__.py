"""The reference that everything is checked against."""
