"""Whole plans: what they do otherwise than by the rules, their times, and the forms of their convolutions."""
