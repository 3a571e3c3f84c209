"""What to compute; it knows no machine code."""
