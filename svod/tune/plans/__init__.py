"""A whole plan: its memory, and its time with other chains."""
