"""What is decided: proposals, beams, budgets."""
