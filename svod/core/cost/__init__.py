"""What a state costs, and the chains that the costs suggest."""
