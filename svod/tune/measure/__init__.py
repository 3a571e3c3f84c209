"""What is done with a candidate: compiled, timed, verified."""
