"""The one node type, its arithmetic, its text and its data."""
