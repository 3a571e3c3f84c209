"""The loop tree between the loop nest and LINEAR: its nodes, the passes over it, its text."""
