"""What is proposed and kept: one file per strategy, behind one interface."""
